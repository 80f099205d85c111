"""The kinds of translators: one table row per kind, for storing, checking, running and training.

NumPy, PyTorch and MLX use this table: a new kind needs a row here, and nothing else. The command
line's ``--help`` reads it too, so nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SIDES = ("keys", "values")
Activation = Callable[[Any], Any]
# What a map computes of rows, without gates and biases: from products with its matrices by name,
# its vectors by name, what products are multiplied with, and GELU of a product and a bias.
Formula = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a map."""

    # ``outputs``, ``inputs`` and ``hidden`` units are of one head in a head-wise map, of all heads
    # in a head-mixing map; ``heads`` and ``all`` (outputs of all heads) of the whole layer in both.
    axes: tuple[str, ...]
    # A constant, or drawn within 1 / sqrt(n) of zero, n being the ``inputs`` or ``hidden`` units.
    start: float | str = 0.0

    @property
    def is_matrix(self) -> bool:
        return len(self.axes) == 2

    @property
    def reads_states(self) -> bool:
        """Whether the tensor is a matrix that is applied to the source's states."""
        return self.axes[-1] == "inputs"

    @property
    def of_hidden(self) -> bool:
        """Whether the tensor's first axis is the hidden units."""
        return self.axes[0] == "hidden"

    @property
    def by_head(self) -> bool:
        """Whether a head-wise map has one such tensor for each head."""
        return self.axes[0] not in ("heads", "all")


# Keys are the last part of a tensor's name in a file.
TENSORS = {
    "weight": Tensor(("outputs", "inputs")),
    "w1": Tensor(("hidden", "inputs"), "inputs"),
    "b1": Tensor(("hidden",), "inputs"),
    "w2": Tensor(("outputs", "hidden"), "hidden"),
    "b2": Tensor(("outputs",), "hidden"),
    "gate": Tensor(("heads",), 4.0),  # sigmoid(4) = 0.98
    "bias": Tensor(("all",)),
}
MATRICES = tuple(name for name, tensor in TENSORS.items() if tensor.is_matrix)


def linear(product: Any, vector: Any, x: Any, gelu: Any) -> Any:
    """W x (paper: equation (3.1))."""
    return product("weight", x)


def two_layers(product: Any, vector: Any, x: Any, gelu: Any) -> Any:
    """W2 gelu(W1 x + b1) + b2, the map with one hidden layer (paper: "Training protocol")."""
    return product("w2", gelu(product("w1", x), vector("b1"))) + vector("b2")


def summed(product: Any, vector: Any, x: Any, gelu: Any) -> Any:
    """The sum of both (paper: appendix "Dense-to-MoE cache translation")."""
    return linear(product, vector, x, gelu) + two_layers(product, vector, x, gelu)


@dataclass(frozen=True)
class KindSpec:
    """A kind of translator."""

    kind: str  # the name in ``translator_config.json``
    tensors: tuple[str, ...]  # last parts of the names of the tensors that every map has
    optional: tuple[str, ...]  # all maps have them or none; they apply to the formula's result
    formula: Formula
    nonzero: str  # the tensor that is all zero before any training
    solved: bool  # whether stage 1 solves the map, or its linear part, in closed form
    joint: bool = False  # whether one map reads and writes keys and values together
    folds: bool = False  # whether the maps are linear, so that the target's queries can hold them
    silent: tuple[str, ...] = ()  # start at zero, so that at first only the solved part counts

    @property
    def has_hidden(self) -> bool:
        return any(TENSORS[name].of_hidden for name in self.tensors)

    @property
    def learnt(self) -> tuple[str, ...]:
        """The tensors that no closed form solves; training initialises them."""
        return tuple(name for name in self.tensors if not (self.solved and name == "weight"))

    @property
    def note(self) -> str:
        """What the kind's name leaves out, for messages."""
        return ", keys and values joint" if self.joint else ""

    @property
    def written(self) -> tuple[tuple[str, ...], ...]:
        """The sides that each map of a target layer writes, one entry per map."""
        return (SIDES,) if self.joint else tuple((side,) for side in SIDES)

    @property
    def probe(self) -> str:
        """The name of a map's output on its probe; for linear maps it leaves the bias out."""
        return "weight.probe_out" if self.folds else "probe_out"

    def apply(
        self, tensors: Mapping[str, Any], x: Any, gelu: Activation, sigmoid: Activation
    ) -> Any:
        """A map of rows x, (T, in) or (heads, T, in): (T, width), by their library's operators.

        ``tensors`` are by the last parts of their names.
        """

        def product(name: str, rows: Any) -> Any:
            return rows @ tensors[name].mT

        def vector(name: str) -> Any:
            return tensors[name][..., None, :]

        y = self.formula(product, vector, x, lambda rows, bias: gelu(rows + bias))
        y = y if y.ndim == 2 else y.swapaxes(0, 1).reshape(y.shape[1], -1)
        if "gate" in tensors:
            gate = sigmoid(tensors["gate"])[:, None]
            y = (y.reshape(len(y), len(gate), -1) * gate).reshape(len(y), -1)
        return y + tensors["bias"] if "bias" in tensors else y


MLP = ("w1", "b1", "w2", "b2")
KINDS = (
    KindSpec("linear", ("weight",), ("bias",), linear, "weight", True, folds=True),
    KindSpec("linear", ("weight",), ("bias",), linear, "weight", True, joint=True, folds=True),
    KindSpec("mlp", MLP, ("gate", "bias"), two_layers, "w2", False),
    KindSpec(
        "linear_mlp", ("weight", *MLP), ("bias",), summed, "weight", True, silent=("w2", "b2")
    ),
)
NAMES = tuple(dict.fromkeys(spec.kind for spec in KINDS))


def kind_named(kind: str, joint: bool, head_mixing: bool = True) -> KindSpec:
    """The table row of a kind.

    Raises:
        ValueError: There is no such kind; the message says what was found and expected.
    """
    if kind not in NAMES:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(NAMES)}")
    found = [spec for spec in KINDS if (spec.kind, spec.joint) == (kind, joint)]
    if not found or (joint and not head_mixing):
        can = " or ".join(spec.kind for spec in KINDS if spec.joint)
        raise ValueError(f"joint is true, expected kind {can} with head_mixing true")
    return found[0]
