"""Translators in training, one for each learning rate, and the best translator so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Pair, Trainable


@dataclass
class Run:
    """One translator in training.

    ``diverged_at`` is the step at which its training or held-out loss stopped being finite, and
    ``dropped_at`` the one at which it was behind the others; no step is taken after either.
    ``kl_sum`` and ``kl_steps`` cover the steps since the last validation.
    """

    rate: float
    translator: Trainable
    held_out: float = math.inf
    diverged_at: int | None = None
    dropped_at: int | None = None
    loss: float = math.nan
    kl: float = math.nan
    kl_sum: float = 0.0
    kl_steps: int = 0

    @property
    def train_kl(self) -> float:
        """The mean KL of the steps since the last validation."""
        return self.kl_sum / self.kl_steps if self.kl_steps else math.nan

    def update(self, place: float, recipe: Recipe) -> None:
        """Take one clipped AdamW step with the current gradients, at a :meth:`Recipe.place`."""
        self.translator.update(self.rate * recipe.rate_factor(place), recipe.clip)


@dataclass(frozen=True)
class Best:
    """The translator of lowest held-out KL (or reconstruction error) so far."""

    rate: float
    step: int
    held_out: float
    tensors: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, run: Run, step: int) -> Best:
        """A copy of a run's current translator."""
        return cls(run.rate, step, run.held_out, run.translator.arrays())


def start_runs(
    pair: Pair, config: TranslatorConfig, arrays: Mapping[str, np.ndarray], rates: Sequence[float]
) -> list[Run]:
    """A run for each learning rate, all from the same tensors."""
    return [Run(rate, pair.trainable(config, arrays)) for rate in rates]
