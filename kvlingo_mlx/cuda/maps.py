"""The stacked maps of one side of all layers, and the cutting of their products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvlingo_mlx.cuda.finish import Finish, in_pairs
from kvlingo_mlx.format.assignment import Layers
from kvlingo_mlx.format.maps import head_map_of
from kvlingo_mlx.format.translator_config import TranslatorConfig


@dataclass(frozen=True)
class Cut:
    """How products are cut.

    Attributes:
        tokens: The most tokens at a time, if products pass through a buffer: a buffer that stays
            within a GPU's L2 cache is not written to memory and read again.
        layers: The most layers in one product.
        direct: Whether products that need no further step are written in place, one head at a time;
            otherwise they pass through the buffer, too.
    """

    tokens: int = 4096
    layers: int = 4
    direct: bool = True


@dataclass(frozen=True)
class Maps:
    """The maps of one side, stacked.

    Attributes:
        weight: (L, H, nu * inputs, D), see the legend of :mod:`.fast_translation`; keys that are
            not rotated yet are in pairs (:func:`in_pairs`).
        bias: (L, H, D), laid out like ``weight``, or None.
        width: Ds, the width of a source head.
        layers: The source layers that each target layer reads.
        sources: ``layers`` as a tensor (L, nu), int32.
        heads: The source head that each target head reads; None for maps that mix heads.
        heads_there: ``heads`` as a tensor, int32.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    width: int
    layers: Layers
    sources: torch.Tensor
    heads: tuple[int, ...] | None
    heads_there: torch.Tensor | None

    def check(self, states: torch.Tensor, out: torch.Tensor) -> None:
        """Refuse (ValueError) arrays that a kernel would read or write beyond their ends."""
        layers, heads, tokens, width = states.shape
        target, count, inputs, dim = self.weight.shape
        enough = heads * width * len(self.layers[0]) == inputs
        if self.heads is not None:
            enough = max(self.heads) < heads
        fits = (
            enough
            and width == self.width
            and max(map(max, self.layers)) < layers
            and tuple(out.shape) == (target, count, tokens, dim)
            and states.dtype == out.dtype == self.weight.dtype
            and states.stride(-1) == out.stride(-1) == 1
        )
        if not fits:
            raise ValueError(
                f"states {tuple(states.shape)} ({states.dtype}) and a cache {tuple(out.shape)} "
                f"({out.dtype}) do not fit this translator"
            )

    def runs(self, most: int) -> Iterator[Run]:
        """The target layers, cut where the source layers that they read are not evenly spaced."""
        first = 0
        while first < len(self.layers):
            end, steps = first + 1, (0,) * len(self.layers[first])
            while end < min(first + most, len(self.layers)):
                pairs = zip(self.layers[end - 1], self.layers[end], strict=True)
                found = tuple(after - before for before, after in pairs)
                if min(found) < 0 or (end > first + 1 and found != steps):
                    break
                steps, end = found, end + 1
            yield Run(first, end, self.layers[first], steps)
            first = end


@dataclass(frozen=True)
class Run:
    """Target layers ``first`` to ``end``, and the evenly spaced source layers that they read."""

    first: int
    end: int
    starts: tuple[int, ...]
    steps: tuple[int, ...]

    def read(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Views (G, Hs, T, Ds) of states, one for each layer that a target layer reads."""
        count, found = self.end - self.first, []
        for start, step in zip(self.starts, self.steps, strict=True):
            if step:
                found.append(states[start : start + step * (count - 1) + 1 : step])
            else:
                found.append(states[start : start + 1].expand(count, -1, -1, -1))
        return found


def stacked_maps(
    config: TranslatorConfig,
    side: str,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    finish: Finish | None,
    layers: Sequence[int],
) -> Maps:
    """The maps of one side of some target layers, which are alike."""
    geometry = config.target.layers[layers[0]]
    heads = None if config.head_mixing else head_map_of(config)
    count, dim = geometry.kv_heads, geometry.head_dim(side)
    paired = side == "keys" and finish is not None
    weights, biases = [], []
    for layer in layers:
        weight = tensors[f"{side}.{layer}.weight"].detach().to(device)
        # Stored as (H * D, inputs), or (H, D, inputs). Mixing maps keep all outputs of an input
        # adjacent, (inputs, H, D), so that they can be one product.
        weight = weight.T.unflatten(-1, (count, dim)) if heads is None else weight.mT
        weights.append((in_pairs(weight) if paired else weight).to(dtype))
        bias = tensors.get(f"{side}.{layer}.bias")
        if bias is not None:
            bias = bias.detach().to(device).view(count, dim)
            biases.append((in_pairs(bias) if paired else bias).to(dtype))
    stacked = torch.stack(weights).contiguous()
    sources = tuple(config.assignment.side(side)[layer] for layer in layers)
    there: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return Maps(
        weight=stacked if heads is not None else stacked.transpose(1, 2),
        bias=torch.stack(biases) if biases else None,
        width=config.source.layers[0].head_dim(side),
        layers=sources,
        sources=torch.tensor(sources, **there),
        heads=heads,
        heads_there=None if heads is None else torch.tensor(heads, **there),
    )
