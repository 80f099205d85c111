"""The attention that weighs the rows of a closed form."""

from __future__ import annotations

import torch

from kvlingo_mlx.cuda.model import TorchModel, tapped
from kvlingo_mlx.tokenization.samples import Sample

SCORE_NUMBERS = 2**28  # the most attention scores in memory at once: 1 GB in float32


@torch.no_grad()
def attention_mass(target: TorchModel, sample: Sample) -> torch.Tensor:
    """The attention that the continuation's queries pay to each prefix position (eq. "attn-norm").

    It is averaged over the continuation's queries, over heads, and over the layers that read the
    same cache. Positions before a window get 0. (N layers, T), float64.
    """
    start, family = len(sample.prefix), target.family
    readers = family.readers(target.model)
    modules = [
        *(module for attention in target.attentions for module in family.taps(attention)),
        *(family.query_projection(reader) for group in readers for reader in group),
    ]
    with tapped(modules) as taken:
        target.hidden((*sample.prefix, *sample.continuation))
    states = target.states_of(taken, "post_rope")
    rows = []
    for layer, attention in enumerate(target.attentions):
        geometry = target.geometry.layers[layer]
        keys, values = (
            side[layer].view(start + len(sample.continuation), geometry.kv_heads, -1)
            for side in (states.keys, states.values)
        )
        keys = family.attended(attention, keys.transpose(0, 1), values.transpose(0, 1))
        masses = []
        for reader in readers[layer]:
            projected = taken[family.query_projection(reader)][start:]
            queries = family.queries(target.model, reader, projected, start)
            masses.append(_mean_attention(queries, keys, reader.scaling, start, geometry.window))
        rows.append(torch.stack(masses).mean(dim=0))
    return torch.stack(rows)


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
