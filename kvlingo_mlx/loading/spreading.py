"""What a source wrote, made whole where several ranks hold the source, or one of them does.

A translator that mixes heads reads all heads of a layer, and any layer. So each chunk's states are
gathered before they are translated: one message a chunk. Head-wise maps between two models that are
shared by heads in the same way read a rank's own heads only, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.maps import head_map_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.parts import FIRST, PIPELINE, TENSOR, Part, pipelined
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working


def own_heads(config: TranslatorConfig, source: Part | None, target: Part | None) -> bool:
    """Whether the maps to a rank's part of a target read only what it holds of the source."""
    if config.head_mixing or source is None or target is None:
        return False
    if source.kind != TENSOR or target.kind != TENSOR:
        return False
    whole = head_map_of(config)
    ranks = range(source.size)
    each = [len(own) for own in (source.heads[0], target.heads[0])]
    return all(
        whole[head] // each[0] == rank
        for rank in ranks
        for head in range(rank * each[1], (rank + 1) * each[1])
    )


def complete(source: LanguageModel, config: TranslatorConfig) -> bool:
    """Whether what this rank's source writes is all that a translator reads.

    ``config`` is that of the translator to this rank's part of the target.
    """
    if source.part is None:
        return True
    return source.part.kind != FIRST and source.geometry.layers == config.source.layers


def writer(source: LanguageModel, config: TranslatorConfig) -> LanguageModel:
    """The model whose norms and positions belong to the states that a translator gets."""
    return source if complete(source, config) else source.full


def prefill(
    model: LanguageModel,
    tokens: Sequence[int],
    step_size: int,
    cache: list[Any],
    begun: int,
    config: TranslatorConfig,
) -> Generator[KVStates, None, None]:
    """:func:`.capture.prefill`, with the states that the translator of ``config`` reads.

    Raises:
        UnsupportedModelError: Several ranks hold the source, and its recurrent states are mapped.
    """
    if model.part is not None and config.state_maps:
        raise UnsupportedModelError(
            f"{config.title} maps recurrent states, which are not sent between ranks; load "
            f"{model.name} on one machine, or make a translator without state_maps"
        )
    spans: Iterator[KVStates]
    if model.part is not None and model.part.kind == FIRST and model.part.rank:
        spans = _shapes(model, tokens, step_size, begun)
    else:
        spans = capture.prefill(model, tokens, step_size, cache, begun, config.state_maps)
    for states in spans:
        whole = gathered(states, model, config)
        del states
        yield whole
        del whole


def _shapes(
    model: LanguageModel, tokens: Sequence[int], step_size: int, begun: int
) -> Iterator[KVStates]:
    """States of the right shapes, never computed, so that no weight of the model is read."""
    for start in range(begun, len(tokens), step_size):
        yield capture.unread(model, tokens[start : start + step_size], start)


def gathered(states: KVStates, model: LanguageModel, config: TranslatorConfig) -> KVStates:
    """The states of a whole model over a span, of which this rank has ``states``; evaluated."""
    part = model.part
    if part is None or complete(model, config):
        return states
    with working():
        if part.kind == FIRST:
            made = _told(states, part)
        elif part.kind == PIPELINE:
            made = _layers(states, part, len(model.full.attentions))
        else:
            made = _heads(states, model, part)
        mx.eval(made.arrays)
    return made


def _told(states: KVStates, part: Part) -> KVStates:
    """What the first rank has written, on every rank."""
    arrays = states.arrays
    if part.rank:
        flat = mx.zeros(sum(array.size for array in arrays), arrays[0].dtype)
    else:
        flat = _flat(arrays)
    return _split(mx.distributed.all_sum(flat), states)


def _heads(states: KVStates, model: LanguageModel, part: Part) -> KVStates:
    """All heads of each layer, whose own ones each rank has written."""
    whole = zip(model.geometry.layers, model.full.geometry.layers, strict=True)
    shared = [own.kv_heads < of.kv_heads for own, of in whole] * 2  # latents are not
    arrays = states.arrays
    parts = [a for a, share in zip(arrays, shared, strict=True) if share]
    every = mx.distributed.all_gather(_flat(parts)[None])
    found, start = [], 0
    for array, share in zip(arrays, shared, strict=True):
        if share:
            own = every[:, start : start + array.size].reshape(part.size, *array.shape)
            start += array.size
            array = mx.moveaxis(own, 0, 2).reshape(*array.shape[:2], -1)
        found.append(array)
    return _of(found, states)


def _layers(states: KVStates, part: Part, layers: int) -> KVStates:
    """All layers, of which each rank has written some."""
    ranges = [pipelined(layers, rank, part.size) for rank in range(part.size)]
    sides = []
    for side in (states.keys, states.values):
        shape, size = side[0].shape, side[0].size  # which all layers of such families have
        flat = _flat(side)
        most = max(map(len, ranges)) * size
        every = mx.distributed.all_gather(mx.pad(flat, (0, most - flat.size))[None])
        found = {
            layer: every[rank, place * size : (place + 1) * size].reshape(shape)
            for rank, own in enumerate(ranges)
            for place, layer in enumerate(own)
        }
        sides.append(tuple(found[layer] for layer in range(layers)))
    return replace(states, keys=sides[0], values=sides[1])


def _flat(arrays: Sequence[mx.array]) -> mx.array:
    """All numbers in one array, evaluated: what is sent is computed before it is sent."""
    flat = mx.concatenate([array.reshape(-1) for array in arrays])
    mx.eval(flat)
    return flat


def _split(flat: mx.array, like: KVStates) -> KVStates:
    found, start = [], 0
    for array in like.arrays:
        size = prod(array.shape)
        found.append(flat[start : start + size].reshape(array.shape))
        start += size
    return _of(found, like)


def _of(arrays: Sequence[mx.array], like: KVStates) -> KVStates:
    half = len(arrays) // 2
    return replace(like, keys=tuple(arrays[:half]), values=tuple(arrays[half:]))
