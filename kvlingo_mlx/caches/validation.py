"""Checks of a cache and a prompt before a model continues from them; they are always made.

MLX and mlx-lm check none of this: from a cache that lacks a layer, ends at another position or has
another dtype, a model decodes wrongly, perhaps fluently. Only shapes, dtypes and positions are
checked, which costs microseconds per layer; ``KVLINGO_DEBUG=1`` also checks every number.
"""

import os
from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.errors import CacheError
from kvlingo_mlx.format.geometry import LayerGeometry, Recurrence
from kvlingo_mlx.models.language_model import LanguageModel


def validate_cache(cache: Sequence[Any], model: LanguageModel, num_tokens: int) -> None:
    """Refuse a cache that does not hold ``num_tokens`` tokens of one sequence for ``model``.

    Every layer must have seen them all, including those outside its window.

    Raises:
        CacheError: The message names the layer, what was found and what was expected.
    """
    layers = model.geometry.layers
    if len(cache) != len(layers):
        raise CacheError(
            f"the cache has {len(cache)} layers, expected {len(layers)} of {model.name}; make it "
            "anew with hand_over"
        )
    for index, (held, layer) in enumerate(zip(cache, layers, strict=True)):
        if found := _difference(held, model, index, num_tokens):
            raise CacheError(
                f"layer {layer.layer} of the cache for {model.name}: {found}; make the cache anew "
                "with hand_over"
            )
    if os.environ.get("KVLINGO_DEBUG") and (place := first_bad(cache, model)):
        raise CacheError(f"the cache for {model.name} holds NaN or Inf, first in {place}")


def _difference(held: Any, model: LanguageModel, index: int, num_tokens: int) -> str | None:
    """The fault of one layer's cache in words, or None."""
    layer = model.geometry.layers[index]
    if kind := caches.unlike_stock(held, layer):
        return f"it is a {type(held).__name__}, expected {kind}"
    if layer.recurrence is not None:
        return _of_parts(held, layer.recurrence, num_tokens)
    if held.offset != num_tokens:
        return f"it ends at position {held.offset}, expected {num_tokens}"
    if not num_tokens:
        return None
    if held.keys is None or held.values is None:
        return f"it is empty, expected {num_tokens} tokens"
    shapes = zip(caches.stored_shape(model, index), (held.keys, held.values), strict=True)
    held_entries = getattr(held, "entries", num_tokens)  # between two tokenizers, not one per token
    for side, ((heads, width), array) in zip(caches.SIDES, shapes, strict=True):
        if found := _of_array(array, model, layer, (heads, width), held_entries):
            return f"its {side} {found}"
    return None


def _of_parts(held: Any, recurrence: Recurrence, num_tokens: int) -> str | None:
    """The fault of a recurrent layer's cache in words, or None; it does not say how long it is."""
    found = caches.held(held)
    if not num_tokens and not found:
        return None
    for name, shape in zip(caches.PARTS, recurrence.parts, strict=False):
        if name not in found:
            return f"it has no {name}, expected one of {num_tokens} tokens"
        if found[name].shape != (1, *shape):
            return f"its {name} has shape {found[name].shape}, expected {(1, *shape)}"
    return None


def _of_array(
    array: mx.array,
    model: LanguageModel,
    layer: LayerGeometry,
    form: tuple[int, int],
    num_tokens: int,
) -> str | None:
    heads, width = form
    fewest = min(num_tokens, layer.window or num_tokens)
    if array.ndim != 4 or (array.shape[0], array.shape[1], array.shape[3]) != (1, heads, width):
        return f"have shape {array.shape}, expected (1, {heads}, {fewest} or more, {width})"
    if array.shape[2] < fewest:
        return f"have room for {array.shape[2]} tokens, expected {fewest} or more"
    if array.dtype != model.cache_dtype:
        return f"are {array.dtype}, expected {model.cache_dtype}"
    return None


def first_bad(cache: Sequence[Any], model: LanguageModel) -> str | None:
    """The first place in a cache with NaN or Inf, in words, or None; this reads all numbers."""
    for held, layer in zip(cache, model.geometry.layers, strict=False):
        for name, array in caches.held(held).items():
            if isinstance(array, mx.array) and not mx.isfinite(array).all().item():
                return f"layer {layer.layer}'s {name}"
    return None


def room_for(model: LanguageModel, num_tokens: int, max_tokens: int) -> int:
    """The tokens that a model can add to a prompt: ``max_tokens`` (-1: no limit) or less.

    The context limits them. The very last token need not be run, so one more than fits is allowed.
    """
    room = model.context_length + 1 - num_tokens
    return room if max_tokens == -1 else min(max_tokens, room)
