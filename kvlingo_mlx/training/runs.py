"""Translators in training, one for each learning rate, and the best translator so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.translator import TorchTranslator


@dataclass
class Run:
    """One translator in training.

    ``diverged_at`` is the step at which its training or held-out loss stopped being finite, or
    None; no step is taken after it. ``kl_sum`` and ``kl_steps`` cover the steps since the last
    validation.
    """

    rate: float
    translator: TorchTranslator
    optimizer: torch.optim.AdamW
    held_out: float = math.inf
    diverged_at: int | None = None
    loss: float = math.nan
    kl: float = math.nan
    kl_sum: float = 0.0
    kl_steps: int = 0

    @property
    def train_kl(self) -> float:
        """The mean KL of the steps since the last validation."""
        return self.kl_sum / self.kl_steps if self.kl_steps else math.nan

    def update(self, step: int, recipe: Recipe) -> None:
        """Take one clipped AdamW step with the current gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * recipe.rate_factor(step)
        torch.nn.utils.clip_grad_norm_(self.translator.tensors.values(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Best:
    """The translator of lowest held-out KL (or reconstruction error) so far, on the CPU."""

    rate: float
    step: int
    held_out: float
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, run: Run, step: int) -> Best:
        """A copy of a run's current translator."""
        copies = {n: t.detach().cpu().clone() for n, t in run.translator.tensors.items()}
        return cls(run.rate, step, run.held_out, copies)


def start_runs(
    config: TranslatorConfig,
    arrays: Mapping[str, np.ndarray],
    rates: Sequence[float],
    device: torch.device,
) -> list[Run]:
    """A run for each learning rate, all from the same tensors."""
    runs = []
    for rate in rates:
        translator = TorchTranslator.from_arrays(config, arrays, device)
        optimizer = torch.optim.AdamW(list(translator.tensors.values()), lr=rate, weight_decay=0.0)
        runs.append(Run(rate, translator, optimizer))
    return runs
