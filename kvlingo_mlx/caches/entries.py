"""Caches whose entries are not one a token: those of two tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

import mlx_lm.models.cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, create_attention_mask

from kvlingo_mlx.errors import UnsupportedModelError


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


def move_on(caches: Sequence[PositionedKVCache], position: int) -> None:
    """Let the next token's position be another."""
    for cache in caches:
        cache.offset = position


def shorten(caches: Sequence[PositionedKVCache], position: int, entries: int) -> None:
    """Go back to a shorter length: the next position, and how many entries stay."""
    for cache in caches:
        cache.offset, cache.entries = position, entries
