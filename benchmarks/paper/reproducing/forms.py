"""The translators that the paper compares, by short names, as options of a training.

A name is a base and what differs from it: ``mixing+r2+nu4`` is the head-mixing translator with four
source layers chosen by R2. Appendix "Training protocol" has the settings of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Readings that no translator makes.
OWN = ("small", "large")  # each model by itself
BASELINES = ("reuse", "droidspeak", "text")

BASES: dict[str, dict[str, Any]] = {
    "closed": {"steps": 0},
    "closed_head_wise": {"steps": 0, "head_mixing": False},
    "mixing": {},
    "mixed_loss": {"objective": "mixed"},
    "cross_entropy": {"objective": "ce"},
    "head_wise": {"head_mixing": False},
    "head_wise_mlp": {"kind": "mlp", "head_mixing": False},
    # Its layer is chosen greedily where depths differ, which changes nothing where they do not.
    "mixing_mlp": {"kind": "mlp", "assignment": "greedy"},
    "wide_mlp": {"kind": "mlp", "hidden": 4096, "gated": False,
                 "learning_rates": (3e-6, 1e-5, 3e-5), "stage1_rates": (1e-3,)},
    "linear_mlp": {"kind": "linear_mlp", "hidden": 4096},
    "joint": {"joint": True},
}  # fmt: skip
CHANGES: dict[str, Callable[[re.Match[str]], dict[str, Any]]] = {
    r"r2": lambda _: {"assignment": "r2"},
    r"greedy": lambda _: {"assignment": "greedy"},
    r"nu(\d+)": lambda m: {"nu": int(m[1])},
    r"hidden(\d+)": lambda m: {"hidden": int(m[1])},
    r"post_norm": lambda _: {"capture": "post_norm"},
    r"post_rope": lambda _: {"capture": "post_rope"},
    r"cap(\d+)k": lambda m: {"max_prefix": 1024 * int(m[1])},
    r"norm_(.+)": lambda m: {"norm": m[1]},
    r"steps(\d+)": lambda m: {"steps": int(m[1])},
    r"sweep": lambda _: {"sweep": True},
    r"rate(.+)": lambda m: {"learning_rates": (float(m[1]),)},
}
RECIPE = ("steps", "objective", "learning_rates", "sweep")
STREAM, STAGE1 = ("max_prefix", "plain_text"), ("stage1_rates",)


@dataclass(frozen=True)
class Form:
    """A translator's settings, as ``training.jobs.plan_of`` takes them."""

    plan: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    stage1_rates: tuple[float, ...] = ()  # of an MLP


def is_translator(name: str) -> bool:
    """Whether a reading is by a translator, and not a model's own or a baseline."""
    return name not in OWN and name.partition(":")[0] not in BASELINES


def form(name: str) -> Form:
    """The settings of a translator by its name, such as ``head_wise+nu2``.

    Raises:
        ValueError: The name is none.
    """
    base, *changes = name.split("+")
    if base not in BASES:
        raise ValueError(f"there is no translator {name!r}; bases are {', '.join(BASES)}")
    found = dict(BASES[base])
    for change in changes:
        found |= _change(name, change)
    groups = {part: {k: v for k, v in found.items() if k in part} for part in (RECIPE, STREAM)}
    plan = {k: v for k, v in found.items() if k not in (*RECIPE, *STREAM, *STAGE1)}
    return Form(plan, groups[RECIPE], groups[STREAM], found.get("stage1_rates", ()))


def _change(name: str, change: str) -> dict[str, Any]:
    """What a change says; each is a pattern with what follows from it."""
    for pattern, told in CHANGES.items():
        if found := re.fullmatch(pattern, change):
            return told(found)
    raise ValueError(f"{change!r} in {name!r} changes nothing that is known")
