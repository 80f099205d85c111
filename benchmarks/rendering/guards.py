"""The sections on the guard, and on translators trained on prefixes of several lengths."""

from __future__ import annotations

from rendering.records import records, source, table

WIDTHS = ("2", "3", "4", "6")


def guards() -> str:
    """Alarms by what is wrong and by the limit, beside what was lost."""
    found = [
        record
        for record in records("guard")
        if "rates" in record["results"] and record["config"]["tokens"] == 32
    ]
    latest = {record["config"]["pair"]: record for record in found}
    if not latest:
        return ""
    parts = [
        "## What a guard catches\n",
        "KL between source and target over a prompt's last 32 tokens, which the target reads from\n"
        "the translated cache; *own* is the same from its own cache. Alarms: the share of prompts\n"
        "above the receipt's mean by so many of its standard deviations (4 is the guard's limit;\n"
        "in the first row they are false). Area: the chance that such a prompt is above one of\n"
        "the first row; by KL, and by the excess of the target's loss. The answer's KL is to the\n"
        "one from its own cache; right: of the asked values, with the translation and without.\n",
    ]
    for pair, record in latest.items():
        rows = []
        for name, row in record["results"]["rates"].items():
            means = row["means"]
            right = f"{means['hit']:.2f} of {means['native_hit']:.2f}"
            rows.append(
                [name, str(row["prompts"]), f"{means['divergence']:.2f}",
                 f"{means['own_divergence']:.2f}", *(f"{row['alarms'][w]:.2f}" for w in WIDTHS),
                 f"{row['area_divergence']:.2f}", f"{row['area_excess']:.2f}",
                 f"{means['answer_kl']:.3f}", "" if means["hit"] != means["hit"] else right]
            )  # fmt: skip
        columns = ["what is wrong", "prompts", "KL", "own", *(f"{w} sd" for w in WIDTHS),
                   "area, KL", "area, loss", "answer's KL", "right"]  # fmt: skip
        parts += [f"### {pair.replace(':', ' to ')}\n", table(columns, rows), source(record)]
    parts += switches()
    return "\n".join(parts)


def switches() -> list[str]:
    """The shares of a conversation's switches that a guard doubts, by what is wrong."""
    latest = {r["config"]["pair"]: r for r in records("guard") if "switches" in r["results"]}
    if not latest:
        return []
    names = next(iter(latest.values()))["results"]["switches"]
    rows = [
        [name, *(f"{r['results']['switches'][name]['alarms']:.2f} of "
                 f"{r['results']['switches'][name]['switches']}" for r in latest.values())]
        for name in names
    ]  # fmt: skip
    columns = ["what is wrong", *(pair.replace(":", " to ") for pair in latest)]
    return [
        "### At the switches of conversations\n",
        "Both models in turns, three switches a conversation; the share in doubt.\n",
        table(columns, rows),
        source([*latest.values()][-1]),
    ]


def trained_lengths() -> str:
    """Recall and needles by length, of translators trained on short and on mixed prefixes."""
    found = [record for record in records("lengths") if "lengths" in record["results"]]
    if not found:
        return ""
    record = found[-1]
    parts = [
        "## Trained on short prefixes, and on mixed ones\n",
        "`short`: 4 to 28 facts, at most about 370 tokens (the shipped one and seeds 1, 2);\n"
        "`mixed`: 4 to 68, at most about 750 (seeds 0, 1, 2; `nu2` reads two source\n"
        "layers). 1,800 steps each (`tools/fit_zoo.py --facts`). Six questions a dialogue.\n",
    ]
    for rows in record["results"]["lengths"].values():
        listed = [
            [name, f"{row['recall']:.3f} ± {row['recall_se']:.3f}", f"{row['kl']:.4f}",
             f"{row['needles']:.2f} ± {row['needles_se']:.2f}"]
            for name, row in rows.items()
        ]  # fmt: skip
        tokens = next(iter(rows.values()))["tokens"]
        pair = record["config"]["pair"].replace(":", " to ")
        parts += [f"### {pair}, dialogues of {tokens:.0f} tokens\n",
                  table(["cache", "recall", "KL", "needles"], listed)]  # fmt: skip
    return "\n".join([*parts, source(record)])
