"""The section on hybrids: ways to hand recurrent states over."""

from __future__ import annotations

import numpy as np

from rendering.records import records, source, table


def recurrent() -> str:
    """What a hybrid's answers need, and what each way to hand it over keeps of them."""
    found = records("recurrent")
    if not found:
        return ""
    parts = ["## Models with linear attention\n"]
    for record in (r for r in found if "parts" in r["config"]):
        parts += [
            f"### What the answers of {record['config']['parts']} need\n",
            table(["its own cache", "recall", "KL"], _rows([record])),
            source(record),
        ]
    pairs: dict[tuple, list[dict]] = {}
    for record in found:
        if "pair" in record["config"]:
            config = {n: v for n, v in record["config"].items() if n not in ("seed", "parts")}
            pairs.setdefault(tuple(sorted((n, str(v)) for n, v in config.items())), []).append(
                record
            )
    for group in pairs.values():
        config = group[0]["config"]
        title = config["pair"].replace(":", " to ")
        steps = f"; distilled in {config['steps']} steps" if config["steps"] else ""
        parts += [
            f"### {title}, seeds of the data: {len(group)}{steps}\n",
            "Mean over seeds, and the least and the most.\n",
            table(["cache", "recall", "KL"], _rows(group)),
            source(group[-1]),
        ]
    return "\n".join(parts)


def _rows(group: list[dict]) -> list[list[str]]:
    rows = []
    for name in group[0]["results"]:
        hits, kls = (
            [r["results"][name][key] for r in group if name in r["results"]]
            for key in ("hits", "kl")
        )
        spread = f" ({min(hits):.3f} to {max(hits):.3f})" if len(hits) > 1 else ""
        rows.append([name, f"{np.mean(hits):.3f}{spread}", f"{np.mean(kls):.4f}"])
    return rows
