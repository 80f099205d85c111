"""The only file that knows mlx-lm's cache classes: make them, write them, check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.keys import Rotation, advance
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.states import TranslatedStates

GROW = KVCache.step


def allocate(model: LanguageModel, num_tokens: int) -> list[Any]:
    """Stock mlx-lm caches with room for ``num_tokens`` and some to come.

    The room is taken once, so that neither writing in chunks nor the first decoding
    step copies what is there.

    Raises:
        UnsupportedModelError: A layer uses a cache that translation cannot write.
    """
    caches = make_prompt_cache(model.model)
    capacity = (num_tokens // GROW + 1) * GROW
    for cache, layer in zip(caches, model.geometry.layers, strict=True):
        if type(cache) is not KVCache:
            raise UnsupportedModelError(
                f"layer {layer.layer} of {model.name} uses {type(cache).__name__}, "
                "which a translation cannot write; only KVCache is supported"
            )
        if num_tokens:
            shape = (1, layer.kv_heads, capacity)
            cache.keys = mx.zeros((*shape, layer.key_dim), model.cache_dtype)
            cache.values = mx.zeros((*shape, layer.value_dim), model.cache_dtype)
    return caches


def write(caches: Sequence[Any], states: TranslatedStates, model: LanguageModel) -> None:
    """Append a translated span: k_norm and RoPE, cast, one slice update a layer and side.

    Nothing is evaluated here.
    """
    dtype = model.cache_dtype
    rotation = Rotation(states.start)
    keys: dict[int, mx.array] = {}
    for group in states.keys:
        finishes = [model.key_finishes[layer] for layer in group.layers]
        finished = advance(group.states, finishes, rotation, states.capture, "post_rope")
        keys.update(_split(group.layers, finished.astype(dtype)))
    values: dict[int, mx.array] = {}
    for group in states.values:
        values.update(_split(group.layers, group.states.astype(dtype)))
    for layer, cache in enumerate(caches):
        cache.update_and_fetch(keys[layer], values[layer])


def _split(layers: Sequence[int], states: mx.array) -> dict[int, mx.array]:
    return {layer: states[index] for index, layer in enumerate(layers)}


def arrays(caches: Sequence[Any]) -> list[mx.array]:
    """The buffers of filled caches, to evaluate them together."""
    return [array for c in caches if c.keys is not None for array in (c.keys, c.values)]


def nbytes(caches: Sequence[Any]) -> int:
    """Bytes held by caches."""
    return sum(cache.nbytes for cache in caches)
