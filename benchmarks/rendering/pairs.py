"""Sections on `kvlingo-mlx pair`: what it reaches, what it begins with, and ridges."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from kvlingo_mlx.making import starts as rule
from rendering.records import records, source, table

JUDGED = ("pair", "pair, shuffled", "prefix hidden", "shipped", "native")


def made() -> str:
    """What `pair` reaches from nothing, by its minutes."""
    found = sorted(
        records("pairs"),
        key=lambda r: (r["config"]["pair"], r["config"]["max_kl"] or 0.0, r["config"]["minutes"]),
    )
    if not found:
        return ""

    def form(record: dict) -> tuple:
        config = record["config"]
        return config["pair"], config["max_kl"], config["minutes"]

    rows = []
    for (pair, max_kl, minutes), group in groupby(found, form):
        each = list(group)
        layers = sorted({record["results"].get("native_layers", 0) for record in each})
        tuned = (
            f", then `tune --max-kl {max_kl}`: {', '.join(map(str, layers))} native layers"
            if max_kl
            else ""
        )
        row = [f"{pair.replace(':', ' to ')}{tuned}",
               f"{minutes:g}", str(len(each))]  # fmt: skip
        for name in JUDGED:
            scores = [record["results"]["scores"].get(name) for record in each]
            hits = [score["hits"] for score in scores if score]
            spread = f" ({min(hits):.2f} to {max(hits):.2f})" if name == "pair" and hits else ""
            row.append(f"{np.mean(hits):.2f}{spread}" if hits else "")
        kls = [record["results"]["scores"]["pair"]["kl"] for record in each]
        rows.append([*row, f"{np.mean(kls):.3f} ({min(kls):.3f} to {max(kls):.3f})"])
    return "\n".join([
        "## What `kvlingo-mlx pair` reaches from nothing\n",
        "Recall of first askings on dialogues that nothing has seen: means over seeds, least and\n"
        "most in brackets; the last column is the KL of the made translator. `shipped` is the\n"
        "package's translator of the pair.\n",
        table(["pair", "minutes", "seeds", *JUDGED, "KL"], rows),
        source(found[-1]),
    ])  # fmt: skip


def starts() -> str:
    """The closed form that `pair` begins with, beside the best in hindsight."""
    found = records("starts")
    if not found:
        return ""
    rows = []
    for record in found:
        results = record["results"]
        tried = {(each["nu"], each["norm"]): each for each in results["tried"]}

        def judge(nu: int, norm: str, tried: dict = tried) -> rule.Start:
            return rule.Start(nu, norm, tried[nu, norm]["judged"])

        # By the rule as it is now, whatever it was when these were tried.
        start, _ = rule.choose(sorted({nu for nu, _ in tried}), judge)
        chosen, first = tried[start.nu, start.norm], tried[1, rule.NORM]
        plain = results["without a ridge"]
        best = [results[f"best {when}"] for when in ("before", "after")]
        rows.append([
            record["config"]["pair"].replace(":", " to "),
            f"{chosen['nu']}, {chosen['norm']}", f"{chosen['before']:.3f}",
            f"{best[0]['nu']}, {best[0]['norm']}: {best[0]['before']:.3f}",
            f"{chosen['after']:.3f}",
            f"{best[1]['nu']}, {best[1]['norm']}: {best[1]['after']:.3f}",
            f"{plain['before']:.3f} / {first['before']:.3f}",
            f"{plain['after']:.3f} / {first['after']:.3f}",
        ])  # fmt: skip
    config = found[-1]["config"]
    return "\n".join([
        "## What `pair` begins with\n",
        f"Closed forms on {config['share']:g} tokens for each unknown of nu = 1. KL on\n"
        f"dialogues that chose nothing, before and after {config['steps']} steps of 4, of the one\n"
        "that `pair` chooses and of the best in hindsight (source layers, norm). The last\n"
        "columns: nu = 1 with no ridge, and with the chosen one.\n",
        table(["pair", "chosen", "KL", "best in hindsight", "after steps", "best in hindsight",
               "ridge: none / chosen", "after steps"], rows),
        source(found[-1]),
    ])  # fmt: skip


def ridges() -> str:
    """Closed forms on little data, with no ridge and with the chosen one."""
    found = [each for each in records("fit_data") if len({r["ridge"] for r in each["results"]}) > 1]
    if not found:
        return ""
    shares = sorted({row["share"] for row in found[0]["results"]})
    rows = []
    for record in found:
        config, cells = record["config"], []
        for share in shares:
            kls = {
                ridge: [row["kl"] for row in record["results"]
                        if (row["share"], row["ridge"]) == (share, ridge)]
                for ridge in ("0", "chosen")
            }  # fmt: skip
            cells.append(" / ".join(f"{np.mean(kls[ridge]):.3f}" for ridge in kls))
        rows.append([f"{config['source']} to {config['target']}", str(config["nu"]), *cells])
    seeds = len({row["seed"] for row in found[0]["results"]})
    return "\n".join([
        "## Closed forms on little data: with no ridge / with the chosen one\n",
        f"KL on {found[0]['config']['dialogues']} dialogues that nothing has seen, means over "
        f"{seeds} seeds,\nby the tokens that the fit saw for each unknown of a map.\n",
        table(["pair", "nu", *(f"{share:g} tokens" for share in shares)], rows),
        source(found[-1]),
    ])  # fmt: skip
