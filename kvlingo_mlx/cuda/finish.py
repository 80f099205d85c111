"""The last steps for translated keys, k_norm and RoPE, for whole prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlingo_mlx.cuda.families import POINTS
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.errors import UnsupportedModelError


@dataclass(frozen=True)
class Finish:
    """The k_norm and RoPE that translated keys still need.

    Attributes:
        norm: The weights (L, D), float32 or wider, in pairs; None if the capture point is after the
            norm.
        eps: The epsilon of the norm.
        cos: Cosines (positions, D / 2), float32 or wider.
        sin: Sines, in the same shape.
    """

    norm: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor


def finish_of(
    target: TorchModel, capture: str, positions: int, exact: torch.dtype, layers: Sequence[int]
) -> Finish:
    """What the keys of some layers still need; these share one rotation."""
    attentions, norm, eps = [target.attentions[layer] for layer in layers], None, 0.0
    if capture == POINTS[0] and hasattr(attentions[0], "k_norm"):
        norms = [target.family.key_norm(attention) for attention in attentions]
        norm, eps = in_pairs(torch.stack([weight.to(exact) for weight, _ in norms])), norms[0][1]
    places = torch.arange(positions, device=target.device)[None]
    like = torch.empty(0, dtype=exact, device=target.device)
    with torch.no_grad():
        both = target.family.cosines(target.model, attentions[0], like, places)
    cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in both)
    if 2 * cos.shape[-1] != target.geometry.layers[layers[0]].key_dim:
        raise UnsupportedModelError(f"{target.name} rotates a part of each key only")
    return Finish(norm, eps, cos, sin)


def table_of(finish: Finish, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return finish.cos[start : start + tokens], finish.sin[start : start + tokens]


def finish_plainly(
    out: torch.Tensor,
    product: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    table: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Apply k_norm, RoPE, cast and layout to keys in pairs, (G, T, H, D), into (G, H, T, D)."""
    keys = product.to(table[0].dtype)
    if norm is not None:
        keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + eps)
        keys = keys * norm[:, None, None]
    first, second = keys.unflatten(-1, (-1, 2)).transpose(1, 2).unbind(-1)
    cos, sin = table
    half = cos.shape[-1]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin


def in_pairs(array: torch.Tensor) -> torch.Tensor:
    """The last axis of (..., D) reordered: numbers that RoPE rotates together are adjacent."""
    return array.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
