"""Triton kernels of :mod:`.fast_translation`; importing this needs Triton and no GPU.

Keys come *in pairs*: the two numbers of a head that RoPE rotates together, D / 2 apart in a cache,
are adjacent. A matrix product's accumulator holds adjacent columns in one thread, so pairs are
rotated in registers; halves would pass through shared memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kvlingo_mlx.cuda.tile import Tile

# A tile of 256 tokens by a head of 128 does 85 operations per byte from the L2 cache, a tile of 128
# tokens 64. A head-wise map's 128 inputs take only two steps, too few for a deep pipeline.
MIXING = Tile(tokens=256, inputs=64, warps=8, stages=4)
HEAD_WISE = Tile(tokens=128, inputs=64, warps=8, stages=2)
FINISH_TOKENS = 32


def tile_of(mixing: bool, itemsize: int) -> Tile:
    """A tile for a kind of map and numbers of ``itemsize`` bytes.

    Every step reads the same number of bytes: the pipeline's stages are in shared memory, of which
    a block has 227 kB on Hopper.
    """
    tile = MIXING if mixing else HEAD_WISE
    return replace(tile, inputs=tile.inputs * 2 // itemsize)


def translate(
    out: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sources: torch.Tensor,
    heads: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    table: tuple[torch.Tensor, torch.Tensor] | None,
    tile: Tile | None = None,
) -> None:
    """Products, k_norm, RoPE, cast and layout of one side of every layer, in one kernel.

    Args:
        out: (L, H, T, D), the output: a span of a cache.
        states: (Ls, Hs, T, Ds), with any strides but for the last axis.
        weight: (L, H, nu * inputs, D), where inputs is Hs * Ds, or Ds with ``heads``; keys are in
            pairs if ``table`` is given. Any strides but for the last axis.
        bias: (L, H, D), laid out like ``weight``.
        sources: (L, nu), int32.
        heads: (H,), int32: the source head that each target head reads; None: every head reads all.
        norm: (L, D), float32, in pairs.
        eps: The epsilon of the norm.
        table: Cosines and sines (T, D / 2), float32; None: no rotation and no norm.
        tile: The tile; by default :func:`tile_of`.
    """
    layers, num_heads, tokens, dim = out.shape
    width = states.shape[3]
    tile = tile or tile_of(heads is None, out.element_size())
    blocks = triton.cdiv(tokens, tile.tokens)
    cos, sin = table or (out, out)  # placeholders that are not read
    _translate[(num_heads * blocks * layers,)](
        out, states, weight, out if bias is None else bias, sources,
        out if heads is None else heads, out if norm is None else norm, cos, sin, eps,
        tokens, blocks, *out.stride()[:3], *states.stride()[:3], *weight.stride()[:3],
        HEADS=num_heads, DIM=dim, WIDTH=width, READ=states.shape[1] if heads is None else 1,
        NU=sources.shape[1], TOKENS=tile.tokens, STEP=math.gcd(tile.inputs, width),
        BIAS=bias is not None, WISE=heads is not None, NORM=norm is not None,
        TURN=table is not None, PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def finish(
    out: torch.Tensor,
    product: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    table: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Apply k_norm, RoPE, cast and layout to a product in memory.

    Args:
        out: (G, H, T, D), with any strides but for the last axis.
        product: (G, T, H * D), contiguous, in pairs.
        norm: (G, D), float32, in pairs.
        eps: The epsilon of the norm.
        table: Cosines and sines (T, D / 2), float32.
    """
    layers, heads, tokens, dim = out.shape
    cos, sin = table
    _finish[(triton.cdiv(tokens, FINISH_TOKENS), layers)](
        out, product, out if norm is None else norm, cos, sin, eps, tokens, *out.stride()[:3],
        HEADS=heads, DIM=dim, TOKENS=FINISH_TOKENS, NORM=norm is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _turned(keys, norm, cos, sin, eps, TOKENS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr):
    """Both halves of (TOKENS, DIM) keys in pairs, normed and rotated."""
    if NORM:
        mean = tl.sum(keys * keys, 1) / DIM
        keys = keys * tl.rsqrt(mean + eps)[:, None] * tl.load(norm + tl.arange(0, DIM))[None, :]
    first, second = tl.split(tl.reshape(keys, (TOKENS, DIM // 2, 2)))
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _translate(
    out, states, weight, bias, sources, heads, norm, cos, sin, eps,
    tokens, blocks, out_layer, out_head, out_token, in_layer, in_head, in_token,
    w_layer, w_head, w_input,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr,
    NU: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr,
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
    if BIAS:
        total += tl.load(bias + (layer * HEADS + head) * DIM + column).to(tl.float32)[None, :]
    to = out + layer.to(tl.int64) * out_layer + head * out_head + row[:, None] * out_token
    inside = row[:, None] < tokens
    dtype = out.dtype.element_ty
    if TURN:
        HALF: tl.constexpr = DIM // 2
        half = tl.arange(0, HALF)[None, :]
        angle = read[:, None] * HALF + half
        first, second = _turned(
            total, norm + layer * DIM, tl.load(cos + angle), tl.load(sin + angle), eps,
            TOKENS, DIM, NORM,
        )  # fmt: skip
        tl.store(to + half, first.to(dtype), mask=inside)
        tl.store(to + HALF + half, second.to(dtype), mask=inside)
    else:
        tl.store(to + column[None, :], total.to(dtype), mask=inside)


@triton.jit
def _finish(
    out, product, norm, cos, sin, eps, tokens, out_layer, out_head, out_token,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    layer = tl.program_id(1)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row[:, None] < tokens
    column = tl.arange(0, DIM)[None, :]
    half = tl.arange(0, HALF)[None, :]
    turn = tl.load(cos + row[:, None] * HALF + half, mask=inside, other=0.0)
    lift = tl.load(sin + row[:, None] * HALF + half, mask=inside, other=0.0)
    rows = product + (layer.to(tl.int64) * tokens + row[:, None]) * (HEADS * DIM)
    to = out + layer.to(tl.int64) * out_layer + row[:, None] * out_token + half
    for head in range(HEADS):  # all heads of a token rotate by the same angles
        keys = tl.load(rows + head * DIM + column, mask=inside, other=0.0).to(tl.float32)
        first, second = _turned(keys, norm + layer * DIM, turn, lift, eps, TOKENS, DIM, NORM)
        tl.store(to + head * out_head, first.to(out.dtype.element_ty), mask=inside)
        tl.store(to + head * out_head + HALF, second.to(out.dtype.element_ty), mask=inside)
