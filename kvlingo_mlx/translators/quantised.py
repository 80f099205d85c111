"""Matrices of 8 or 4 bits: to a translator what mlx-lm's ``quantize`` is to a model.

Affine, groups of 64 numbers along a row as the format stores it. A matrix whose rows are no
multiple of 64 long stays as it is, as in mlx-lm; so do biases and gates. A row is the whole
input of a map: every source layer read, of one head where the map is head-wise. So what is
quantised, and to what, does not depend on how a machine cuts its products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from kvlingo_mlx.backend import mx

from kvlingo_mlx.format.kinds import MATRICES
from kvlingo_mlx.format.tensor_file import Weights

BITS = (8, 4)
GROUP = 64


def check_bits(bits: int | None) -> None:
    """Refuse (ValueError) what is neither 8, 4 nor None, which means float weights."""
    if bits is not None and (type(bits) is not int or bits not in BITS):
        raise ValueError(f"quantize is {bits!r}; give 8 or 4, or leave it out for float weights")


def fits(width: int) -> bool:
    """Whether a row of this many numbers is whole groups."""
    return width % GROUP == 0


def kept(weights: Weights) -> list[str]:
    """Names of the matrices that stay as they are when a translator is quantised."""
    return [name for name in _matrices(weights) if not fits(weights.arrays[name].shape[-1])]


def check_fits(weights: Weights, bits: int) -> None:
    """Refuse (ValueError) weights of which ``bits`` would change none."""
    names = _matrices(weights)
    if len(kept(weights)) == len(names):
        width = weights.arrays[names[0]].shape[-1]
        raise ValueError(
            f"quantize={bits} would change nothing: no matrix of this translator has rows of a "
            f"multiple of {GROUP} numbers ({names[0]} has {width}); load it without"
        )


def _matrices(weights: Weights) -> list[str]:
    return [name for name in weights.arrays if name.rsplit(".", 1)[-1] in MATRICES]


@dataclass(frozen=True)
class Quantised:
    """A part of the matrices of G layers, packed.

    Heads that read the same input are one matrix, their rows stacked as in the file: MLX would
    copy a broadcast input on a CPU, and its GPU kernels have misread broadcast operands.

    Attributes:
        words: (G, 1 or H, rows, in * bits / 32), ``bits`` a number, the first lowest.
        scales: (G, 1 or H, rows, in / 64).
        biases: What stands for a group's 0, shaped as the scales.
        bits: 8 or 4.
        heads: Heads of the result, which share the rows where the second axis has 1.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    heads: int

    @classmethod
    def of(cls, matrices: mx.array, bits: int, *, stack_heads: bool, wide: bool) -> Self:
        """Quantise (G, 1, H, rows, in) in its own dtype, at once, so that its floats can go.

        Args:
            matrices: What to quantise.
            bits: 8 or 4.
            stack_heads: All heads read the same input.
            wide: Keep scales and biases in float32, as a CPU has its weights.
        """
        groups, _, heads, rows, width = matrices.shape
        shape = (groups, 1, heads * rows) if stack_heads else (groups, heads, rows)
        words, *numbers = mx.quantize(matrices.reshape(*shape, width), GROUP, bits)
        scales, biases = (a.astype(mx.float32) for a in numbers) if wide else numbers
        mx.eval(words, scales, biases)
        return cls(words, scales, biases, bits, heads)

    def __getitem__(self, layers: slice) -> Quantised:
        """The matrices of some of the layers."""
        words, scales, biases = self.words[layers], self.scales[layers], self.biases[layers]
        return Quantised(words, scales, biases, self.bits, self.heads)

    def product(self, inputs: mx.array) -> mx.array:
        """What matrices make of (G, B, 1 or H, T, in): (G, B, H, T, rows).

        In float32, or in 16 bits where inputs and scales both are.
        """
        groups, batch, read, tokens, width = inputs.shape
        flat = inputs.swapaxes(1, 2).reshape(groups, read, batch * tokens, width)
        out = mx.quantized_matmul(
            flat, self.words, self.scales, self.biases, group_size=GROUP, bits=self.bits
        )
        out = out.reshape(groups, read, batch, tokens, self.heads // read, -1)
        return out.transpose(0, 2, 1, 4, 3, 5).reshape(groups, batch, self.heads, tokens, -1)

    def floats(self) -> mx.array:
        """The numbers that are multiplied by, (G, 1, H, rows, in) in float32."""
        scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
        out = mx.dequantize(self.words, scales, biases, GROUP, self.bits)
        return out.reshape(len(out), 1, self.heads, -1, out.shape[-1])

    @property
    def size(self) -> int:
        """Numbers in the matrices."""
        return math.prod(self.scales.shape) * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes they take: 9 or 5 bits a number with scales in float32, 8.5 or 4.5 in 16 bits."""
        return self.words.nbytes + self.scales.nbytes + self.biases.nbytes
