"""Translates a span: by one fused kernel per side, or by products into a buffer and the rest."""

from __future__ import annotations

import torch

from kvlingo_mlx.cuda.finish import Finish, finish_plainly, table_of
from kvlingo_mlx.cuda.maps import Cut, Maps
from kvlingo_mlx.cuda.tile import Tile

# The fused kernel's pipeline of a head's outputs fits a block's shared memory up to this width.
MAX_WIDTH = 128
MIN_WIDTH = 16  # the least width of a product in Triton, whose output widths are also powers of two


def fused(
    maps: Maps,
    states: torch.Tensor,
    out: torch.Tensor,
    finish: Finish | None,
    start: int,
    tile: Tile | None,
) -> None:
    from kvlingo_mlx.cuda import kernels  # needs Triton

    tokens = out.shape[2]
    norm, eps, table = None, 0.0, None
    if finish is not None:
        norm, eps, table = finish.norm, finish.eps, table_of(finish, start, tokens)
    kernels.translate(
        out, states, maps.weight, maps.bias, maps.sources, maps.heads_there, norm, eps, table, tile
    )


def products(
    maps: Maps,
    states: torch.Tensor,
    out: torch.Tensor,
    finish: Finish | None,
    start: int,
    method: str,
    cut: Cut,
) -> None:
    _, heads, tokens, dim = out.shape
    direct = finish is None and cut.direct
    runs = list(maps.runs(cut.layers))
    # Strided products need no buffer. Mixing ones need adjacent heads; heads that lie apart are
    # copied.
    strided = maps.heads is not None or states.stride(1) == states.shape[3]
    step = tokens if direct and strided else min(cut.tokens, tokens)
    most = 0 if direct else max(run.end - run.first for run in runs) * step
    buffer = out.new_empty(most * heads * dim)
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        for run in runs:
            read = [array[:, :, begin:end] for array in run.read(states)]
            to, layers = out[run.first : run.end, :, begin:end], slice(run.first, run.end)
            if direct:
                _multiply(maps, layers, read, to)
                continue
            shape = (len(to), end - begin, heads, dim)
            product = buffer[: to.numel()].view(shape)
            _multiply(maps, layers, read, product.transpose(1, 2))
            if finish is None:
                to.copy_(product.transpose(1, 2))
                continue
            norm = None if finish.norm is None else finish.norm[layers]
            table = table_of(finish, start + begin, end - begin)
            if method == "torch":
                finish_plainly(to, product, norm, finish.eps, table)
            else:
                from kvlingo_mlx.cuda import kernels  # needs Triton

                kernels.finish(to, product.flatten(2), norm, finish.eps, table)


def _multiply(maps: Maps, layers: slice, read: list[torch.Tensor], out: torch.Tensor) -> None:
    """The products of some layers, of (G, Hs, T, Ds) each, into (G, H, T, D) of any strides.

    Several source layers are summed in ``out``, and rounded to its dtype each time.
    """
    weight = maps.weight[layers]
    if maps.bias is not None:
        out.copy_(maps.bias[layers][:, :, None])
    inputs = weight.shape[2] // len(read)
    for nth, states in enumerate(read):
        maps_of_it = weight[:, :, nth * inputs : (nth + 1) * inputs]
        add = bool(nth) or maps.bias is not None
        if maps.heads is not None:  # one head of all layers at a time: strided states need no copy
            for head, source in enumerate(maps.heads):
                _product(out[:, head], states[:, source], maps_of_it[:, head], add)
            continue
        wide = states.transpose(1, 2).flatten(2)  # (G, T, Hs * Ds), a view of token-major states
        whole = out.transpose(1, 2)
        if whole.is_contiguous():
            _product(whole.flatten(2), wide, maps_of_it.transpose(1, 2).flatten(2), add)
            continue
        for to, x, w in zip(out, wide, maps_of_it, strict=True):  # one layer's heads at a time
            _product(to, x.expand(len(to), -1, -1), w, add)


def _product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, add: bool) -> None:
    if add:
        out.baddbmm_(x, weight)
    else:
        torch.bmm(x, weight, out=out)
