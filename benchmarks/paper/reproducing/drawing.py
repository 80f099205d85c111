"""The pictures of figures: their numbers drawn, a panel for each pair and way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.results import Result, Value
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.reporting import pictures

LINES = ("turns", "curves", "lengths")  # what is drawn over an order: turns, steps, lengths
Panels = dict[str, dict[str, dict[str, Mean]]]


def draw(entry: Entry, result: Result, path: Path) -> None:
    """Write a figure's picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if entry.extra.get("statistic") == "cka":
        drawn = _maps(result)
    elif entry.maker in LINES:
        drawn = _lines(panels(result))
    else:
        drawn = _bars(panels(result))
    pictures.save(drawn, path, f"{entry.label}: {entry.title}")


def panels(result: Result) -> Panels:
    """A result's numbers by panel (all names of a row but the last), column and last name."""
    found: Panels = {}
    for line in result.lines:
        columns = found.setdefault(", ".join(line.names[:-1]), {})
        for column, value in zip(result.columns, line.values, strict=True):
            if (mean := _mean(value)) is not None:
                columns.setdefault(column, {})[line.names[-1]] = mean
    return {title: columns for title, columns in found.items() if columns}


def _mean(value: Value) -> Mean | None:
    if isinstance(value, Mean):
        return value if value.count else None
    return Mean(value, math.nan, 1) if isinstance(value, int | float) else None


def _lines(panels: Panels) -> Any:
    """A panel beside the other for each title: lines by column, over groups such as turns."""
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
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _bars(shown: Mapping[str, Mapping[str, Mapping[str, Mean]]]) -> Any:
    """A panel below the other for each title: bars by column, side by side for each group."""
    figure = pictures.figure(2 * pictures.WIDTH, pictures.HEIGHT * max(len(shown), 1))
    every = figure.subplots(max(len(shown), 1), 1, squeeze=False)[:, 0]
    for axes, (title, columns) in zip(every, shown.items(), strict=False):
        groups = list(dict.fromkeys(group for means in columns.values() for group in means))
        width = 0.8 / len(columns)
        for place, (name, means) in enumerate(columns.items()):
            known = [(at, means[group]) for at, group in enumerate(groups) if group in means]
            places = [at + (place - (len(columns) - 1) / 2) * width for at, _ in known]
            errors = [0.0 if math.isnan(mean.error) else mean.error for _, mean in known]
            axes.bar(places, [mean.value for _, mean in known], width, yerr=errors, label=name)
        axes.set(title=title)
        ticks = [group.partition(" of ")[0] for group in groups]  # a mean's name lists its set
        axes.set_xticks(range(len(groups)), ticks, fontsize="small")
        axes.legend(fontsize="x-small", ncols=4)
    return figure


def _maps(result: Result) -> Any:
    """A map for each pair: target layers down, source layers across."""
    from matplotlib.ticker import MaxNLocator

    by_pair: dict[str, list[list[float]]] = {}
    for line in result.lines:
        known = [float(v) for v in line.values if isinstance(v, int | float)]
        by_pair.setdefault(line.names[0], []).append(known)
    figure = pictures.figure(pictures.WIDTH * len(by_pair))
    every = figure.subplots(1, len(by_pair), squeeze=False)[0]
    for axes, (title, rows) in zip(every, by_pair.items(), strict=True):
        drawn = axes.imshow(rows, vmin=0, vmax=1)
        axes.set(title=title, xlabel="source layer", ylabel="target layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(drawn, ax=axes, label="CKA")
    return figure
