"""Sections on other ways to a first token, and on what other programs do in their closed forms."""

from __future__ import annotations

import numpy as np

from rendering.records import records, source, table

OURS = ("ours", "ours, layers by R2", "ours, with its receipt")
CONTROLS = ("hidden", "shuffled")
SCORES = ("asked", "recall", "needles")


def frontier(rows: dict[str, dict[str, float]], score: str) -> list[str]:
    """The ways than which no other is both faster and at least as good, controls left out."""
    order = sorted(
        (row["of_native"], -row[score], name) for name, row in rows.items() if name not in CONTROLS
    )
    found, best = [], -1.0
    for _, lost, name in order:
        if -lost > best:
            found.append(name)
            best = -lost
    return found


def by_length(found: list[dict]) -> dict[str, dict[str, dict]]:
    """The latest record of each pair and length, the lengths in order."""
    latest: dict[str, dict[str, dict]] = {}
    for record in found:
        if record["config"]["what"] == "ways":
            own = latest.setdefault(record["config"]["pair"], {})
            own |= dict.fromkeys(record["results"], record)
    return {
        pair: dict(sorted(own.items(), key=lambda item: int(item[0])))
        for pair, own in latest.items()
    }


def with_error(row: dict[str, float], name: str) -> str:
    return f"{row[name]:.2f} ± {row[f'{name}_se']:.2f}"


def peers() -> str:
    """Quality against time to the first token, by way and length."""
    found = by_length(records("peers"))
    if not found:
        return ""
    parts = [
        "## Ways to the first token after a switch\n",
        "The source has read the prompt; then each way fills the target's cache. `asked`: recall\n"
        "of the question that stands in the prompt; `recall`: of all six of a dialogue, of which\n"
        "five come after the first answer, so no way that chooses by the prompt can know them;\n"
        "`needles`: values found in a haystack. Time to the first token is a share of the\n"
        "target's own reading of the same prompt. **Bold**: no other way is both faster and at\n"
        "least as good at `asked`. Dialogues have a fact for every 15 tokens of the number given,\n"
        "so they are shorter than that (250, 420, 750, 1,280 tokens); a haystack has the number.\n"
        "It is one message, so `last messages` reads all of it. The models are tiny: overheads\n"
        "weigh more than they would. Other work ran on the second core.\n",
    ]  # fmt: skip
    for pair, lengths in found.items():
        for length, record in lengths.items():
            rows = record["results"][length]
            best = frontier(rows, "asked")
            cells = [
                [f"**{name}**" if name in best else name, *(with_error(row, s) for s in SCORES),
                 f"{row['kl']:.3f}", f"{row['of_native']:.2f}"]
                for name, row in rows.items()
            ]  # fmt: skip
            parts.append(f"### {pair.replace(':', ' to ')}, {length} tokens\n")
            parts.append(table(["way", *SCORES, "KL", "time"], cells))
        parts += dict.fromkeys(map(source, lengths.values()))
    parts.append("![Recall against time](figures/peers.png)\n")
    return "\n".join(parts)


def peer_fits() -> str:
    """Closed forms at equal source layers on equal tokens."""
    latest = {r["config"]["k"]: r for r in records("peers") if r["config"]["what"] == "fit"}
    found = list(latest.values())
    if not found:
        return ""
    rows = []
    for record in found:
        results, config = record["results"], record["config"]
        times = {name: float(np.median(taken)) for name, taken in results["samples_s"].items()}
        whole = times["theirs"]
        peaks = results["peak_bytes"]
        rows.append([
            str(config["k"]),
            *(f"{times[name] / whole:.2f}" for name in OURS),
            f"{times['reading alone'] / whole:.2f}", f"{whole:.1f} s",
            f"{peaks['ours'] / peaks['theirs']:.2f}",
        ])  # fmt: skip
    config = found[-1]["config"]
    return "\n".join([
        "## Fitting beside VeloxQuant-MLX\n",
        f"A closed form of random models ({config['layers']} layers, {config['heads']} KV heads\n"
        f"of {config['head_dim']}), {config['texts']} texts of {config['tokens']} tokens, both "
        "programs in turns; shares of its time\nand memory, reading included.\n",
        table(["source layers", "ours, by depth", "ours, by R2", "ours and its receipt",
               "reading alone", "its time",
               "memory, ours / its"], rows),
        source(found[-1]),
    ])  # fmt: skip


def options() -> str:
    """What other programs do in their closed forms, one by one."""
    latest = {r["config"]["pair"]: r for r in records("closed_form_options")}
    if not latest:
        return ""
    names = [name for name in next(iter(latest.values()))["results"] if name != "native"]
    rows = []
    for name in names:
        cells = [name]
        for what in ("kl", "after"):
            shares = [
                r["results"][name][what] / r["results"]["ours"][what]
                for r in latest.values()
                if what in r["results"].get(name, {})
            ]
            cells.append(
                f"{np.exp(np.mean(np.log(shares))):.2f} ({min(shares):.2f} to {max(shares):.2f})"
                if shares else ""
            )  # fmt: skip
        gained = [
            r["results"][name]["hits"] - r["results"]["ours"]["hits"] for r in latest.values()
        ]
        cells.append(f"{np.mean(gained):+.3f} ({min(gained):+.3f} to {max(gained):+.3f})")
        rows.append(cells)
    record = list(latest.values())[-1]
    config = record["config"]
    return "\n".join([
        "## What other programs do in their closed forms\n",
        f"{len(latest)} pairs of the zoo, {config['talks']} conversations, up to {config['nu']}\n"
        "source layers. KL as a share of ours (geometric mean, least and most in brackets), at\n"
        f"once and after {config['steps']} steps of distillation; recall less ours.\n",
        table(["closed form", "KL", "KL after steps", "recall"], rows),
        source(record),
    ])  # fmt: skip
