"""Caches, used between two tokenizers, whose entries do not correspond one to one to tokens."""

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

import mlx_lm.models.cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, create_attention_mask


class _Pinned:
    """Refuses to trim a prefix whose entries do not correspond one to one to tokens."""

    prefix: int = 0
    offset: int

    @property
    def state(self) -> tuple[Any, ...]:
        return *super().state, self.prefix  # type: ignore[misc]

    @state.setter
    def state(self, saved: tuple[Any, ...]) -> None:
        *stock, self.prefix = saved
        super(_Pinned, type(self)).state.__set__(self, stock)  # type: ignore[misc]

    def trim(self, n: int) -> int:
        """Drop the last ``n`` entries.

        Raises:
            ValueError: Some of them belong to the prefix.
        """
        if n > self.offset - self.prefix:
            raise ValueError(
                f"{n} entries cannot be trimmed: only {self.offset - self.prefix} follow the "
                f"prefix from another tokenizer, whose {self.prefix} entries are not one a token; "
                "hand over again"
            )
        self.offset -= n
        return n


class TranslatedKVCache(_Pinned, KVCache):
    """A stock cache whose ``trim`` does not reach into a prefix translated between tokenizers."""

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """The same cache quantised to ``bits``."""
        stock = super().to_quantized(group_size, bits)
        return TranslatedQuantizedKVCache.from_state((*stock.state, self.prefix))


class TranslatedQuantizedKVCache(_Pinned, QuantizedKVCache):
    """The quantised form of :class:`TranslatedKVCache`, for ``kv_bits``."""


class PositionedKVCache(KVCache):
    """A cache whose next position is kept apart from its length, for entries at true positions.

    Its entries do not correspond one to one to tokens. ``offset`` is the number of the model's own
    tokens, at which the next token is rotated; ``entries`` is the number of stored entries. A token
    sees all entries that were stored before it. It stays in a conversation's line: mlx-lm neither
    quantises, merges nor saves it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append tokens' own keys and values, one entry per token; return all that is stored."""
        self.put(keys, values)
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def put(self, keys: mx.array, values: mx.array) -> None:
        """Append entries (B, H, S, D); the next position does not change."""
        offset, self.offset = self.offset, self.entries  # a stock cache writes at its offset
        try:
            super().update_and_fetch(keys, values)
            self.entries = self.offset
        finally:
            self.offset = offset

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The stored keys and values, (B, H, E, D) each."""
        return self.keys[..., : self.entries, :], self.values[..., : self.entries, :]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """The mask of ``count`` new tokens: causal, aligned to the last entry."""
        return create_attention_mask(count, self.entries, return_array, window_size)

    def is_trimmable(self) -> bool:
        """False: to trim, :func:`shorten` must also be told how many entries stay."""
        return False


# load_prompt_cache looks up cache classes in this module.
for _cls in (TranslatedKVCache, TranslatedQuantizedKVCache):
    setattr(mlx_lm.models.cache, _cls.__name__, _cls)


def pin(caches: Sequence[Any]) -> list[Any]:
    """Copies of the caches whose present entries cannot be trimmed; the arrays are shared."""
    return [TranslatedKVCache.from_state((*cache.state, cache.offset)) for cache in caches]


def positioned(caches: Sequence[Any]) -> list[Any]:
    """Stock caches without windows, converted to :class:`PositionedKVCache`."""
    made = []
    for cache in caches:
        found = PositionedKVCache()
        found.keys, found.values, found.offset = cache.keys, cache.values, cache.offset
        found.entries = getattr(cache, "entries", cache.offset)
        made.append(found)
    return made
