"""Figures of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx import pictures
from kvlingo_mlx.evaluation.compare import ALL, Outcome
from kvlingo_mlx.measure import median


def score_against_time(outcome: Outcome, times: Mapping[str, Sequence[float]]) -> Any:
    """A task's first metric over time to first token, a point for each condition.

    Conditions without a time are lines across: a control costs nothing that could be compared.
    """
    metric = outcome.metrics[0]
    figure = pictures.figure()
    axes = figure.add_subplot(xlabel="time to first token (ms)", ylabel=f"{outcome.task}: {metric}")
    for name, table in outcome.tables.items():
        mean = table.get(ALL, next(iter(table.values())))[metric]
        error = 0.0 if math.isnan(mean.error) else mean.error
        if name in times:
            point = 1e3 * median(times[name])
            axes.errorbar([point], [mean.value], yerr=[error], fmt="o", capsize=3, label=name)
        else:
            axes.axhline(mean.value, linestyle=":", linewidth=1, color="grey")
            axes.annotate(name, (1, mean.value), xycoords=("axes fraction", "data"), ha="right",
                          va="bottom", fontsize="small")  # fmt: skip
    axes.set_xscale("log")
    axes.legend(fontsize="small")
    return figure
