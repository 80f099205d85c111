"""The only room that knows mlx-lm's cache classes: it makes, writes and reads caches."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, on_gpu

import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvlingo_mlx.caches.entries import PositionedKVCache, TranslatedKVCache
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import LATENT, Finish
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.models.capture import recurrent_states
from kvlingo_mlx.models.keys import Rotation, advance, normalise_values, rotate_back
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates, LayerGroup, TranslatedStates, flat

GROW = KVCache.step
SIDES = ("keys", "values")
PARTS = ("tail", "state")  # of a recurrent layer's cache, which has one or both
Sides = tuple[mx.array, mx.array]


def empty(model: LanguageModel, step: int = GROW) -> list[Any]:
    """Stock mlx-lm caches that are empty and grow by ``step`` tokens at a time.

    Raises:
        UnsupportedModelError: A layer uses a cache that translation cannot write.
    """
    caches = make_prompt_cache(model.model)
    for cache, layer in zip(caches, model.geometry.layers, strict=True):
        known = (KVCache, RotatingKVCache) if layer.recurrence is None else (ArraysCache,)
        if type(cache) not in known:
            raise UnsupportedModelError(
                f"layer {layer.layer} of {model.name} uses {type(cache).__name__}, which a "
                f"translation cannot write; only {' and '.join(c.__name__ for c in known)} can be"
            )
        if step != GROW and layer.recurrence is None:
            cache.step = step
    return caches


def append(
    caches: Sequence[Any],
    states: TranslatedStates,
    model: LanguageModel,
    positions: mx.array | None = None,
) -> None:
    """Append a translated span to caches: norms, RoPE, cast, one slice per layer and side.

    If a layer's span begins after the end of its ring, the span fills the layer's whole window and
    replaces all that the ring held. Keys are rotated at the span's positions too, unless
    ``positions`` (T,) gives each token its own; the next token's position in a
    :class:`PositionedKVCache` does not change then. Nothing is evaluated.
    """
    for layer, start, stored in _stored(states, model, positions):
        cache = caches[layer]
        if is_recurrent(cache):
            cache.cache = list(_followed(model, layer, cache.cache, stored))
        elif positions is not None and isinstance(cache, PositionedKVCache):
            cache.put(*stored)
        elif on_gpu() and type(cache) is KVCache and not cache.offset:
            _begin(cache, stored)
        elif start > cache.offset:
            # Arrays of their own: products are made in blocks, of which these may be a part.
            cache.keys, cache.values = map(mx.contiguous, stored)
            cache._idx = stored[0].shape[2]
            cache.offset = start + cache._idx
        elif is_ring(cache) and _begun_late(cache):  # mlx-lm would look for what came before
            held = cache.keys, cache.values
            cache.keys, cache.values = (
                mx.concatenate(list(both), axis=2) for both in zip(held, stored, strict=True)
            )
            cache._idx = cache.keys.shape[2]
            cache.offset += stored[0].shape[2]
        else:
            cache.update_and_fetch(*stored)
    for layer, state in states.kept.items():  # mapped states, in the place of what was held
        caches[layer].cache = list(with_tail(model, layer, state))


def _begin(cache: KVCache, stored: Sides) -> None:
    """Let an empty cache begin with a span, in arrays with room: one kernel each, nothing zeroed.

    What fills the room is overwritten before it is read.
    """
    tokens, step = stored[0].shape[2], cache.step
    room = -(-tokens // step) * step if cache.keys is None else cache.keys.shape[2]
    cache.keys, cache.values = (mx.take(array, _rows(tokens, room), axis=2) for array in stored)
    cache.offset = tokens


@functools.lru_cache(maxsize=8)
def _rows(tokens: int, room: int) -> mx.array:
    return mx.array(np.minimum(np.arange(room), tokens - 1))


def _begun_late(ring: Any) -> bool:
    """Whether a ring's window is not full yet, though tokens came before those that it holds."""
    return ring.keys is not None and ring.keys.shape[2] < min(ring.offset, ring.max_size)


def reserve(caches: Sequence[Any], model: LanguageModel, num_tokens: int) -> None:
    """Make room for ``num_tokens`` and more in empty caches; rings and states need none.

    So neither writing in chunks nor the first decoding step copies the content.

    Raises:
        UnsupportedModelError: A layer uses a cache that translation cannot write.
    """
    empty(model)  # which refuses other caches
    room = (num_tokens // GROW + 1) * GROW
    for index, cache in enumerate(caches if num_tokens else ()):
        if not forgets(cache) and cache.keys is None:
            cache.keys, cache.values = (
                mx.zeros((1, heads, room, dim), model.cache_dtype)
                for heads, dim in stored_shape(model, index)
            )


def with_tail(model: LanguageModel, layer: int, state: mx.array) -> tuple[mx.array, mx.array]:
    """What a recurrent layer's cache holds with a mapped state: an empty tail before it.

    The last inputs of the convolution are not mapped. So the first ``kernel - 1`` tokens that
    follow see zeros in their place, as at the beginning of a text.
    """
    recurrence = model.geometry.layers[layer].recurrence
    assert recurrence is not None
    shape = (len(state), *recurrence.parts[0])
    return mx.zeros(shape, model.cache_dtype), state


def entry(
    model: LanguageModel,
    layer: int,
    keys: mx.array,
    values: mx.array,
    capture: str,
    start: int = 0,
    positions: mx.array | None = None,
    kept: Sequence[mx.array | None] = (None,) * len(PARTS),
) -> tuple[mx.array, ...]:
    """What one layer's cache holds of translated keys and values (T, width), lazily.

    The first one is at position ``start``, or each at its own of ``positions`` (T,). A recurrent
    layer holds what its recurrence makes of them from what it ``kept`` before.
    """
    heads = model.geometry.layers[layer].kv_heads
    one, other = (
        (LayerGroup((layer,), start, side.reshape(1, 1, len(side), heads, -1).swapaxes(2, 3)),)
        for side in (keys, values)
    )
    states = TranslatedStates(one, other, capture)
    ((_, _, stored),) = _stored(states, model, positions)
    if model.geometry.layers[layer].recurrence is not None:
        return _followed(model, layer, kept, stored)
    return stored


def _followed(
    model: LanguageModel, layer: int, kept: Sequence[mx.array | None], stored: Sides
) -> tuple[mx.array, ...]:
    """What a recurrent layer keeps after a span of inputs (B, 1, T, width), lazily."""
    keys, values = (array[:, 0] for array in stored)
    return model.family.followed(model.attentions[layer], kept, keys, values)


def _stored(
    states: TranslatedStates, model: LanguageModel, positions: mx.array | None = None
) -> Iterator[tuple[int, int, tuple[mx.array, mx.array]]]:
    """For each cache layer, the first position and the arrays to store: norms, RoPE, cast."""
    rotations: dict[int, Rotation] = {}
    states = model.own_heads(states)

    def finish_keys(group: LayerGroup, finishes: Sequence[Finish]) -> mx.array:
        at = group.start if positions is None else positions
        rotation = rotations.setdefault(group.start, Rotation(at))
        return advance(
            group.states, finishes, rotation, states.capture, "post_rope", group.by_token
        )

    def finish_values(group: LayerGroup, finishes: Sequence[Finish]) -> mx.array:
        return normalise_values(group.states, finishes, states.capture, group.by_token)

    keys = _finished(states.keys, model, finish_keys)
    values = _finished(states.values, model, finish_values)
    for layer, (start, array) in keys.items():
        stored = model.family.stored(model.attentions[layer], array, values[layer][1])
        yield layer, start, stored


def _finished(
    groups: Sequence[LayerGroup],
    model: LanguageModel,
    finish: Callable[[LayerGroup, Sequence[Finish]], mx.array],
) -> dict[int, tuple[int, mx.array]]:
    """For each layer, the first position and (B, H, T, D) in the cache's dtype."""
    found: dict[int, tuple[int, mx.array]] = {}
    for group in groups:
        finishes = [model.finishes[layer] for layer in group.layers]
        done = finish(group, finishes).astype(model.cache_dtype)
        found |= {layer: (group.start, a) for layer, a in zip(group.layers, done, strict=True)}
    return found


def stored_shape(model: LanguageModel, layer: int) -> list[tuple[int, int]]:
    """The heads and the width of the keys and of the values that one cache layer stores."""
    geometry, dtype = model.geometry.layers[layer], model.cache_dtype
    keys, values = (
        mx.zeros((1, geometry.kv_heads, 1, dim), dtype)
        for dim in (geometry.key_dim, geometry.value_dim)
    )
    stored = model.family.stored(model.attentions[layer], keys, values)  # never evaluated
    return [(array.shape[1], array.shape[3]) for array in stored]


def bytes_per_token(model: LanguageModel) -> int:
    """The bytes that one token takes in a model's cache."""
    return sum(bytes_by_layer(model))


def bytes_by_layer(model: LanguageModel) -> list[int]:
    """The bytes that one token takes in each of a model's cache layers; 0 in a recurrent one."""
    known: dict[tuple[Any, ...], int] = {}  # by shape: most layers are alike, and asking takes long
    found = []
    for index, layer in enumerate(model.geometry.layers):
        if layer.recurrence is not None:
            found.append(0)
            continue
        shape = layer.attention, layer.kv_heads, layer.key_dim, layer.value_dim
        if shape not in known:
            known[shape] = sum(heads * dim for heads, dim in stored_shape(model, index))
        found.append(known[shape] * model.cache_dtype.size)
    return found


def state_bytes(model: LanguageModel) -> int:
    """The bytes of a model's recurrent states, whatever the length of a text."""
    sizes = model.cache_dtype.size, mx.float32.size  # mlx-lm keeps states in float32
    return sum(
        math.prod(shape) * size
        for layer in model.geometry.layers
        if layer.recurrence is not None
        for shape, size in zip(layer.recurrence.parts, sizes, strict=False)
    )


def read(
    caches: Sequence[Any], model: LanguageModel, goal: str = "post_rope", *, kept: bool = False,
    first: int = 0,
) -> KVStates:  # fmt: skip
    """The content of a model's caches, which may be saved ones, as its states.

    Nothing is computed by the model again.

    Args:
        caches: Stock mlx-lm caches of ``model``, one per layer. A ring gives its window.
        model: The model that wrote them.
        goal: The capture point to return. For "post_norm", keys are rotated back, with a rounding
            error; keys before a norm cannot be recovered, since the norm removed their lengths.
        kept: Whether a hybrid's recurrent states are read, and not what went into them, which
            no cache holds.
        first: The position before which nothing is read.

    Returns:
        Arrays (B, T, H * D); those of rings hold the last tokens only, those of recurrent layers
        none.

    Raises:
        ValueError: There is no such point, the number of layers differs, or caches are empty.
        UnsupportedModelError: A cache is of another class, or the point is before a norm.
    """
    if LATENT in model.family.points:
        raise UnsupportedModelError(
            f"{model.name} caches latents, which are not read back: prefill it again"
        )
    if model.geometry.recurrent and not kept:
        raise UnsupportedModelError(
            f"{model.name} keeps recurrent states, and what went into them is not read back: "
            "prefill it again"
        )
    if goal not in model.family.points:
        points = ", ".join(model.family.points)
        raise ValueError(f"goal is {goal!r}; the capture points of {model.name} are {points}")
    normed = [f.norm_weight is not None or f.value_eps is not None for f in model.finishes]
    if goal == "pre_norm" and any(normed):
        raise UnsupportedModelError(
            f"{model.name} caches normed keys, so pre_norm keys cannot be read from a cache; read "
            "the prompt again, or make a translator that takes normed ones: `kvlingo-mlx pair "
            f"{model.name} TARGET --capture post_norm`"
        )
    if len(caches) != len(model.finishes) or not all(map(held, caches)):
        raise ValueError(
            f"{len(caches)} caches, expected {len(model.finishes)} of {model.name}, all filled"
        )
    keys, values, none = [], [], mx.zeros((1, 0, 0))
    layers = zip(caches, model.finishes, model.geometry.layers, strict=True)
    for index, (cache, finish, layer) in enumerate(layers):
        if layer.recurrence is not None:
            found = [array.shape for array in held(cache).values()]
            wanted = [(1, *shape) for shape in layer.recurrence.parts]
            if not is_recurrent(cache) or found != wanted:
                raise ValueError(
                    f"layer {index} of the caches holds {found}, expected a tail and a state of "
                    f"{model.name}, {wanted}"
                )
            keys.append(none)
            values.append(none)
            continue
        early = max(0, first - cache.offset + contents(cache)[0].shape[2])
        entry, value = (array[..., early:, :] for array in contents(cache))
        if goal != "post_rope":
            entry = rotate_back(entry, finish, cache.offset - entry.shape[2])
        keys.append(flat(entry))
        values.append(flat(value))
    end = {cache.offset for cache in caches if not is_recurrent(cache)}
    if len(end) != 1:
        raise ValueError(f"the caches end at different positions: {sorted(end)}")
    longest = max(array.shape[1] for array in keys)
    states = recurrent_states(model, caches) if kept else None
    return KVStates(tuple(keys), tuple(values), goal, end.pop() - longest, states)


def viewed(cache: Any) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...], tuple[int, int] | None]:
    """The content of a cache, oldest first, not copied: keys, values, and (group size, bits).

    Keys and values are one array (B, H, T, D) each, or the words, scales and biases of a quantised
    cache. A ring that has wrapped around is copied.

    Raises:
        UnsupportedModelError: The cache is of another class.
    """
    if type(cache) is QuantizedKVCache and cache.keys is not None:
        keys, values = (
            tuple(array[..., : cache.offset, :] for array in side)
            for side in (cache.keys, cache.values)
        )
        return keys, values, (cache.group_size, cache.bits)
    held = contents(cache)
    # Each is a new array object, so later writes to the cache's own arrays do not change it.
    entry, value = (array[..., : array.shape[2], :] for array in held)
    return (entry,), (value,), None


def settle(caches: Sequence[Any]) -> None:
    """Reduce rings to their windows, in temporal order, after a prefill left more in them."""
    for cache in caches:
        if not is_ring(cache):
            continue
        cache.keys, cache.values = map(mx.contiguous, contents(cache))
        cache._idx = cache.keys.shape[2]
        mx.eval(cache.keys, cache.values)


def quantise(caches: list[Any], bits: int, group_size: int) -> None:
    """Quantise caches in place, one by one; rings and recurrent states stay as they are.

    The groups must fit (:func:`check_groups`).
    """
    for index, cache in enumerate(caches):
        if forgets(cache):
            continue
        caches[index] = cache.to_quantized(group_size=group_size, bits=bits)
        mx.eval(caches[index].keys, caches[index].values)
        del cache


def contents(cache: Any) -> tuple[mx.array, mx.array]:
    """A cache's keys and values (B, H, T, D) up to its last position, in order."""
    if type(cache) is KVCache:
        return cache.keys_and_values()
    if type(cache) is not RotatingKVCache:
        raise UnsupportedModelError(
            f"a {type(cache).__name__} cannot be read; only KVCache and RotatingKVCache can: "
            "prefill the model again"
        )
    if cache.keep and cache.offset > cache.max_size:
        raise UnsupportedModelError(
            f"a RotatingKVCache that kept its first {cache.keep} tokens and forgot later ones "
            "cannot be read: prefill the model again, without max_kv_size"
        )
    kept = min(cache.offset, cache.max_size)
    keys, values = (cache._temporal_order(a)[..., -kept:, :] for a in (cache.keys, cache.values))
    return keys, values


def arrays(caches: Sequence[Any]) -> list[mx.array]:
    """The buffers of filled caches, so that they can be evaluated together."""
    return [array for cache in caches for array in held(cache).values()]


def held(cache: Any) -> dict[str, mx.array]:
    """A cache's arrays by name: keys and values, or a tail and a state; none if it is empty."""
    found = cache.cache if is_recurrent(cache) else (cache.keys, cache.values)
    both = zip(names(cache), found, strict=True)
    return {name: array for name, array in both if array is not None}


def names(cache: Any) -> tuple[str, ...]:
    """The names of the arrays that a cache has once it is filled."""
    return PARTS[: len(cache.cache)] if is_recurrent(cache) else SIDES


def put_part(cache: Any, name: str, array: mx.array | None) -> None:
    """Put an array into a cache, or None, by a name as in :func:`held`."""
    if is_recurrent(cache):
        cache.cache[PARTS.index(name)] = array
    else:
        setattr(cache, name, array)


def shared(cache: Any) -> Any:
    """A cache that shares its present arrays with ``cache``; MLX copies what either writes to."""
    made = object.__new__(type(cache))
    vars(made).update(vars(cache))
    if is_recurrent(cache):  # its arrays are replaced, never written to
        made.cache = list(cache.cache)
        return made
    for name, array in held(cache).items():
        put_part(made, name, array[...])
    return made


@contextlib.contextmanager
def rewound(caches: Sequence[Any], length: int) -> Iterator[None]:
    """Let caches end at ``length`` while the context is open; what lies beyond stays in them.

    Tokens that a model runs meanwhile take the place of the entries from ``length`` on. Rings
    and recurrent states end there already, and go on.
    """
    whole = [(cache, cache.offset) for cache in caches if not forgets(cache)]
    try:
        for cache, _ in whole:
            cache.offset = length
        yield
    finally:
        for cache, end in whole:
            cache.offset = end


@contextlib.contextmanager
def lent(caches: Sequence[Any], length: int) -> Iterator[None]:
    """Let caches end at ``length`` while the context is open, and be what they were afterwards.

    What is run meanwhile is forgotten. Rings and recurrent states cannot be lent.
    """
    held = []
    for cache in caches:
        both = (a[..., length : cache.offset, :] * 1 for a in (cache.keys, cache.values))
        held.append((cache, cache.offset, *both))  # copies: MLX writes in place
    mx.eval([arrays for _, _, *arrays in held])
    try:
        with rewound(caches, length):
            yield
    finally:
        for cache, end, keys, values in held:
            cache.keys[..., length:end, :] = keys
            cache.values[..., length:end, :] = values


def give_back(caches: Sequence[Any]) -> None:
    """Let go of what caches do not fill, where that is half of them or more; others stay."""
    moved: list[mx.array] = []
    for cache in caches:
        if forgets(cache) or cache.keys is None:
            continue
        room = (getattr(cache, "entries", cache.offset) // GROW + 1) * GROW
        if cache.keys.shape[2] >= 2 * room:  # a slice alone would keep the whole array in memory
            cache.keys, cache.values = (a[..., :room, :] * 1 for a in (cache.keys, cache.values))
            moved += [cache.keys, cache.values]
    mx.eval(moved)


def is_ring(cache: Any) -> bool:
    """Whether a cache keeps only a window; such a cache cannot be trimmed once it is full."""
    return isinstance(cache, RotatingKVCache)


def is_recurrent(cache: Any) -> bool:
    """Whether a cache keeps a recurrent state, which has no entries and cannot be trimmed."""
    return isinstance(cache, ArraysCache)


def forgets(cache: Any) -> bool:
    """Whether a cache may be unable to go back to fewer tokens: a ring or a recurrent state."""
    return is_ring(cache) or is_recurrent(cache)


def unlike_stock(cache: Any, layer: LayerGeometry) -> str | None:
    """What a cache should be for a layer, in words, if it is of another class; else None."""
    if layer.recurrence is not None:
        stock = type(cache) is ArraysCache and len(cache.cache) == len(layer.recurrence.parts)
        return None if stock else "an ArraysCache of its tail and state"
    if layer.window is None:
        stock = type(cache) in (KVCache, TranslatedKVCache, PositionedKVCache)
        return None if stock else "a KVCache"
    stock = type(cache) is RotatingKVCache and cache.max_size == layer.window
    return None if stock else "a RotatingKVCache of its window"
