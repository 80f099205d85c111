"""The Triton kernel of :mod:`.translation`; importing this needs Triton and no GPU.

A matrix product's accumulator holds adjacent columns in one thread, so keys that come in pairs are
rotated in registers; halves would pass through shared memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How the kernel is cut: tokens and inputs (of 2 bytes) at a time, warps, pipeline stages."""

    tokens: int
    inputs: int
    warps: int
    stages: int


# A tile of 256 tokens by a head of 128 does 85 operations per byte from the L2 cache, a tile of 128
# tokens 64. A head-wise map's 128 inputs take only two steps, too few for a deep pipeline. The
# stages are in shared memory, of which a block has 227 kB on Hopper.
MIXING = Tile(tokens=256, inputs=64, warps=8, stages=4)
HEAD_WISE = Tile(tokens=128, inputs=64, warps=8, stages=2)


def translate(
    out: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    sources: torch.Tensor,
    heads: torch.Tensor | None,
    finish: tuple[torch.Tensor | None, float, torch.Tensor, torch.Tensor] | None,
) -> None:
    """Products, k_norm, RoPE, cast and layout of one side of like layers.

    Args:
        out: (L, H, T, D), the output: a span of a cache.
        states: (Ls, Hs, T, Ds), with any strides but for the last axis.
        weight: (L, H, nu * inputs, D), where inputs is Hs * Ds, or Ds with ``heads``; keys are in
            pairs if ``finish`` is given. Any strides but for the last axis.
        sources: (L, nu), int32: the source layers that each target layer reads.
        heads: (H,), int32: the source head that each target head reads; None: all are read.
        finish: A norm's weights (L, D) in pairs, if there is one, and its epsilon; cosines and
            sines (T, D / 2). All float32. None: no norm and no rotation.
    """
    count, num_heads, tokens, dim = out.shape
    width = states.shape[3]
    tile = MIXING if heads is None else HEAD_WISE
    step = math.gcd(tile.inputs * 2 // out.element_size(), width)
    blocks = triton.cdiv(tokens, tile.tokens)
    norm, eps, cos, sin = finish or (None, 0.0, out, out)  # ``out``: a placeholder, never read
    _translate[(num_heads * blocks * count,)](
        out, states, weight, sources, out if heads is None else heads,
        out if norm is None else norm, cos, sin, eps, tokens, blocks, *out.stride()[:3],
        *states.stride()[:3], *weight.stride()[:3], HEADS=num_heads, DIM=dim, WIDTH=width,
        READ=states.shape[1] if heads is None else 1, NU=sources.shape[1], TOKENS=tile.tokens,
        STEP=step, WISE=heads is not None, NORM=norm is not None, TURN=finish is not None,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _translate(
    out, states, weight, sources, heads, norm, cos, sin, eps,
    tokens, blocks, out_layer, out_head, out_token, in_layer, in_head, in_token,
    w_layer, w_head, w_input,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr,
    NU: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
    WISE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest: they read the same tokens, which are then in the L2 cache.
    program = tl.program_id(0)
    head = program % HEADS
    block = (program // HEADS) % blocks
    layer = program // (HEADS * blocks)
    row = block * TOKENS + tl.arange(0, TOKENS)
    read = tl.minimum(row, tokens - 1)  # instead of a mask, which would cost in every step
    column = tl.arange(0, DIM)
    step = tl.arange(0, STEP)
    PER_HEAD: tl.constexpr = WIDTH // STEP
    maps = weight + layer.to(tl.int64) * w_layer + head * w_head
    maps += step[:, None] * w_input + column[None, :]
    total = tl.zeros((TOKENS, DIM), tl.float32)
    for nth in tl.static_range(NU):
        source = tl.load(sources + layer * NU + nth).to(tl.int64)
        rows = states + source * in_layer + read[:, None].to(tl.int64) * in_token + step[None, :]
        if WISE:
            rows += tl.load(heads + head) * in_head
        for i in range(READ * PER_HEAD):
            x = tl.load(rows + (i // PER_HEAD) * in_head + (i % PER_HEAD) * STEP)
            w = tl.load(maps + (nth * READ * WIDTH + i * STEP) * w_input)
            total = tl.dot(x, w, total, input_precision=PRECISION)
    to = out + layer.to(tl.int64) * out_layer + head * out_head + row[:, None] * out_token
    inside = row[:, None] < tokens
    dtype = out.dtype.element_ty
    if TURN:
        HALF: tl.constexpr = DIM // 2
        half = tl.arange(0, HALF)[None, :]
        angle = read[:, None] * HALF + half
        if NORM:
            mean = tl.sum(total * total, 1) / DIM
            total = total * tl.rsqrt(mean + eps)[:, None]
            total = total * tl.load(norm + layer * DIM + column)[None, :]
        turn, lift = tl.load(cos + angle), tl.load(sin + angle)
        first, second = tl.split(tl.reshape(total, (TOKENS, HALF, 2)))
        tl.store(to + half, (first * turn - second * lift).to(dtype), mask=inside)
        tl.store(to + HALF + half, (second * turn + first * lift).to(dtype), mask=inside)
    else:
        tl.store(to + column[None, :], total.to(dtype), mask=inside)
