"""What a target's attention gathers: of which positions, and how a translation changes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.runtime import check_entries, shapes

SDPA = "sdpa"  # the implementation with which models are loaded
SCORE_NUMBERS = 2**28  # the most attention scores in memory at once: 1 GB in float32


@dataclass(frozen=True)
class TorchAttended:
    """Some queries of a text in one attention module."""

    module: Any
    queries: torch.Tensor  # (1, Hq, M, D), normed and rotated
    shapes: Sequence[tuple[int, ...]]  # of the keys and values (1, H, T, D) that they gather from
    visible: torch.Tensor  # (1, 1, M, T)
    options: Mapping[str, Any]  # of transformers' attention

    def gathered(
        self, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the queries gather from such entries, (1, M, Hq, D); of others see ``visible``."""
        own, mask = ALL_ATTENTION_FUNCTIONS[SDPA], self.visible if visible is None else visible
        both = self.queries, keys, values
        found: torch.Tensor = own(self.module, *both, mask, **self.options)[0]
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
def attended(target: TorchModel, places: np.ndarray) -> Iterator[list[list[TorchAttended]]]:
    """For each cache layer, what its attention modules gather in the one pass over a text.

    ``places`` are those of the queries, the text's last one among them.
    """
    readers, layers = target.family.readers(target.model), target.geometry.layers
    windows = {a: g.window for each, g in zip(readers, layers, strict=True) for a in each}
    at, tokens = torch.tensor(places, device=target.device), int(places[-1]) + 1
    behind = at[:, None] - torch.arange(tokens, device=target.device)
    found, calls = list[list[TorchAttended]](), dict[Any, TorchAttended]()

    def listener(module: Any, query: Any, key: Any, value: Any, **options: Any) -> None:
        visible = (behind >= 0) & (behind < (windows[module] or tokens))
        calls[module] = TorchAttended(
            module, query[:, :, at], shapes((key, value)), visible[None, None], options
        )

    with heard(listener):
        yield found
    found.extend([calls[module] for module in each if module in calls] for each in readers)


def match(
    target: TorchModel, translator: TorchTranslator, reading: Any, layer: int, scale: float,
    between: Any = None,
) -> float:  # fmt: skip
    """One layer's share; see :meth:`kvlingo_mlx.training.runtime.Pair.match`."""
    own, (states, native) = reading.attended[layer], reading.whole
    placed = partial(target.entry, layer, capture=translator.config.capture)
    right = placed(native.keys[layer], native.values[layer])
    at, others, seen = (
        map(partial(torch.tensor, device=target.device), between) if between else (0, None, None)
    )
    with torch.set_grad_enabled(scale != 0.0):
        (keys, values), errors = placed(*translator.layer(layer, states), start=at), []
        if between is not None:
            both = zip((keys, values), right, strict=True)
            keys, values = (torch.cat([ours, its[:, :, others]], 2) for ours, its in both)
        for each in own:
            check_entries(target, right, each.shapes)
            with torch.no_grad():
                wanted = each.gathered(*right)
            wrong = (each.gathered(keys, values, seen) - wanted).square().sum()
            errors.append(wrong / wanted.square().sum())
        loss = torch.stack(errors).mean()
        if scale != 0.0:
            (loss * scale).backward()
    return loss.item()


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
