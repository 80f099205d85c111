"""Scores beside the times to a first token: the paper's two figures of quality and time."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.evaluation import compare
from kvlingo_mlx.evaluation.compare import ALL, Outcome
from kvlingo_mlx.evaluation.lineup import Condition
from kvlingo_mlx.evaluation.needles import MAGIC
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.reporting.measure import median
from kvlingo_mlx.timing.switching import switch_times


def first_tokens(
    target: LanguageModel,
    conditions: Sequence[Condition],
    tasks: Sequence[Task],
    outcomes: Sequence[Outcome],
) -> tuple[int, dict[str, list[float]]]:
    """Seconds to the first token at a switch, by condition, on an item of median length.

    The items of lm-eval are not available here, so generated prose of their length stands for them.
    The first element of the result is the length in tokens.
    """
    items = [item for task in tasks for item in task.items]
    if items:
        middle = compare.typical(items)
        prefix, read = middle.prefix, middle.read
    else:
        read = prefix = _prose(target, statistics.median_low([o.prefix_tokens for o in outcomes]))
    actions = {c.name: c.at_switch(read) for c in conditions if c.at_switch is not None}
    return len(prefix), switch_times(target, actions, prefix[-1])


def _prose(model: LanguageModel, length: int) -> tuple[int, ...]:
    """Generated sentences, cut to ``length`` tokens."""
    rng = random.Random(length)
    text = " ".join(MAGIC.prose(rng) for _ in range(length))
    return tuple(model.tokenizer.encode(text)[:length])


def score_against_time(outcomes: Sequence[Outcome], times: Mapping[str, Sequence[float]]) -> Any:
    """A figure with a panel per task: its first metric over the time to the first token.

    Each condition is a point. A condition without a time, such as a control, is a horizontal line.
    """
    figure = pictures.figure(width=pictures.WIDTH * len(outcomes))
    for index, outcome in enumerate(outcomes, start=1):
        metric = outcome.metrics[0]
        axes = figure.add_subplot(1, len(outcomes), index)
        axes.set(xlabel="time to first token (ms)", ylabel=f"{outcome.task}: {metric}")
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
            axes.axhline(value, linestyle=":", linewidth=1, color="grey")
            place: Any = {"xy": (1, value), "xycoords": ("axes fraction", "data")}
            axes.annotate(", ".join(names), fontsize="small", ha="right", va="bottom", **place)
        pictures.log_scale(axes, "x", [1e3 * median(samples) for samples in times.values()])
        axes.legend(fontsize="small")
    return figure
