"""The fitting norms of stage 1. NumPy only.

Paper: section "Training the translator", paragraph "Closed-form translators with other norms",
equation (3.4); appendix "Measuring the distance between caches".

A norm weighs each prefix position's residual by a scalar: 1 for Frobenius, more for the
first four under ``sink_S``, the attention that the continuation pays to the position
under ``attention_mass``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SINK_TOKENS = 4

Weigher = Callable[[np.ndarray], np.ndarray]
ATTENTION_NORMS: dict[str, Weigher] = {
    "attention_mass": lambda mass: mass,
    "attention_fisher": lambda mass: mass * (1.0 - mass),
}
SINK_NORMS = {f"sink_{factor}": float(factor) for factor in (2, 4, 8, 16, 32)}
NORMS = ("frobenius", *SINK_NORMS, *ATTENTION_NORMS)
ALIASES = {"attention": "attention_mass"}


def norm_named(name: str) -> str:
    """A norm's full name.

    Raises:
        ValueError: There is no such norm.
    """
    norm = ALIASES.get(name, name)
    if norm not in NORMS:
        raise ValueError(f"norm is {name!r}; it must be one of {', '.join(NORMS)}")
    return norm


def token_weights(
    norm: str, num_tokens: int, attention_mass: Callable[[], np.ndarray]
) -> np.ndarray | None:
    """Weights (N target layers or 1, T prefix tokens) of a sample; None for 1 throughout.

    ``attention_mass`` gives the attention (N, T) paid to each position, float64; it is
    called only by the norms that need it.
    """
    if norm == "frobenius":
        return None
    if norm in SINK_NORMS:
        weights = np.ones((1, num_tokens))
        weights[:, :SINK_TOKENS] = SINK_NORMS[norm]
        return weights
    return ATTENTION_NORMS[norm](attention_mass())
