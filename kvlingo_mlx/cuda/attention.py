"""What a target's attention gathers, and of which positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.runtime import Attended, shapes

SDPA = "sdpa"  # the implementation with which models are loaded
SCORE_NUMBERS = 2**28  # the most attention scores in memory at once: 1 GB in float32


def _attend(
    module: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: Any,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """What queries gather, (1, M, Hq, D)."""
    own, mask = ALL_ATTENTION_FUNCTIONS[SDPA], torch.as_tensor(visible, device=keys.device)
    found: torch.Tensor = own(module, queries, keys, values, mask[None, None], **options)[0]
    return found.to(torch.promote_types(found.dtype, torch.float32))


@contextlib.contextmanager
def heard(listener: Callable[..., None]) -> Iterator[None]:
    """Let ``listener`` have what transformers' attention is given, the mask left out."""
    own = ALL_ATTENTION_FUNCTIONS[SDPA]

    def hearing(module: Any, *arrays: Any, **options: Any) -> Any:
        listener(module, *arrays[:3], **options)
        return own(module, *arrays, **options)

    ALL_ATTENTION_FUNCTIONS[SDPA] = hearing
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[SDPA]  # transformers' own shows again


@contextlib.contextmanager
def attended(target: TorchModel, places: np.ndarray) -> Iterator[list[list[Attended]]]:
    """For each cache layer, what its attention modules gather in the one pass over a text.

    ``places`` are those of the queries, the text's last one among them.
    """
    readers, layers = target.family.readers(target.model), target.geometry.layers
    windows = {a: g.window for each, g in zip(readers, layers, strict=True) for a in each}
    at, tokens = torch.tensor(places, device=target.device), int(places[-1]) + 1
    behind = at[:, None] - torch.arange(tokens, device=target.device)
    found, calls = list[list[Attended]](), dict[Any, Attended]()

    def listener(module: Any, query: Any, key: Any, value: Any, **options: Any) -> None:
        visible = (behind >= 0) & (behind < (windows[module] or tokens))
        attend = partial(_attend, module, **options)
        calls[module] = Attended(query[:, :, at], shapes((key, value)), visible, attend)

    with heard(listener):
        yield found
    found.extend([calls[module] for module in each if module in calls] for each in readers)


@torch.no_grad()
def attention_mass(target: TorchModel, sample: Sample) -> torch.Tensor:
    """The attention that the continuation's queries pay to each prefix position (eq. "attn-norm").

    It is averaged over the continuation's queries, over heads, and over the layers that read the
    same cache. Positions before a window get 0. (N layers, T), float64.
    """
    start, masses = len(sample.prefix), dict[Any, torch.Tensor]()
    readers, layers = target.family.readers(target.model), target.geometry.layers
    windows = {a: g.window for each, g in zip(readers, layers, strict=True) for a in each}

    def listener(module: Any, query: Any, key: Any, *others: Any, **options: Any) -> None:
        masses[module] = _mean_attention(
            query[0, :, start:], key[0], module.scaling, start, windows[module]
        )

    with heard(listener):
        target.hidden((*sample.prefix, *sample.continuation))
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
