"""The objectives of stage 2.

Paper: section "Training the translator", equation (3.3); appendix "Objective ablation:
cross-entropy and mixed objectives".

Losses are means over a continuation's tokens. Each runtime computes them (``losses.py``) from final
hidden states, one block of tokens at a time: with a vocabulary of 150,000, two copies of a whole
continuation's logits would not fit.
"""

from dataclasses import dataclass
from typing import Any

BLOCK = 256  # tokens whose logits are in memory at once
OBJECTIVES = {"kl": (1.0, 0.0), "ce": (0.0, 1.0), "mixed": (1.0, 1.0)}


@dataclass(frozen=True)
class Objective:
    """``kl`` times KL(native || translated) plus ``ce`` times the cross-entropy of the text."""

    kl: float
    ce: float


def objective_named(name: str, ce_weight: float = 1.0) -> Objective:
    """The objective ``kl``, ``ce`` or ``mixed`` (KL plus ``ce_weight`` times cross-entropy).

    Raises:
        ValueError: There is no such objective, or ``ce_weight`` leaves nothing of it.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective is {name!r}; it must be one of {', '.join(OBJECTIVES)}")
    kl, ce = OBJECTIVES[name]
    if not kl and not ce * ce_weight:
        raise ValueError(
            f"the weight of the cross-entropy (ce_weight) is {ce_weight:g}, and the objective "
            f"{name!r} is nothing else: no step would train anything; give more than 0, or kl"
        )
    return Objective(kl, ce * ce_weight)


@dataclass(frozen=True)
class Loss:
    """A continuation's mean objective and mean KL, and the gradient of the objective.

    ``gradient`` is with respect to the student's hidden states, (M, width), in the runtime's own
    arrays. If it was not asked for, ``best`` are the student's most likely tokens, and ``agreed``
    counts those that are the teacher's most likely tokens, too.
    """

    value: float
    kl: float
    gradient: Any = None
    agreed: int = 0
    best: tuple[int, ...] = ()
