"""Figures of scores by turn, or by another group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.evaluation.compare import ALL, Outcome
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.reporting import pictures


def scores_by_turn(outcomes: Sequence[Outcome]) -> Any:
    """A figure with a panel per outcome: each condition's mean by turn, with its error."""
    panels = {
        outcome.task: {
            name: {g: means[outcome.metrics[0]] for g, means in table.items() if g != ALL}
            for name, table in outcome.tables.items()
        }
        for outcome in outcomes
    }
    return by_group(panels, outcomes[0].metrics[0])


def by_group(panels: Mapping[str, Mapping[str, Mapping[str, Mean]]], score: str) -> Any:
    """A figure with a panel per title: lines by name, over groups such as turns."""
    figure = pictures.figure(width=pictures.WIDTH * len(panels))
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(every, panels.items(), strict=True):
        groups = list(dict.fromkeys(group for means in lines.values() for group in means))
        for name, means in lines.items():
            found = [(groups.index(group), mean) for group, mean in means.items() if mean.count]
            places, values = zip(*((at, mean.value) for at, mean in found), strict=True)
            errors = [0.0 if math.isnan(mean.error) else mean.error for _, mean in found]
            axes.errorbar(places, values, yerr=errors, marker="o", capsize=2, label=name)
        axes.set(title=title)
        axes.set_xticks(range(len(groups)), groups, rotation=45)
    every[0].set_ylabel(score)
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper")
    return figure
