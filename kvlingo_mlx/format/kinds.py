"""The kinds of translators, a row each: what whoever stores, checks, runs or trains one asks.

NumPy only, for both runtimes. A new kind is a row here and a file in ``translators/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

SIDES = ("keys", "values")
Formula = Callable[[Mapping[str, Any], Any, Callable[[Any], Any]], Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a map.

    ``axes`` are those of one head of a head-wise map, and of all heads of a head-mixing one:
    ``outputs``, ``inputs`` and ``hidden`` units. ``heads`` and ``all`` (outputs of all heads) are
    of the whole target layer, whatever the map.
    """

    axes: tuple[str, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether it is multiplied by."""
        return len(self.axes) == 2

    @property
    def reads_states(self) -> bool:
        """Whether it is multiplied by what a source wrote."""
        return self.axes[-1] == "inputs"

    @property
    def of_hidden(self) -> bool:
        """Whether its rows are hidden units."""
        return self.axes[0] == "hidden"

    @property
    def by_head(self) -> bool:
        """Whether a head-wise map has one of its own for each head."""
        return self.axes[0] not in ("heads", "all")


# By the last part of a tensor's name in a file.
TENSORS = {
    "weight": Tensor(("outputs", "inputs")),
    "w1": Tensor(("hidden", "inputs")),
    "b1": Tensor(("hidden",)),
    "w2": Tensor(("outputs", "hidden")),
    "b2": Tensor(("outputs",)),
    "gate": Tensor(("heads",)),
    "bias": Tensor(("all",)),
}
MATRICES = tuple(name for name, tensor in TENSORS.items() if tensor.is_matrix)


def linear(tensors: Mapping[str, Any], x: Any, gelu: Callable[[Any], Any]) -> Any:
    """W x, of rows x: (T, in) or (heads, T, in)."""
    return x @ tensors["weight"].mT


def two_layers(tensors: Mapping[str, Any], x: Any, gelu: Callable[[Any], Any]) -> Any:
    """W2 gelu(W1 x + b1) + b2."""
    hidden = gelu(x @ tensors["w1"].mT + tensors["b1"][..., None, :])
    return hidden @ tensors["w2"].mT + tensors["b2"][..., None, :]


def summed(tensors: Mapping[str, Any], x: Any, gelu: Callable[[Any], Any]) -> Any:
    """A linear map and one of two layers."""
    return linear(tensors, x, gelu) + two_layers(tensors, x, gelu)


@dataclass(frozen=True)
class KindSpec:
    """A kind of translator.

    Attributes:
        kind: What ``translator_config.json`` calls it.
        tensors: Last names of the tensors that every map has.
        optional: Those that all maps have or none; applied to the formula's result.
        formula: What a map computes, of NumPy or PyTorch arrays, gates and biases left out.
        nonzero: The tensor that is all zero before any training.
        solved: Whether stage 1 solves it, or its linear part, in closed form.
        device: Module and class in ``kvlingo_mlx.translators``.
        joint: Whether one map reads and writes keys and values together.
    """

    kind: str
    tensors: tuple[str, ...]
    optional: tuple[str, ...]
    formula: Formula
    nonzero: str
    solved: bool
    device: tuple[str, str]
    joint: bool = False

    @property
    def has_hidden(self) -> bool:
        """Whether its maps have hidden units, which only training can set."""
        return "w1" in self.tensors

    @property
    def folds(self) -> bool:
        """Whether its maps are linear, so that they can be taken to a target's queries."""
        return not self.has_hidden

    @property
    def note(self) -> str:
        """What its name does not say."""
        return ", keys and values joint" if self.joint else ""

    @property
    def written(self) -> tuple[tuple[str, ...], ...]:
        """The sides that each map of a target layer writes, by map."""
        return (SIDES,) if self.joint else tuple((side,) for side in SIDES)

    @property
    def probe(self) -> str:
        """How a map's output on its probe is called; a linear one's leaves the bias out."""
        return "weight.probe_out" if self.folds else "probe_out"

    def apply(self, tensors: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        """A map on one vector in float64, as its probe has it: (outputs,) or (heads, outputs)."""
        y = self.formula(tensors, x[None], _gelu)[..., 0, :]
        if "gate" in tensors:
            gate = 1.0 / (1.0 + np.exp(-tensors["gate"]))
            y = (y.reshape(len(gate), -1) * gate[:, None]).reshape(y.shape)
        if "bias" in tensors and not self.folds:
            y = y + tensors["bias"].reshape(y.shape)
        return y


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


MLP = ("w1", "b1", "w2", "b2")
KINDS = (
    KindSpec("linear", ("weight",), ("bias",), linear, "weight", True,
             ("linear", "LinearTranslator")),
    KindSpec("linear", ("weight",), ("bias",), linear, "weight", True,
             ("joint", "JointTranslator"), joint=True),
    KindSpec("mlp", MLP, ("gate", "bias"), two_layers, "w2", False, ("mlp", "MLPTranslator")),
    KindSpec("linear_mlp", ("weight", *MLP), ("bias",), summed, "weight", True,
             ("linear_mlp", "LinearMLPTranslator")),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(spec.kind for spec in KINDS))


def kind_named(kind: str, joint: bool, head_mixing: bool = True) -> KindSpec:
    """The row of a kind.

    Raises:
        ValueError: There is none; says what was found and what was expected.
    """
    if kind not in NAMES:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(NAMES)}")
    found = [spec for spec in KINDS if (spec.kind, spec.joint) == (kind, joint)]
    if not found or (joint and not head_mixing):
        can = " or ".join(spec.kind for spec in KINDS if spec.joint)
        raise ValueError(f"joint is true, expected kind {can} with head_mixing true")
    return found[0]
