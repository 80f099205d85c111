"""The only file that knows mlx-lm's cache classes: make them, write them, check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.keys import Rotation, advance, normalise_values
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.states import TranslatedStates

GROW = KVCache.step


def allocate(model: LanguageModel, num_tokens: int) -> list[Any]:
    """Stock mlx-lm caches of ``num_tokens`` that :func:`write` has yet to write, and room to grow.

    The room is taken once, so that neither writing in chunks nor the first decoding
    step copies what is there. A ring has no more room than its window.

    Raises:
        UnsupportedModelError: A layer uses a cache that translation cannot write.
    """
    caches = make_prompt_cache(model.model)
    capacity = (num_tokens // GROW + 1) * GROW
    for cache, layer in zip(caches, model.geometry.layers, strict=True):
        if type(cache) not in (KVCache, RotatingKVCache):
            raise UnsupportedModelError(
                f"layer {layer.layer} of {model.name} uses {type(cache).__name__}, "
                "which a translation cannot write; only KVCache and RotatingKVCache are supported"
            )
        if not num_tokens:
            continue
        shape = (1, layer.kv_heads, min(capacity, layer.window or capacity))
        cache.keys = mx.zeros((*shape, layer.key_dim), model.cache_dtype)
        cache.values = mx.zeros((*shape, layer.value_dim), model.cache_dtype)
        cache.offset = num_tokens
        if layer.window is not None:  # in temporal order, so the next one replaces the oldest
            cache._idx = min(num_tokens, layer.window)
    return caches


def first_kept(model: LanguageModel, num_tokens: int) -> list[int]:
    """The first position that each cache layer still holds of ``num_tokens``."""
    return [max(0, num_tokens - (g.window or num_tokens)) for g in model.geometry.layers]


def write(caches: Sequence[Any], states: TranslatedStates, model: LanguageModel) -> None:
    """Write a translated span at its positions: norms and RoPE, cast, one slice a layer and side.

    Nothing is evaluated here.
    """
    rotations: dict[int, Rotation] = {}
    for group in states.keys:
        finishes = [model.finishes[layer] for layer in group.layers]
        rotation = rotations.setdefault(group.start, Rotation(group.start))
        done = advance(group.states, finishes, rotation, states.capture, "post_rope")
        for layer, array in zip(group.layers, done.astype(model.cache_dtype), strict=True):
            caches[layer].keys[..., _place(caches[layer], group.start, array), :] = array
    for group in states.values:
        finishes = [model.finishes[layer] for layer in group.layers]
        done = normalise_values(group.states, finishes, states.capture)
        for layer, array in zip(group.layers, done.astype(model.cache_dtype), strict=True):
            caches[layer].values[..., _place(caches[layer], group.start, array), :] = array


def _place(cache: Any, start: int, array: mx.array) -> slice:
    """Where a span (B, H, T, D) from position ``start`` on lies in a cache's buffer."""
    if isinstance(cache, RotatingKVCache):
        start -= cache.offset - cache._idx
    return slice(start, start + array.shape[2])


def arrays(caches: Sequence[Any]) -> list[mx.array]:
    """The buffers of filled caches, to evaluate them together."""
    return [array for c in caches if c.keys is not None for array in (c.keys, c.values)]


def nbytes(caches: Sequence[Any]) -> int:
    """Bytes held by caches."""
    return sum(cache.nbytes for cache in caches)
