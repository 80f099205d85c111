"""A method's spread over seeds beside its error over items (appendix "Seeds and error bars")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.evaluation.compare import Outcome
from kvlingo_mlx.evaluation.error_bars import Mean


@dataclass(frozen=True)
class Cell:
    """One score of one condition that has several seeds.

    Attributes:
        task: The task's name.
        metric: The metric, with the group of items where there are several.
        condition: The condition's name.
        seeds: Each seed's mean over items, with its standard error.
    """

    task: str
    metric: str
    condition: str
    seeds: tuple[Mean, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean([seed.value for seed in self.seeds]))

    @property
    def seed_sd(self) -> float:
        """The sample standard deviation of the seeds' scores; NaN for one seed."""
        return spread([seed.value for seed in self.seeds])

    @property
    def item_error(self) -> float:
        """The standard error over items of one seed's score, the first one's."""
        return self.seeds[0].error


def spread(scores: Sequence[float]) -> float:
    """The sample standard deviation of scores; NaN for fewer than two."""
    return float(np.std(scores, ddof=1)) if len(scores) > 1 else float("nan")


def cells(outcomes: Iterable[Outcome]) -> list[Cell]:
    """Every score of every condition with several seeds, in the outcomes' order."""
    return [
        Cell(
            outcome.task,
            metric if len(tables[0]) == 1 else f"{metric} ({group})",
            condition,
            tuple(table[group][metric] for table in tables),
        )
        for outcome in outcomes
        for condition, tables in outcome.seeds.items()
        for group in tables[0]
        for metric in outcome.metrics
        if metric in tables[0][group]  # XQuAD's difference is of the mean over seeds alone
    ]
