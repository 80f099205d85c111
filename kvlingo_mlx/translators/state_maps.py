"""Maps of recurrent states on the device: one product from each side, head by head."""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kvlingo_mlx.backend import mx

from kvlingo_mlx.format.maps import StateMap
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.translators.products import floats

TENSORS = ("left", "right")


def mapped(m: StateMap, kept: Mapping[int, mx.array], left: mx.array, right: mx.array) -> mx.array:
    """The target layer's state (B, heads, value dim, key dim) in float32, lazily.

    Args:
        kept: The source's states by layer, of the same axes.
        left: (heads, target value dim, layers x source value dim).
        right: (heads, layers x source key dim, target key dim).
    """
    left, right = (each.astype(mx.float32) for each in (left, right))
    sides = mx.split(left, len(m.reads), axis=2), mx.split(right, len(m.reads), axis=1)
    products = []
    for layer, one, other in zip(m.reads, *sides, strict=True):
        state = kept[layer].astype(mx.float32)
        if m.heads != tuple(range(state.shape[1])):
            state = mx.take(state, mx.array(m.heads), axis=1)
        products.append(one @ state @ other)
    return functools.reduce(operator.add, products)


@dataclass(frozen=True)
class StateMapped:
    """A map of a state and its tensors, which stay floats in a quantised translator."""

    map: StateMap
    left: mx.array
    right: mx.array

    @classmethod
    def of(cls, m: StateMap, weights: Weights) -> Self:
        """The map's tensors on this machine; a CPU multiplies in float32."""
        left, right = (floats(weights.arrays[f"{m.name}.{name}"], weights) for name in TENSORS)
        return cls(m, left, right)

    def __call__(self, kept: Mapping[int, mx.array]) -> mx.array:
        """The target layer's state from the source's states by layer; see :func:`mapped`."""
        return mapped(self.map, kept, self.left, self.right)

    @property
    def tensors(self) -> dict[str, mx.array]:
        """The tensors by their names in the format."""
        both = zip(TENSORS, (self.left, self.right), strict=True)
        return {f"{self.map.name}.{name}": array for name, array in both}
