"""Figures of an evaluation: quality over the time to the first token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.evaluation.compare import ALL, Outcome
from kvlingo_mlx.evaluation.tuning import Point
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.reporting.measure import median

TIME = "time to first token (ms)"


def score_against_time(outcomes: Sequence[Outcome], times: Mapping[str, Sequence[float]]) -> Any:
    """A figure with a panel per task: its first metric over the time to the first token.

    Each condition is a point. A condition without a time, such as a control, is a horizontal line.
    """
    figure = pictures.figure(width=pictures.WIDTH * len(outcomes))
    for index, outcome in enumerate(outcomes, start=1):
        metric = outcome.metrics[0]
        axes = figure.add_subplot(1, len(outcomes), index)
        axes.set(xlabel=TIME, ylabel=f"{outcome.task}: {metric}")
        across: dict[float, list[str]] = {}
        for name, table in outcome.tables.items():
            mean = table.get(ALL, next(iter(table.values())))[metric]
            error = 0.0 if math.isnan(mean.error) else mean.error
            if name in times:
                at = 1e3 * median(times[name])
                axes.errorbar([at], [mean.value], yerr=[error], fmt="o", capsize=3, label=name)
            else:
                across.setdefault(round(mean.value, 3), []).append(name)
        for value, names in across.items():
            _line_across(axes, value, ", ".join(names))
        pictures.log_scale(axes, "x", [1e3 * median(samples) for samples in times.values()])
        axes.legend(fontsize="small")
    return figure


def _line_across(axes: Any, value: float, label: str) -> None:
    axes.axhline(value, linestyle=":", linewidth=1, color="grey")
    place = {"xy": (1, value), "xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
    axes.annotate(label, fontsize="small", **place)


def quality_by_layers(points: Sequence[Point]) -> Any:
    """A figure of KL over time to first token: a line per way, points labelled by native layers."""
    figure = pictures.figure()
    axes = figure.add_subplot(xlabel=TIME, ylabel="KL (nats a token)")
    for way in dict.fromkeys(point.way for point in points):
        own = [point for point in points if point.way == way]
        timed = [(1e3 * p.time, p.kl.value, p.layers) for p in own if p.time is not None]
        if not timed:
            _line_across(axes, own[0].kl.value, way)
            continue
        axes.plot([t for t, _, _ in timed], [kl for _, kl, _ in timed], marker="o", label=way)
        near = {"textcoords": "offset points", "xytext": (3, 3), "fontsize": "small"}
        for at, kl, layers in timed:
            axes.annotate(str(layers), (at, kl), **near)
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.yaxis.set_major_formatter(pictures.in_full)
    axes.legend(fontsize="small")
    return figure
