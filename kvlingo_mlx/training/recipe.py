"""The recipe of a stage that is trained by gradient."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

MATCHING = "attention"  # the objective that matches what the target's attention gathers


@dataclass(frozen=True)
class Recipe:
    """The recipe of stage 2; the defaults are the paper's."""

    steps: int = 5000  # of the optimizer
    batch: int = 8  # conversations per step
    learning_rates: tuple[float, ...] = (1e-4,)  # one translator is trained for each
    # kl, ce, mixed, attention (before the KL), or reconstruction (an MLP's stage 1)
    objective: str = "kl"
    ce_weight: float = 1.0  # the weight of the cross-entropy in mixed
    warmup: float = 0.05  # the share of steps over which the rate rises
    clip: float = 1.0  # the largest norm of a step's gradient
    validate_every: int = 250  # steps between two validations
    # The time of steps and validations together; None is any. The rate falls with the steps or with
    # the time, whichever is further on, so a run that has too little time for its steps ends with
    # the rates of a whole one.
    seconds: float | None = None
    reads: int | None = None  # conversations that all steps learn from in turn; None: ever new ones
    # Maps learn in the coordinates of ``training.coordinates``; the paper's in their weights.
    whitened: bool = False
    # The translator of the last step is kept, not the best one on the way: the laboratory's sweep
    # compares rates by it, and tries further ones.
    sweep: bool = False

    def part(self, share: float, **changes: Any) -> Self:
        """The recipe of a share of the steps and of the time."""
        seconds = None if self.seconds is None else share * self.seconds
        return replace(self, steps=round(share * self.steps), seconds=seconds, **changes)

    def place(self, step: int, spent: float) -> float:
        """How far a run is, in steps, after ``step`` steps and ``spent`` seconds."""
        share = spent / self.seconds if self.seconds else 0.0
        return max(step, min(share, 1.0) * self.steps)

    def rate_factor(self, step: float) -> float:
        """The share of the peak rate at a place (from 0): linear warm-up, then cosine to 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return min(1.0, (step + 1) / rise)
        done = (step - rise) / max(1, self.steps - rise)
        return 0.5 * (1.0 + math.cos(math.pi * done))
