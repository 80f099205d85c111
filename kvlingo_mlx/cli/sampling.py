"""How a verb that writes text chooses its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlingo_mlx.backend import mx

TEMP_HELP = "Sampling temperature; 0 is greedy."
TOP_P_HELP = "Nucleus sampling."
TOP_K_HELP = "Sample from the best k; 0 is off."
MIN_P_HELP = "Least probability relative to the best."
SEED_HELP = "Seed of the sampler."


def check_sampling(temp: float, top_p: float, top_k: int, min_p: float, seed: int | None) -> None:
    """Refuse numbers without meaning, before anything is loaded.

    Raises:
        ValueError: One of them is; says which.
    """
    check_ranges(
        ("--temp", temp, 0.0 <= temp < float("inf"), "0 or more"),
        ("--top-p", top_p, 0.0 < top_p <= 1.0, "more than 0, at most 1"),
        ("--top-k", top_k, top_k >= 0, "0 or more"),
        ("--min-p", min_p, 0.0 <= min_p <= 1.0, "0 to 1"),
        ("--seed", seed, seed is None or 0 <= seed < 2**64, "0 to 2^64 - 1"),
    )


def check_ranges(*checks: tuple[str, object, bool, str]) -> None:
    """Refuse the first option that is not sound, saying what to give."""
    for name, value, sound, expected in checks:
        if not sound:
            raise ValueError(f"{name} is {value}; give {expected}")


def sampler_of(
    temp: float, top_p: float, top_k: int, min_p: float, seed: int | None
) -> Callable[[mx.array], mx.array]:
    """mlx-lm's sampler, its random numbers seeded."""
    from kvlingo_mlx.backend import mx

    from mlx_lm.sample_utils import make_sampler

    if seed is not None:
        mx.random.seed(seed)
    return make_sampler(temp, top_p, min_p, top_k=top_k)
