"""The options of a verb that writes text."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.cli.command import Configured
from kvlingo_mlx.options import ANSWER, COUNT, SamplingOptions, option


def check_ranges(*checks: tuple[str, object, bool, str]) -> None:
    """Refuse the first option that is not sound, and say what to give."""
    for name, value, sound, expected in checks:
        if not sound:
            raise ValueError(f"{name} is {value}; give {expected}")


@dataclass(frozen=True, kw_only=True)
class WritingOptions(SamplingOptions, Configured):
    """The options of every verb whose model writes an answer."""

    max_tokens: int = option(
        100, "Longest answer; -1: to the context's end.", "--max-tokens", "-m", kind=ANSWER
    )
    prefill_step_size: int = option(2048, "Tokens per prefill chunk.", kind=COUNT)
