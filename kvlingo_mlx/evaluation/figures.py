"""Figures of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.evaluation.compare import ALL, Outcome
from kvlingo_mlx.evaluation.tuning import Point
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.reporting.measure import median


def score_against_time(outcomes: Sequence[Outcome], times: Mapping[str, Sequence[float]]) -> Any:
    """A figure with a panel per task: its first metric over the time to the first token.

    Each condition is a point. A condition without a time, such as a control, is a horizontal line.
    """
    figure = pictures.figure(width=pictures.WIDTH * len(outcomes))
    for index, outcome in enumerate(outcomes, start=1):
        _scores(figure.add_subplot(1, len(outcomes), index), outcome, times)
    return figure


def _scores(axes: Any, outcome: Outcome, times: Mapping[str, Sequence[float]]) -> None:
    metric = outcome.metrics[0]
    axes.set(xlabel="time to first token (ms)", ylabel=f"{outcome.task}: {metric}")
    across: dict[float, list[str]] = {}
    for name, table in outcome.tables.items():
        mean = table.get(ALL, next(iter(table.values())))[metric]
        error = 0.0 if math.isnan(mean.error) else mean.error
        if name in times:
            point = 1e3 * median(times[name])
            axes.errorbar([point], [mean.value], yerr=[error], fmt="o", capsize=3, label=name)
        else:
            across.setdefault(round(mean.value, 3), []).append(name)
    for value, names in across.items():
        _line_across(axes, value, ", ".join(names))
    pictures.log_scale(axes, "x", [1e3 * median(samples) for samples in times.values()])
    axes.legend(fontsize="small")


def _line_across(axes: Any, value: float, label: str) -> None:
    axes.axhline(value, linestyle=":", linewidth=1, color="grey")
    axes.annotate(
        label,
        (1, value),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize="small",
    )


def quality_by_layers(points: Sequence[Point]) -> Any:
    """A figure of KL over time to first token: a line per way, points labelled by native layers."""
    figure = pictures.figure()
    axes = figure.add_subplot(xlabel="time to first token (ms)", ylabel="KL (nats a token)")
    for way in dict.fromkeys(point.way for point in points):
        own = [point for point in points if point.way == way]
        timed = [point for point in own if point.time is not None]
        if not timed:
            _line_across(axes, own[0].kl.value, way)
            continue
        at = [1e3 * (point.time or 0.0) for point in timed]
        axes.plot(at, [point.kl.value for point in timed], marker="o", label=way)
        for x, point in zip(at, timed, strict=True):
            axes.annotate(
                str(point.layers),
                (x, point.kl.value),
                textcoords="offset points",
                xytext=(3, 3),
                fontsize="small",
            )
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.yaxis.set_major_formatter(pictures.in_full)
    axes.legend(fontsize="small")
    return figure
