"""The section on conversations that switch models at every turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.paper.evaluation.figures import by_group
from kvlingo_mlx.evaluation.error_bars import over_items
from kvlingo_mlx.reporting import pictures
from rendering.records import HERE, records, source, table

CONDITIONS = ("reprefill", "alternated", "one switch", "naive", "shuffled", "facts hidden")
Hits = dict[str, dict[str, np.ndarray]]  # by order and condition, a row a dialogue, over all seeds


def conversations() -> str:
    """Recall turn by turn while two models alternate, by strategy."""
    groups: dict[str, list[dict]] = {}
    for record in records("conversations"):
        shared = {k: v for k, v in record["config"].items() if k != "conditions"}
        shared["maps"] = maps_of(record)
        groups.setdefault(json.dumps(shared), []).append(record)
    parts = [
        "## Ten turns, the models alternating\n\n"
        "Share of answers with the right value, by turn: means over seeds (of the dialogues),\n"
        "with standard errors over dialogues. When alternated, the facts are read once, by who\n"
        "answers first; the other model, which answers at even turns, has them by translation\n"
        "alone. `one switch` has the first model answer all turns but the one scored.\n"
        "`shuffled` and `facts hidden` are controls of `alternated`. Linear maps are the\n"
        "package's own; the MLPs of tests/zoo/turns come from `python tools/fit_zoo.py --kind mlp\n"
        "--turns --steps 1500 --lr 3e-3`, prefixes of which end at any question.\n"
    ]
    parts += [conversation_group(found) for found in groups.values()]
    return "\n".join(parts) if groups else ""


def maps_of(record: dict) -> str:
    """Which translators a run used: the package's linear ones, or those of a folder."""
    return "MLPs" if "--translators tests/zoo/turns" in record["command"] else "linear maps"


def conversation_group(found: Sequence[dict]) -> str:
    """The tables and the figure of runs that differ in their seeds and conditions alone."""
    config, hits = found[0]["config"], pooled(found)
    turns = "as written" if config["verbatim"] else "as the template has them"
    maps = maps_of(found[0])
    title = f"### {config['pair'].replace(':', ' and ')}, {maps}, earlier turns {turns}\n"
    seeds = len({record["results"]["seed"] for record in found})
    parts = [title, f"{config['dialogues']} dialogues of each of {seeds} seeds.\n"]
    for order, by_name in hits.items():
        rows = [[name, *map(turn_cell, rows.T)] for name, rows in by_name.items()]
        columns = [order, *(f"turn {turn + 1}" for turn in range(config["questions"]))]
        parts.append(table(columns, rows))
    name = "conversations" if config["verbatim"] else "conversations-template"
    name += "-mlp" if maps == "MLPs" else ""
    pictures.save(conversation_figure(hits), HERE / "figures" / f"{name}.png")
    picture = f"![Recall by turn and strategy](figures/{name}.png)\n"
    sources = dict.fromkeys(source(record) for record in found)
    return "\n".join([*parts, last_turns(hits), picture, *sources])


def pooled(found: Sequence[dict]) -> Hits:
    """Hits of all seeds; every seed has as many dialogues, so the mean is one over seeds too."""
    rows: dict[str, dict[str, list]] = {}
    for record in found:
        for order, by_name in record["results"]["hits"].items():
            for name, hits in by_name.items():
                rows.setdefault(order, {}).setdefault(name, []).extend(hits)
    return {
        order: {name: np.array(by_name[name]) for name in sorted(by_name, key=CONDITIONS.index)}
        for order, by_name in rows.items()
    }


def turn_cell(hits: np.ndarray) -> str:
    return f"{hits.mean():.2f} ± {standard_error(hits):.2f}"


def standard_error(values: np.ndarray) -> np.ndarray:
    """Over rows."""
    return np.std(values, ddof=1, axis=0) / np.sqrt(len(values))


def last_turns(hits: Hits) -> str:
    """What alternating loses against re-prefill, and against one switch: first, last, all."""
    columns = ["", "order", "turn 2", "last turn", "even turns"]
    rows = []
    for other in ("reprefill", "one switch"):
        lost = {
            order: by_name[other] - by_name["alternated"]
            for order, by_name in hits.items()
            if {other, "alternated"} <= by_name.keys()
        }
        if lost:
            lost["both"] = np.concatenate(list(lost.values()))
        for order, drop in lost.items():
            shown = (drop[:, 1], drop[:, -1], drop[:, 1::2].mean(axis=1))
            rows.append([f"{other} less alternated", order, *map(signed, shown)])
    return table(columns, rows) if rows else ""


def signed(values: np.ndarray) -> str:
    return f"{values.mean():+.3f} ± {standard_error(values):.3f}"


def conversation_figure(hits: Hits) -> Any:
    """A panel an order, a line a condition."""
    panels = {
        order: {
            name: {f"turn {turn + 1}": over_items(row) for turn, row in enumerate(rows.T)}
            for name, rows in by_name.items()
        }
        for order, by_name in hits.items()
    }
    return by_group(panels, "right answers")
