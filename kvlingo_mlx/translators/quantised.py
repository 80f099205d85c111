"""Matrices of 8 or 4 bits, quantised as mlx-lm's ``quantize`` does for models.

Quantisation is affine, in groups of 64 numbers along a row as the format stores it. As in mlx-lm, a
matrix whose row length is no multiple of 64 stays as it is; so do biases and gates. A row is the
whole input of a map: all source layers that it reads, of one head if the map is head-wise. So the
quantised numbers do not depend on how a machine splits its products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from kvlingo_mlx.backend import mx, on_gpu

from kvlingo_mlx.format.kinds import MATRICES
from kvlingo_mlx.format.tensor_file import Weights

GROUP = 64
UNPACKED = 128  # tokens from which CUDA multiplies by unpacked matrices


def fits(width: int) -> bool:
    """Whether a row of this many numbers consists of whole groups."""
    return width % GROUP == 0


def kept(weights: Weights) -> list[str]:
    """The names of the matrices that stay as they are when a translator is quantised."""
    return [name for name in _matrices(weights) if not fits(weights.arrays[name].shape[-1])]


def check_fits(weights: Weights, bits: int) -> None:
    """Refuse (ValueError) weights of which ``bits`` would change no matrix."""
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

    Heads that read the same input are one matrix, with their rows stacked as in the file: on a CPU
    MLX would copy a broadcast input, and its GPU kernels have misread broadcast operands.

    Attributes:
        words: (G, 1 or H, rows, in * bits / 32), ``bits`` per number, the first in the lowest bits.
        scales: (G, 1 or H, rows, in / 64).
        biases: The value that a packed 0 stands for, per group, shaped like the scales.
        bits: 8 or 4.
        heads: The heads of the result; they share the rows if the second axis has length 1.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    heads: int

    @classmethod
    def of(cls, matrices: mx.array, bits: int, *, stack_heads: bool, wide: bool) -> Self:
        """Quantise (G, 1, H, rows, in) in its own dtype, at once, so that the floats can be freed.

        Args:
            bits: 8 or 4.
            stack_heads: Whether all heads read the same input.
            wide: Whether scales and biases are kept in float32, as weights are on a CPU.
        """
        groups, _, heads, rows, width = matrices.shape
        shape = (groups, 1, heads * rows) if stack_heads else (groups, heads, rows)
        words, *numbers = mx.quantize(matrices.reshape(*shape, width), GROUP, bits)
        scales, biases = (a.astype(mx.float32) for a in numbers) if wide else numbers
        mx.eval(words, scales, biases)
        return cls(words, scales, biases, bits, heads)

    def __getitem__(self, place: Any) -> Quantised:
        """Some of the layers; or of each matrix's rows, where all heads are one."""
        words, scales, biases = self.words[place], self.scales[place], self.biases[place]
        return Quantised(words, scales, biases, self.bits, self.heads)

    def product(self, inputs: mx.array) -> mx.array:
        """Multiply (G, B, 1 or H, T, in) by the matrices: (G, B, H, T, rows).

        The result is in float32, or in 16 bits if inputs and scales both are.
        """
        groups, batch, read, tokens, width = inputs.shape
        flat = inputs.swapaxes(1, 2).reshape(groups, read, batch * tokens, width)
        out = mx.quantized_matmul(
            flat, self.words, self.scales, self.biases, group_size=GROUP, bits=self.bits
        )
        out = out.reshape(groups, read, batch, tokens, self.heads // read, -1)
        return out.transpose(0, 2, 1, 4, 3, 5).reshape(groups, batch, self.heads, tokens, -1)

    def is_slow(self, inputs: mx.array) -> bool:
        """Whether these inputs are multiplied sooner by floats, made for this product alone.

        On CUDA packed products took twice as long as the whole translation by floats.
        """
        return on_gpu() and not mx.metal.is_available() and inputs.shape[-2] >= UNPACKED

    def unpacked(self) -> mx.array:
        """The dequantised matrices, (G, 1, H, rows, in) in the scales' dtype."""
        out = mx.dequantize(self.words, self.scales, self.biases, GROUP, self.bits)
        return out.reshape(len(out), 1, self.heads, -1, out.shape[-1])

    def floats(self) -> mx.array:
        """The dequantised matrices in float32."""
        scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
        return replace(self, scales=scales, biases=biases).unpacked()

    @property
    def size(self) -> int:
        """The number of numbers in the matrices."""
        return math.prod(self.scales.shape) * GROUP

    @property
    def nbytes(self) -> int:
        """Their bytes: 9 or 5 bits a number with scales in float32, 8.5 or 4.5 in 16 bits."""
        return self.words.nbytes + self.scales.nbytes + self.biases.nbytes
