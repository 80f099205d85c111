"""The attention that weighs the rows of a closed form."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.tokenization.samples import Sample

SDPA = "sdpa"  # the implementation with which models are loaded
SCORE_NUMBERS = 2**28  # the most attention scores in memory at once: 1 GB in float32


@torch.no_grad()
def attention_mass(target: TorchModel, sample: Sample) -> torch.Tensor:
    """The attention that the continuation's queries pay to each prefix position (eq. "attn-norm").

    It is averaged over the continuation's queries, over heads, and over the layers that read the
    same cache. Positions before a window get 0. (N layers, T), float64.
    """
    start, masses, own = (
        len(sample.prefix),
        dict[Any, torch.Tensor](),
        ALL_ATTENTION_FUNCTIONS[SDPA],
    )
    readers, layers = target.family.readers(target.model), target.geometry.layers
    windows = {a: g.window for each, g in zip(readers, layers, strict=True) for a in each}

    def recorded(module: Any, query: Any, key: Any, *others: Any, **options: Any) -> Any:
        """transformers' attention, which is given normed and rotated queries (1, Hq, T, D)."""
        masses[module] = _mean_attention(
            query[0, :, start:], key[0], module.scaling, start, windows[module]
        )
        return own(module, query, key, *others, **options)

    ALL_ATTENTION_FUNCTIONS[SDPA] = recorded
    try:
        target.hidden((*sample.prefix, *sample.continuation))
    finally:
        del ALL_ATTENTION_FUNCTIONS[SDPA]  # transformers' own shows again
    return torch.stack([torch.stack([masses[a] for a in each]).mean(dim=0) for each in readers])


def _mean_attention(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, num_prefix: int, window: int | None
) -> torch.Tensor:
    """The mean over queries and heads of softmax(q k) on the prefix, in blocks of queries.

    ``queries`` (Hq, M, D) are at positions num_prefix.., ``keys`` are (H, T + M, D).
    """
    heads, count, dim = queries.shape
    kv_heads, total, _ = keys.shape
    block = max(1, SCORE_NUMBERS // (heads * total))
    keys = keys.float().mT
    positions = torch.arange(total, device=keys.device)
    mass = torch.zeros(num_prefix, dtype=torch.float64, device=keys.device)
    for start in range(0, count, block):
        part = queries[:, start : start + block].float()
        size = part.shape[1]
        scores = (part.reshape(kv_heads, -1, dim) @ keys * scale).view(heads, size, total)
        own = num_prefix + start + torch.arange(size, device=keys.device)[:, None]
        scores.masked_fill_(positions > own, -torch.inf)
        if window is not None:
            scores.masked_fill_(positions <= own - window, -torch.inf)
        mass += scores.softmax(dim=-1)[..., :num_prefix].sum(dim=(0, 1), dtype=torch.float64)
    return mass / (heads * count)
