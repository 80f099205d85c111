"""What the paper found best for its pairs: learning rates, and recipes that differ from the others.

Appendix "Training protocol", table "lrs"; appendix "Dense-to-MoE cache translation", table
"moemlp"; appendix on two tokenizers.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_RATE = 1e-4
NU, NORM = 1, "frobenius"
Rates = Mapping[int, float]  # by the number of source layers
NONE: Rates = {}


class PaperRate(NamedTuple):
    """One direction of one pair."""

    rate: float  # of linear, head-mixing maps of one source layer; 0 if the paper tells none
    selected: float = 0.0  # the same where that layer is chosen by R2 or greedily, if it differs
    mixing: Rates = NONE  # of more source layers
    head_wise: Rates = NONE  # of head-wise maps
    linear_mlp: float = 0.0  # of linear maps with an MLP beside them, if it differs
    nu: int = NU
    norm: str = NORM


# By the names of source and target, without their owners.
PAIRS = {
    ("Qwen3-1.7B", "Qwen3-0.6B"): PaperRate(3e-5, head_wise={1: 1e-4}),
    ("Qwen3-0.6B", "Qwen3-1.7B"): PaperRate(1e-4, head_wise={1: 1e-3}),
    ("Qwen3-8B", "Qwen3-4B"): PaperRate(3e-5, head_wise={1: 1e-4}),
    ("Qwen3-4B", "Qwen3-8B"): PaperRate(3e-5, head_wise={1: 3e-4}),
    ("Qwen3-8B", "Qwen3-0.6B"): PaperRate(
        1e-4, 3e-4, {2: 1e-4, 4: 3e-5}, {1: 3e-3, 2: 1e-3, 4: 3e-4, 8: 3e-4}
    ),
    ("Qwen3-0.6B", "Qwen3-8B"): PaperRate(
        3e-5, 3e-5, {2: 1e-5, 4: 3e-6}, {1: 3e-4, 2: 1e-4, 4: 1e-4, 8: 1e-5}
    ),
    ("Qwen3-4B", "Qwen3-1.7B"): PaperRate(
        3e-4, 3e-4, {2: 1e-4, 4: 1e-4}, {1: 3e-3, 2: 1e-3, 4: 1e-3, 8: 3e-4}
    ),
    ("Qwen3-1.7B", "Qwen3-4B"): PaperRate(
        1e-5, 1e-5, {2: 3e-6, 4: 3e-6}, {1: 1e-4, 2: 1e-4, 4: 3e-5, 8: 1e-5}
    ),
    ("gemma-3-12b-it", "gemma-3-4b-it"): PaperRate(3e-5),
    ("gemma-3-4b-it", "gemma-3-12b-it"): PaperRate(3e-5),
    ("gemma-4-E4B-it", "gemma-4-E2B-it"): PaperRate(1e-4),
    ("gemma-4-E2B-it", "gemma-4-E4B-it"): PaperRate(1e-4),
    ("Qwen3-4B", "Qwen3-30B-A3B"): PaperRate(3e-6, linear_mlp=3e-6, nu=3, norm="attention_mass"),
    ("Qwen3-30B-A3B", "Qwen3-4B"): PaperRate(1e-4, linear_mlp=3e-5, nu=3, norm="attention_mass"),
    ("Qwen3-8B", "Mistral-7B-Instruct-v0.3"): PaperRate(0.0, nu=3),
    ("Mistral-7B-Instruct-v0.3", "Qwen3-8B"): PaperRate(0.0, nu=3),
}


def best_of(source: str, target: str) -> PaperRate | None:
    """What is known of a pair, by its models' names or folders; None for others."""
    return PAIRS.get((Path(source).name, Path(target).name))


def filled(plan: Mapping[str, Any], source: str, target: str) -> dict[str, Any]:
    """A plan's options, with the pair's ``nu`` and ``norm`` where these are None.

    The paper's MLPs without a linear map read one source layer in every pair.
    """
    known = best_of(source, target) if plan.get("kind") != "mlp" else None
    known = known or PaperRate(DEFAULT_RATE)
    own = {"nu": known.nu, "norm": known.norm}
    return {**plan, **{name: value for name, value in own.items() if plan.get(name) is None}}


def rate_of(source: str, target: str, plan: Mapping[str, Any]) -> float:
    """The best learning rate of a pair for a plan of this form, else 1e-4.

    For a number of source layers that the paper has no rate of it is that of the nearest number,
    by ratio; of two that are as near, the larger number's, which is the lower rate.
    """
    known = best_of(source, target)
    kind, nu = plan.get("kind", "linear"), max(NU, plan.get("nu") or NU)
    # Of an MLP alone the paper tells no rate.
    if known is None or kind == "mlp" or not known.rate:
        return DEFAULT_RATE
    if kind == "linear_mlp":
        return known.linear_mlp or known.rate
    head_wise = not plan.get("head_mixing", True)
    rates = known.head_wise if head_wise else known.mixing if nu > 1 else {}
    if rates:
        return rates[min(rates, key=lambda number: (abs(math.log(number / nu)), -number))]
    by_depth = head_wise or plan.get("assignment", "relative_depth") == "relative_depth"
    return known.rate if by_depth else known.selected or known.rate


def is_stated(source: str, target: str, plan: Mapping[str, Any]) -> bool:
    """Whether the paper states the rate of a pair for a plan of just this form.

    Where it does not, it swept rates and does not say which was best: those of MLPs, of Base
    models, of two tokenizers, of more source layers than its table has, or chosen otherwise.
    """
    known, kind = best_of(source, target), plan.get("kind", "linear")
    if known is None or kind == "mlp" or not known.rate:
        return False
    nu = plan.get("nu") or known.nu
    if kind == "linear_mlp" or nu == known.nu > NU:
        return True
    if not plan.get("head_mixing", True):
        return nu in known.head_wise
    return nu == NU or (nu in known.mixing and plan.get("assignment") == "r2")
