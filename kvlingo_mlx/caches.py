"""The only file that knows mlx-lm's cache classes: make them, write them, read them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, nn

import mlx_lm.models.cache
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import LATENT, Finish
from kvlingo_mlx.keys import Rotation, advance, at_positions, normalise_values, rotate_back
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.states import KVStates, LayerGroup, TranslatedStates, flat

GROW = KVCache.step
SIDES = ("keys", "values")
MOVING = ("offset", "_idx", "entries")  # what a cache's numbers say of how far it is written
Sides = tuple[mx.array, mx.array]
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # what MLX quantises by


class _Pinned:
    """Entries of a prefix that are not one a token: to trim tokens would be to trim others."""

    prefix: int = 0
    offset: int

    def trim(self, n: int) -> int:
        """Drop the last ``n`` entries.

        Raises:
            ValueError: Some of them are the prefix's.
        """
        if n > self.offset - self.prefix:
            raise ValueError(
                f"{n} entries are to be trimmed, but only {self.offset - self.prefix} follow the "
                f"{self.prefix} of a prefix translated between two tokenizers, which are not one "
                "a token; hand over again"
            )
        self.offset -= n
        return n


class TranslatedKVCache(_Pinned, KVCache):
    """A stock cache but for ``trim``, which does not reach into a prefix of two tokenizers."""

    @property
    def state(self) -> tuple[Any, ...]:
        """What is evaluated and saved."""
        return *super().state, self.prefix

    @state.setter
    def state(self, saved: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.prefix = saved

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """The same in fewer bits."""
        stock = super().to_quantized(group_size, bits)
        found = TranslatedQuantizedKVCache(group_size, bits)
        found.keys, found.values, found.offset = stock.keys, stock.values, stock.offset
        found.prefix = self.prefix
        return found


class TranslatedQuantizedKVCache(_Pinned, QuantizedKVCache):
    """What :class:`TranslatedKVCache` becomes under ``kv_bits``."""

    @property
    def state(self) -> tuple[Any, ...]:
        """What is evaluated and saved."""
        return *super().state, self.prefix

    @state.setter
    def state(self, saved: tuple[Any, ...]) -> None:
        *stock, self.prefix = saved
        self.keys, self.values, self.offset, self.group_size, self.bits = stock


class PositionedKVCache(KVCache):
    """Entries at true positions, not one a token: the next position is kept apart from the length.

    ``offset`` is the number of the model's own tokens, where the next one is rotated, and
    ``entries`` how much is stored. A token sees all entries that were there before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append tokens' own keys and values, an entry each; returns all there are."""
        self.put(keys, values)
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def put(self, keys: mx.array, values: mx.array) -> None:
        """Append entries (B, H, S, D); the next position stays as it is."""
        offset, self.offset = self.offset, self.entries  # a stock cache writes at its offset
        try:
            super().update_and_fetch(keys, values)
            self.entries = self.offset
        finally:
            self.offset = offset

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What is stored, (B, H, E, D) each."""
        return self.keys[..., : self.entries, :], self.values[..., : self.entries, :]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Of ``count`` tokens: causal, aligned to the last entry."""
        return create_attention_mask(count, self.entries, return_array, window_size)

    def is_trimmable(self) -> bool:
        """Never by a number of tokens alone: :func:`shorten` is also told how many entries stay."""
        return False

    def trim(self, n: int) -> int:
        """Nothing: how many entries ``n`` tokens have is not known here."""
        return 0

    def size(self) -> int:
        """How many entries there are."""
        return self.entries

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """Not possible, as mlx-lm's quantised cache knows no positions."""
        raise UnsupportedModelError(
            "a PositionedKVCache cannot be quantised; leave out kv_bits (--kv-bits)"
        )

    @classmethod
    def merge(cls, caches: Any) -> Any:
        """Not possible, as mlx-lm's batches take a cache's length for its next position."""
        raise UnsupportedModelError("a PositionedKVCache cannot be part of a batch")

    @property
    def state(self) -> tuple[Any, ...]:
        """What is evaluated and saved."""
        return *super().state, self.entries

    @state.setter
    def state(self, saved: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.entries = saved


# load_prompt_cache looks there.
for _cls in (TranslatedKVCache, TranslatedQuantizedKVCache, PositionedKVCache):
    setattr(mlx_lm.models.cache, _cls.__name__, _cls)


def pin(caches: Sequence[Any]) -> list[Any]:
    """The same caches, all that they hold now kept from being trimmed."""
    pinned = []
    for cache in caches:
        found = TranslatedKVCache()
        found.keys, found.values, found.offset = cache.state
        found.prefix = cache.offset
        pinned.append(found)
    return pinned


def positioned(caches: Sequence[Any]) -> list[Any]:
    """Stock caches without windows, as ones whose entries need not be one a token."""
    made = []
    for cache in caches:
        found = PositionedKVCache()
        found.keys, found.values, found.offset = cache.keys, cache.values, cache.offset
        found.entries = getattr(cache, "entries", cache.offset)
        made.append(found)
    return made


def put(
    caches: Sequence[PositionedKVCache],
    states: TranslatedStates,
    model: LanguageModel,
    positions: mx.array,
) -> None:
    """Append a translated span, each entry rotated at its own of ``positions`` (S,); lazily.

    The next token's position stays as it was: :func:`move_on`.
    """
    for layer, _, stored in _stored(states, model, positions):
        caches[layer].put(*stored)


def move_on(caches: Sequence[PositionedKVCache], position: int) -> None:
    """Let the next token's position be another."""
    for cache in caches:
        cache.offset = position


def shorten(caches: Sequence[PositionedKVCache], position: int, entries: int) -> None:
    """Go back to a shorter length: the next position, and how many entries stay."""
    for cache in caches:
        cache.offset, cache.entries = position, entries


def allocate(model: LanguageModel, num_tokens: int, batch: int = 1) -> list[Any]:
    """Stock mlx-lm caches of ``num_tokens`` that :func:`write` has yet to write, and room to grow.

    ``batch`` prompts of that length lie side by side. The room is taken once, so that neither
    writing in chunks nor the first decoding step copies what is there. A ring has no more room
    than its window.

    Raises:
        UnsupportedModelError: A layer uses a cache that translation cannot write.
    """
    caches = empty(model)
    capacity = (num_tokens // GROW + 1) * GROW
    for index, (cache, layer) in enumerate(zip(caches, model.geometry.layers, strict=True)):
        if not num_tokens:
            continue
        room = min(capacity, layer.window or capacity)
        cache.keys, cache.values = (
            mx.zeros((batch, heads, room, dim), model.cache_dtype)
            for heads, dim in stored_shape(model, index)
        )
        cache.offset = num_tokens
        if layer.window is not None:  # in temporal order, so the next one replaces the oldest
            cache._idx = min(num_tokens, layer.window)
    return caches


def empty(model: LanguageModel, step: int = GROW) -> list[Any]:
    """Stock mlx-lm caches that hold nothing, and grow by ``step`` tokens at a time.

    Raises:
        UnsupportedModelError: A layer uses a cache that translation cannot write.
    """
    caches = make_prompt_cache(model.model)
    for cache, layer in zip(caches, model.geometry.layers, strict=True):
        if type(cache) not in (KVCache, RotatingKVCache):
            raise UnsupportedModelError(
                f"layer {layer.layer} of {model.name} uses {type(cache).__name__}, "
                "which a translation cannot write; only KVCache and RotatingKVCache are supported"
            )
        if step != GROW:
            cache.step = step
    return caches


def write(
    caches: Sequence[Any],
    states: TranslatedStates,
    model: LanguageModel,
    positions: mx.array | None = None,
) -> None:
    """Write a translated span at its place: norms, RoPE, cast, one slice a layer and side.

    Keys are rotated there too, unless each token has its own of ``positions`` (T,). Nothing is
    evaluated here.
    """
    for layer, start, stored in _stored(states, model, positions):
        cache = caches[layer]
        place = _place(cache, start, stored[0])
        cache.keys[..., place, :], cache.values[..., place, :] = stored


def prefill_between(
    model: LanguageModel,
    cache: Sequence[Any],
    tokens: Sequence[int],
    positions: Sequence[int],
    visible: mx.array,
    step_size: int = 2048,
) -> None:
    """Let a model read tokens that stand between what its caches hold already.

    Their entries follow the E that are there; attention does not depend on the order of
    entries, so who sees whom is the mask's to say. Evaluated chunk by chunk.

    Args:
        model: The model.
        cache: Its caches, E entries written in each, none of them a ring.
        tokens: (B,) what it reads, in the text's order.
        positions: (B,) where each is rotated; any integers.
        visible: (B, E + B) whether a token sees an entry, itself included.
        step_size: Tokens a chunk.
    """
    held = visible.shape[1] - len(tokens)
    for each in cache:
        each.offset = held
    for start in range(0, len(tokens), step_size):
        stop = min(start + step_size, len(tokens))
        seen = visible[start:stop, : held + stop][None, None]
        with _rotated_at(model, mx.array(list(positions[start:stop]))), _masked(cache, seen):
            model.model(mx.array(list(tokens[start:stop]))[None], cache=cache)
        mx.eval(arrays(cache))
        mx.clear_cache()


@contextlib.contextmanager
def _rotated_at(model: LanguageModel, positions: mx.array) -> Iterator[None]:
    """Rotate each token of a forward pass at a position of its own, whatever a cache's length."""

    def placed(cls: type[nn.Module]) -> type[nn.Module]:
        class Placed(cls):  # type: ignore[misc, valid-type]
            def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
                return at_positions(super().__call__, x, positions)

        return Placed

    ropes = {id(r): r for r in map(model.family.rotary, model.attentions)}.values()
    with _reclassed(ropes, placed):
        yield


@contextlib.contextmanager
def _masked(caches: Sequence[Any], visible: mx.array) -> Iterator[None]:
    """Let attention see what ``visible`` says, (1, 1, B, E), in place of what came before."""

    def masked(cls: type) -> type:
        class Masked(cls):  # type: ignore[misc, valid-type]
            def make_mask(self, *args: Any, **kwargs: Any) -> mx.array:
                return visible

        return Masked

    with _reclassed(caches, masked):
        yield


@contextlib.contextmanager
def _reclassed(objects: Iterable[Any], derive: Callable[[type], type]) -> Iterator[None]:
    """Let objects be of a class derived from their own for a while."""
    found = [(each, type(each)) for each in objects]
    try:
        for each, cls in found:
            each.__class__ = derive(cls)
        yield
    finally:
        for each, cls in found:
            each.__class__ = cls


def append(caches: Sequence[Any], states: TranslatedStates, model: LanguageModel) -> None:
    """Let caches take a translated span after what they hold, as they take native tokens.

    Where a layer's span begins later than its ring ends, it is the whole of its window, and
    all that the ring holds is out of it for good. Nothing is evaluated here.
    """
    for layer, start, stored in _stored(states, model):
        cache = caches[layer]
        if start > cache.offset:
            cache.keys, cache.values = stored
            cache._idx = stored[0].shape[2]
            cache.offset = start + cache._idx
        else:
            cache.update_and_fetch(*stored)


def copy(caches: Sequence[Any], into: Sequence[Any]) -> None:
    """Write what caches hold at its positions into longer ones, as far as these hold them."""
    for cache, longer in zip(caches, into, strict=True):
        held = _held(cache)
        start = cache.offset - held[0].shape[2]
        first = longer.offset - longer._idx if is_ring(longer) else 0
        keys, values = (array[..., max(0, first - start) :, :] for array in held)
        if keys.shape[2]:
            place = _place(longer, max(start, first), keys)
            longer.keys[..., place, :], longer.values[..., place, :] = keys, values


def _stored(
    states: TranslatedStates, model: LanguageModel, positions: mx.array | None = None
) -> Iterator[tuple[int, int, tuple[mx.array, mx.array]]]:
    """By cache layer, the first position and what is stored from there on: norms, RoPE, cast."""
    rotations: dict[int, Rotation] = {}

    def finish_keys(array: mx.array, finishes: Sequence[Finish], start: int) -> mx.array:
        at = start if positions is None else positions
        rotation = rotations.setdefault(start, Rotation(at))
        return advance(array, finishes, rotation, states.capture, "post_rope")

    def finish_values(array: mx.array, finishes: Sequence[Finish], start: int) -> mx.array:
        return normalise_values(array, finishes, states.capture)

    keys = _finished(states.keys, model, finish_keys)
    values = _finished(states.values, model, finish_values)
    for layer, (start, array) in keys.items():
        stored = model.family.stored(model.attentions[layer], array, values[layer][1])
        yield layer, start, stored


def _finished(
    groups: Sequence[LayerGroup],
    model: LanguageModel,
    finish: Callable[[mx.array, Sequence[Finish], int], mx.array],
) -> dict[int, tuple[int, mx.array]]:
    """By layer, the first position and (B, H, T, D) in the cache's dtype."""
    found: dict[int, tuple[int, mx.array]] = {}
    for group in groups:
        finishes = [model.finishes[layer] for layer in group.layers]
        done = finish(group.states, finishes, group.start).astype(model.cache_dtype)
        found |= {layer: (group.start, a) for layer, a in zip(group.layers, done, strict=True)}
    return found


def stored_shape(model: LanguageModel, layer: int) -> list[tuple[int, int]]:
    """Heads and width of the keys and of the values that one cache layer stores."""
    geometry, dtype = model.geometry.layers[layer], model.cache_dtype
    keys, values = (
        mx.zeros((1, geometry.kv_heads, 1, dim), dtype)
        for dim in (geometry.key_dim, geometry.value_dim)
    )
    stored = model.family.stored(model.attentions[layer], keys, values)  # never evaluated
    return [(array.shape[1], array.shape[3]) for array in stored]


def bytes_per_token(model: LanguageModel) -> int:
    """Bytes that one token takes in a model's cache."""
    shapes = (stored_shape(model, layer) for layer in range(len(model.attentions)))
    return model.cache_dtype.size * sum(heads * dim for both in shapes for heads, dim in both)


def check_bits(model: LanguageModel, bits: int, group_size: int) -> None:
    """Refuse ``kv_bits`` for a model whose cache mlx-lm cannot quantise.

    mlx-lm would only find out on the way, in the middle of an answer perhaps: it quantises as
    soon as ``quantized_kv_start`` tokens are cached.

    Raises:
        UnsupportedModelError: A layer keeps a window, is read by other layers too, or its
            attention handles the cached arrays itself.
        ValueError: MLX has no such number of bits, or groups that do not divide a layer's widths.
    """
    shared = [len(readers) > 1 for readers in model.family.readers(model.model)]
    reasons = {
        "which keep a window in a RotatingKVCache": [bool(g.window) for g in model.geometry.layers],
        "which later layers read too": shared,
        "whose attention handles the cached arrays itself": [not model.family.quantised_cache]
        * len(shared),
    }
    for reason, layers in reasons.items():
        if any(layers):
            raise UnsupportedModelError(
                f"kv_bits cannot be used with {model.name}: mlx-lm cannot quantise {sum(layers)} "
                f"of its {len(layers)} cache layers (the first: layer {layers.index(True)}), "
                f"{reason}; leave out kv_bits (--kv-bits)"
            )
    check_groups(model, bits, group_size)


def check_groups(model: LanguageModel, bits: int, group_size: int) -> None:
    """Refuse (ValueError) bits that MLX does not have, or groups that no row is a multiple of."""
    if bits not in BITS:
        raise ValueError(f"kv_bits is {bits!r}; give {_listed(BITS)}")
    shapes = (stored_shape(model, layer) for layer in range(len(model.attentions)))
    widths = sorted({width for both in shapes for _, width in both})
    possible = [size for size in GROUP_SIZES if not any(width % size for width in widths)]
    if group_size not in possible:
        wanted = f"make it {_listed(possible)}" if possible else "leave out kv_bits (--kv-bits)"
        raise ValueError(
            f"kv_group_size is {group_size}, but the keys and values that {model.name} caches are "
            f"{_listed(widths, 'and')} numbers wide; {wanted}"
        )


def _listed(numbers: Sequence[int], word: str = "or") -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} {word} {last}" if first else last


def check_draft(
    target: LanguageModel, draft: LanguageModel, num_tokens: int, max_tokens: int
) -> None:
    """Refuse speculative decoding where mlx-lm cannot take back what a draft got wrong.

    A full window has forgotten what a rejected token replaced. mlx-lm looks for that before it
    starts, at the target alone; once a window fills later, its answers are silently wrong.

    Raises:
        UnsupportedModelError: A window would fill within ``num_tokens + max_tokens``, or the
            target's caches cannot be told from the draft's, as some layers have none.
    """
    for model in (target, draft):
        windows = [g.window for g in model.geometry.layers if g.window is not None]
        if windows and num_tokens + max_tokens >= min(windows):
            raise UnsupportedModelError(
                f"draft_model cannot be used: {model.name} keeps windows of {min(windows)} tokens "
                "(RotatingKVCache), from which mlx-lm cannot take back rejected tokens once they "
                f"are full; {num_tokens} tokens of the prompt and max_tokens={max_tokens} fill "
                "them; leave out draft_model (--draft-model)"
            )
    owners, layers = len(target.attentions), len(target.model.layers)
    if owners < layers:
        raise UnsupportedModelError(
            f"draft_model cannot be used: {target.name} has {layers} layers but caches for only "
            f"{owners}, which mlx-lm's speculative decoding does not allow for; leave out "
            "draft_model (--draft-model)"
        )


def read(caches: Sequence[Any], model: LanguageModel, goal: str = "post_rope") -> KVStates:
    """What a model's caches hold, saved ones perhaps, as its states; nothing is computed anew.

    Args:
        caches: Stock mlx-lm caches of ``model``, one a layer. A ring gives its window.
        model: The model that wrote them.
        goal: The capture point wanted. Keys are rotated back to be post-norm, which costs an
            error of a rounding; keys before a norm cannot be had, for it took their lengths.

    Returns:
        Arrays (B, T, H * D); those of rings hold the last tokens alone.

    Raises:
        ValueError: No such point, another number of layers, or empty caches.
        UnsupportedModelError: A cache of another class, or a point before a norm.
    """
    if LATENT in model.family.points:
        raise UnsupportedModelError(
            f"{model.name} caches latents, which are not read back: prefill it again"
        )
    if goal not in model.family.points:
        points = ", ".join(model.family.points)
        raise ValueError(f"goal is {goal!r}; the capture points of {model.name} are {points}")
    normed = [f.norm_weight is not None or f.value_eps is not None for f in model.finishes]
    if goal == "pre_norm" and any(normed):
        raise UnsupportedModelError(
            f"{model.name} norms its keys before they are cached, so pre_norm keys cannot be read "
            "from a cache; prefill it again, or use a translator captured post_norm or post_rope"
        )
    if len(caches) != len(model.finishes) or any(getattr(c, "keys", None) is None for c in caches):
        raise ValueError(
            f"{len(caches)} caches, expected {len(model.finishes)} of {model.name}, all filled"
        )
    keys, values = [], []
    for cache, finish in zip(caches, model.finishes, strict=True):
        entry, value = _held(cache)
        if goal != "post_rope":
            entry = rotate_back(entry, finish, cache.offset - entry.shape[2])
        keys.append(flat(entry))
        values.append(flat(value))
    end = {cache.offset for cache in caches}
    if len(end) != 1:
        raise ValueError(f"the caches end at different positions: {sorted(end)}")
    longest = max(array.shape[1] for array in keys)
    return KVStates(tuple(keys), tuple(values), goal, end.pop() - longest)


def viewed(cache: Any) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...], tuple[int, int] | None]:
    """What a cache holds, oldest first, without a copy: keys, values, group size and bits.

    Keys and values are one array (B, H, T, D), or words, scales and biases of a quantised cache.
    A ring that has turned is copied.

    Raises:
        UnsupportedModelError: A cache of another class.
    """
    if type(cache) is QuantizedKVCache and cache.keys is not None:
        keys, values = (
            tuple(array[..., : cache.offset, :] for array in side)
            for side in (cache.keys, cache.values)
        )
        return keys, values, (cache.group_size, cache.bits)
    held = _held(cache)
    # A new array each: to write to a cache later is to write to its own.
    entry, value = (array[..., : array.shape[2], :] for array in held)
    return (entry,), (value,), None


def settle(caches: Sequence[Any]) -> None:
    """Let rings go of what a prefill left in them beyond their windows, in temporal order."""
    for cache in caches:
        if not is_ring(cache):
            continue
        cache.keys, cache.values = map(mx.contiguous, _held(cache))
        cache._idx = cache.keys.shape[2]
        mx.eval(cache.keys, cache.values)


def quantise(caches: list[Any], bits: int, group_size: int) -> None:
    """Quantise caches in place, one after the other; rings stay, as mlx-lm cannot quantise them.

    Their groups must fit: :func:`check_groups`.
    """
    for index, cache in enumerate(caches):
        if is_ring(cache):
            continue
        caches[index] = cache.to_quantized(group_size=group_size, bits=bits)
        mx.eval(caches[index].keys, caches[index].values)
        del cache


def _held(cache: Any) -> tuple[mx.array, mx.array]:
    """A cache's keys and values (B, H, T, D) up to its last position, without a gap."""
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


def is_ring(cache: Any) -> bool:
    """Whether a cache keeps a window alone, and cannot be trimmed once it is full."""
    return isinstance(cache, RotatingKVCache)


def is_stock(cache: Any, window: int | None) -> bool:
    """Whether a cache is mlx-lm's own for a layer with such a window, or with none."""
    if window is None:
        return type(cache) in (KVCache, TranslatedKVCache, PositionedKVCache)
    return type(cache) is RotatingKVCache and cache.max_size == window


def numbers(cache: Any) -> dict[str, int]:
    """What a cache knows besides its arrays: its length, a ring's size and where it writes."""
    return {name: value for name, value in vars(cache).items() if name not in SIDES}


def restored(model: LanguageModel, layer: int, known: Mapping[str, int], arrays: Sides) -> Any:
    """A cache layer from what :func:`numbers` said of it, and its two arrays as they lay.

    Raises:
        ValueError: They do not describe this layer of ``model``.
    """
    cache = make_prompt_cache(model.model)[layer]
    if "entries" in known and type(cache) is KVCache:
        cache = PositionedKVCache()
    fixed = {name: value for name, value in numbers(cache).items() if name not in MOVING}
    if set(known) != set(numbers(cache)) or any(known[n] != value for n, value in fixed.items()):
        raise ValueError(f"layer {layer} of {model.name} has a {type(cache).__name__} of {fixed}")
    room = arrays[0].shape[2]
    for array, (heads, width) in zip(arrays, stored_shape(model, layer), strict=True):
        if array.shape != (1, heads, room, width) or array.dtype != model.cache_dtype:
            raise ValueError(
                f"layer {layer} of {model.name} holds {array.dtype} {array.shape}; expected "
                f"{model.cache_dtype} {(1, heads, room, width)}"
            )
    if known.get("_idx", known.get("entries", known["offset"])) > room:
        raise ValueError(f"layer {layer} of {model.name} holds {room} tokens, not {known}")
    vars(cache).update(known)
    cache.keys, cache.values = arrays
    return cache
