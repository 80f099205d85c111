"""The fitting norms of stage 1. NumPy only.

Paper: section "Training the translator", paragraph "Closed-form translators with other norms",
equation (3.4); appendix "Measuring the distance between caches".

A norm multiplies each prefix position's residual by a scalar. The scalar is 1 for Frobenius,
larger than 1 for the first four positions under ``sink_S``, and the attention that the
continuation pays to the position under ``attention_mass``.
"""

from collections.abc import Callable

import numpy as np

SINK_TOKENS = 4
ATTENTION_NORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "attention_mass": lambda mass: mass,
    "attention_fisher": lambda mass: mass * (1.0 - mass),
}
SINK_NORMS = {f"sink_{factor}": float(factor) for factor in (2, 4, 8, 16, 32)}
NORMS = ("frobenius", *SINK_NORMS, *ATTENTION_NORMS)


def norm_named(name: str) -> str:
    """A norm's full name; ``attention`` is short for attention_mass.

    Raises:
        ValueError: There is no such norm.
    """
    norm = "attention_mass" if name == "attention" else name
    if norm not in NORMS:
        raise ValueError(f"norm is {name!r}; it must be one of {', '.join(NORMS)}")
    return norm


def token_weights(
    norm: str, num_tokens: int, attention_mass: Callable[[], np.ndarray]
) -> np.ndarray | None:
    """The weights (N target layers or 1, T prefix tokens) of a sample; None if all are 1.

    ``attention_mass`` returns the attention (N, T) paid to each position, in float64; only norms
    that need it call it.
    """
    if norm == "frobenius":
        return None
    if norm in ATTENTION_NORMS:
        return ATTENTION_NORMS[norm](attention_mass())
    weights = np.ones((1, num_tokens))
    weights[:, :SINK_TOKENS] = SINK_NORMS[norm]
    return weights
