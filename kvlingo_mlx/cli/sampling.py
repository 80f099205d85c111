"""The options by which a verb that writes text chooses its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import Configured, PrefillStepSize, option

if TYPE_CHECKING:
    from kvlingo_mlx.backend import mx


def check_ranges(*checks: tuple[str, object, bool, str]) -> None:
    """Refuse the first option that is not sound, and say what to give."""
    for name, value, sound, expected in checks:
        if not sound:
            raise ValueError(f"{name} is {value}; give {expected}")


@dataclass(frozen=True, kw_only=True)
class WritingOptions(Configured):
    """The options of every verb whose model writes an answer.

    Raises:
        ValueError: A number is out of range; the message names it.
    """

    max_tokens: int = option(100, "Longest answer; -1: to the context's end.", "--max-tokens", "-m")
    temp: float = option(0.0, "Sampling temperature; 0 takes the likeliest token.")
    top_p: float = option(1.0, "Nucleus sampling.")
    top_k: int = option(0, "Sample from the best k; 0 is off.")
    min_p: float = option(0.0, "Least probability relative to the best.")
    seed: int | None = option(None, "Seed of the sampler.")
    stop: list[str] | None = option(None, "A text before which the answer ends; may be repeated.")
    prefill_step_size: PrefillStepSize = 2048

    def __post_init__(self) -> None:
        most, step, seed = self.max_tokens, self.prefill_step_size, self.seed
        check_ranges(
            ("--temp", self.temp, 0.0 <= self.temp < float("inf"), "0 or more"),
            ("--top-p", self.top_p, 0.0 < self.top_p <= 1.0, "more than 0, at most 1"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 or more"),
            ("--min-p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("--seed", seed, seed is None or 0 <= seed < 2**64, "0 to 2^64 - 1"),
            ("--stop", "empty", all(self.stop or ()), "some text"),
            ("--max-tokens", most, most > 0 or most == -1, "1 or more, or -1"),
            ("--prefill-step-size", step, step > 0, "1 or more"),
        )

    def sampler(self) -> Callable[[mx.array], mx.array]:
        """mlx-lm's sampler, with a seeded random generator."""
        from kvlingo_mlx.backend import mx

        from mlx_lm.sample_utils import make_sampler

        if self.seed is not None:
            mx.random.seed(self.seed)
        return make_sampler(self.temp, self.top_p, self.min_p, top_k=self.top_k)
