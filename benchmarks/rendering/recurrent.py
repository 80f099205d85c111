"""The section on hybrids: ways to hand recurrent states over."""

from __future__ import annotations

import numpy as np

from rendering.records import records, source, table


def recurrent() -> str:
    """What a hybrid's answers need, and what each way to hand it over keeps of them."""
    found, timed = records("recurrent"), records("recurrent_speed")
    if not found and not timed:
        return ""
    parts = ["## Models with linear attention\n"]
    parts += [part for record in timed[-1:] for part in _times(record)]
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
        title = "; ".join([f"{_way(config)}, seeds of the data: {len(group)}", *_options(config)])
        parts += [
            f"### {title}\n",
            "Mean over seeds, and the least and the most.\n",
            table(["cache", "recall", "KL"], _rows(group)),
            source(group[-1]),
        ]
    return "\n".join(parts)


def _way(config: dict) -> str:
    first, second = config["pair"].split(":")
    back = f", which hands it back to {first}" if config.get("back") else ""
    return f"{first} to {second}{back}"


def _options(config: dict) -> list[str]:
    """What was made and judged otherwise than by default."""
    told = []
    if config.get("state_maps"):
        told.append("states mapped")
    if config["steps"]:
        told.append(f"distilled in {config['steps']:,} steps")
    if facts := config.get("judged_facts"):
        told.append(f"judged on {facts[0]} to {facts[1]} facts")
    return told


def _times(record: dict) -> list[str]:
    """A switch beside the target's own reading."""
    rows = [
        [case, name, *(f"{min(each['samples_s'][way]):.2f} s" for way in ("switch", "read")),
         f"{each['ratio']:.2g} ({each['ratio_min']:.2g} to {each['ratio_max']:.2g})"]
        for case, found in record["results"].items()
        for name, each in found.items()
    ]  # fmt: skip
    title = (
        "### A switch beside reading: Qwen3.5-0.8B's and 4B's widths, "
        f"{record['config']['layers']} layers, random\n\n"
        "Times are the least of their rounds, the ratio a median over rounds.\n"
    )
    columns = ["tokens, maps", "recurrences", "switch", "read", "ratio"]
    return [title, table(columns, rows), source(record)]


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
