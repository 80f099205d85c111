"""The kinds of translators: one table row per kind, for storing, checking, running and training.

Both runtimes use this table. A new kind needs a row here and a formula in ``translators/kinds``.
NumPy is imported only inside functions, since the command line's ``--help`` reads this table too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SIDES = ("keys", "values")
Formula = Callable[[Mapping[str, Any], Any, Callable[[Any], Any]], Any]


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


def linear(tensors: Mapping[str, Any], x: Any, gelu: Callable[[Any], Any]) -> Any:
    """W x for rows x: (T, in) or (heads, T, in)."""
    return x @ tensors["weight"].mT


def two_layers(tensors: Mapping[str, Any], x: Any, gelu: Callable[[Any], Any]) -> Any:
    """W2 gelu(W1 x + b1) + b2, the map with one hidden layer."""
    hidden = gelu(x @ tensors["w1"].mT + tensors["b1"][..., None, :])
    return hidden @ tensors["w2"].mT + tensors["b2"][..., None, :]


def summed(tensors: Mapping[str, Any], x: Any, gelu: Callable[[Any], Any]) -> Any:
    """The sum of the linear map and the map with one hidden layer."""
    return linear(tensors, x, gelu) + two_layers(tensors, x, gelu)


@dataclass(frozen=True)
class KindSpec:
    """A kind of translator."""

    kind: str  # the name in ``translator_config.json``
    tensors: tuple[str, ...]  # last parts of the names of the tensors that every map has
    optional: tuple[str, ...]  # all maps have them or none; they apply to the formula's result
    formula: Formula  # what a map computes without gates and biases, on NumPy or PyTorch arrays
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

    def apply(self, tensors: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        """Apply a map to one vector in float64, as its probe does: (outputs,), (heads, outputs)."""
        import numpy as np

        y = self.formula(tensors, x[None], _gelu)[..., 0, :]
        if "gate" in tensors:
            gate = 1.0 / (1.0 + np.exp(-tensors["gate"]))
            y = (y.reshape(len(gate), -1) * gate[:, None]).reshape(y.shape)
        if "bias" in tensors and not self.folds:
            y = y + tensors["bias"].reshape(y.shape)
        return y


def _gelu(x: np.ndarray) -> np.ndarray:
    import numpy as np

    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


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
