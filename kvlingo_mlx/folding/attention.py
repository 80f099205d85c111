"""Attention of a target layer over a prefix that stays in its source's own cache.

For a rotated and scaled query q, translated keys T_K k + b_K and translated values T_V v + b_V
(appendix "Decoding under a memory budget"):

    scores    q . (T_K k + b_K) = (T_K^T q) . k + q . b_K
    result    T_V (sum p_i v_i) + (sum p_i) b_V + sum over new tokens p_j v_j

One softmax runs over the prefix and the new tokens, whose keys and values are the target's own.
So a map is applied once per layer and step, not once per cached token.

Legend: B batch, L new queries, Hq query heads, H target KV heads, R = L * Hq / H rows of queries
per KV head, Hs source heads, P visible tokens of the prefix, S new tokens, d and ds head widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.format.maps import Read
from kvlingo_mlx.translators.base import Translator


@dataclass(frozen=True)
class FoldedPrefix:
    """The prefix in one source layer's cache, or in one of its heads, which is never copied."""

    # One float array (B or 1, Hs or 1, T, ds), or MLX's quantised words, scales and biases of such
    # an array
    arrays: tuple[mx.array, ...]
    packing: tuple[int, int] | None = None  # group size and bits of quantised arrays, else None

    def head(self, index: int) -> FoldedPrefix:
        """This part with one source head only."""
        return FoldedPrefix(tuple(a[:, index : index + 1] for a in self.arrays), self.packing)

    def last(self, tokens: int) -> FoldedPrefix:
        """This part with the last ``tokens`` only.

        Raises:
            ValueError: The part has fewer tokens.
        """
        start = self.tokens - tokens
        if start < 0:
            raise ValueError(
                f"a source layer holds {self.tokens} tokens, and the last {tokens} are to be read; "
                "prefill the source"
            )
        return FoldedPrefix(tuple(a[..., start:, :] for a in self.arrays), self.packing)

    @property
    def batch(self) -> int:
        """The number of batch rows; 1 serves every row of the queries."""
        return self.arrays[0].shape[0]

    @property
    def tokens(self) -> int:
        """The number of tokens in this part."""
        return self.arrays[0].shape[-2]

    @property
    def width(self) -> int:
        """The width of one head."""
        if self.packing is None:
            return self.arrays[0].shape[-1]
        return self.arrays[1].shape[-1] * self.packing[0]

    def scores(self, queries: mx.array) -> mx.array:
        """Products of (B or 1, Hs or 1, rows, ds) with every token: (B or 1, Hs or 1, rows, P)."""
        if self.packing is None:
            return queries.astype(self.arrays[0].dtype) @ self.arrays[0].swapaxes(-1, -2)
        return self._packed_product(queries, transpose=True)

    def pooled(self, weights: mx.array) -> mx.array:
        """Weighted sums over tokens: weights (B or 1, Hs or 1, rows, P) give (..., rows, ds)."""
        if self.packing is None:
            return weights.astype(self.arrays[0].dtype) @ self.arrays[0]
        return self._packed_product(weights, transpose=False)

    def _packed_product(self, rows: mx.array, *, transpose: bool) -> mx.array:
        (weight, scales, biases), (group_size, bits) = self.arrays, self.packing or (0, 0)
        how: Any = {"transpose": transpose, "group_size": group_size, "bits": bits}
        return mx.quantized_matmul(rows.astype(scales.dtype), weight, scales, biases, **how)


@dataclass(frozen=True)
class QueryRows:
    """Which source heads meet which queries, and how queries are stacked for that.

    A head-mixing map pulls a query back onto every source head, so all queries meet each source
    head in turn. A head-wise map pulls it back onto one source head, so target heads are sorted by
    the source head that they read. Where source heads serve different numbers of target heads,
    repeated target heads fill the gaps.
    """

    groups: int  # source heads met at once: Hs, or 1 where maps mix heads
    # For each row of heads, its target head; None where they are in order
    order: mx.array | None = None
    back: mx.array | None = None  # the row of each target head after that sorting

    @classmethod
    def of(cls, head_map: Sequence[int] | None, source_heads: int) -> Self:
        """From a head-wise map's source head of each target head; None if the maps mix heads."""
        if head_map is None:
            return cls(1)
        served = [[t for t, s in enumerate(head_map) if s == head] for head in range(source_heads)]
        most = max(map(len, served))
        order = [(heads + [0] * most)[:most] for heads in served]
        flat = [head for heads in order for head in heads]
        if flat == list(range(len(head_map))):
            return cls(source_heads)
        back = [s * most + served[s].index(t) for t, s in enumerate(head_map)]
        return cls(source_heads, mx.array(flat), mx.array(back))

    def gather(self, queries: mx.array, batch: int) -> mx.array:
        """(B, H, R, x) as (B, groups, rows, x), or (1, groups, B * rows, x) for a batch of 1."""
        if self.order is not None:
            queries = mx.take(queries, self.order, axis=1)
        rows = queries.reshape(len(queries), self.groups, -1, queries.shape[-1])
        if batch == len(rows):
            return rows
        return rows.swapaxes(0, 1).reshape(1, self.groups, -1, rows.shape[-1])

    def scatter(self, rows: mx.array, batch: int, per_head: int) -> mx.array:
        """The inverse of :meth:`gather` for ``batch`` and R = ``per_head``: (B, H, R, x) again."""
        if len(rows) != batch:
            rows = rows.reshape(self.groups, batch, -1, rows.shape[-1]).swapaxes(0, 1)
        heads = rows.reshape(batch, -1, per_head, rows.shape[-1])
        return heads if self.back is None else mx.take(heads, self.back, axis=1)


@dataclass(frozen=True)
class Side:
    """The map of one side (keys or values), and the parts of the source's cache that it reads."""

    matrices: tuple[mx.array, ...]  # one matrix per cut, (H, d, in)
    # The parts of each cut, in the order of the matrix's columns
    parts: tuple[tuple[FoldedPrefix, ...], ...]
    bias: mx.array | None  # (H, d), or None

    @classmethod
    def of(
        cls, translator: Translator, side: str, layer: int, read: Callable[[Read], FoldedPrefix]
    ) -> Self:
        """Make a side of a target layer; ``read`` returns a source layer's part of it."""
        cuts, matrices, bias = translator.linear_map(side, layer)
        parts = []
        for reads in cuts:
            found = [read(r) for r in reads]
            if translator.config.head_mixing:  # as its columns are
                found = [p.head(i) for p in found for i in range(p.arrays[0].shape[1])]
            parts.append(tuple(found))
        return cls(matrices, tuple(parts), bias)

    def last(self, tokens: int) -> Side:
        """This side with the prefix's last ``tokens`` only."""
        parts = tuple(tuple(p.last(tokens) for p in cut) for cut in self.parts)
        return Side(self.matrices, parts, self.bias)

    @property
    def first_part(self) -> FoldedPrefix:
        """The first part, from which the numbers of tokens and batch rows are taken."""
        return self.parts[0][0]


@dataclass(frozen=True)
class Fold:
    """One target layer's view of the source's cache. Nothing in it is ever written."""

    keys: Side  # the keys' map, and the parts that it reads
    values: Side  # the values' map, and the parts that it reads
    rows: QueryRows  # how queries meet source heads

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable: copies of a cache share its prefix

    @property
    def tokens(self) -> int:
        """The number of prefix tokens that the layer holds."""
        return self.keys.first_part.tokens

    def last(self, tokens: int) -> Fold:
        """The fold of the prefix's last ``tokens`` only."""
        if tokens == self.tokens:
            return self
        return Fold(self.keys.last(tokens), self.values.last(tokens), self.rows)


def attend(
    queries: mx.array,
    fold: Fold,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """Attend with one exact softmax over the prefix and the new tokens.

    Args:
        queries: (B, Hq, L, d), normed and rotated.
        keys: The new tokens' own keys, (B, H, S, d).
        values: The new tokens' own values, (B, H, S, d).
        mask: The positions that each query sees, (L, P + S), or None for all.

    Returns:
        (B, Hq, L, d of values).
    """
    batch, heads, length, _ = queries.shape
    stacked = (queries * scale).reshape(batch, keys.shape[1], -1, queries.shape[-1])
    seen = _prefix_scores(stacked, fold)
    own = (stacked @ keys.swapaxes(-1, -2)).astype(stacked.dtype)
    if fold.keys.bias is not None:
        # A softmax does not change when all scores change by the same amount. So the bias's part,
        # constant over the prefix, is subtracted from the scores of the new tokens: they are fewer.
        own = own - (stacked @ fold.keys.bias[..., None].astype(stacked.dtype))
    scores = mx.concatenate([seen.astype(own.dtype), own], axis=-1)
    if mask is not None:
        shape = scores.shape
        apart = scores.reshape(batch, -1, length, shape[-1])
        scores = mx.where(mask, apart, mx.finfo(scores.dtype).min).reshape(shape)
    weights = mx.softmax(scores, axis=-1, precise=True)
    before, after = mx.split(weights, [fold.tokens], axis=-1)
    result = _prefix_values(before, fold)
    if fold.values.bias is not None:
        mass = 1 - after.astype(mx.float32).sum(axis=-1, keepdims=True)
        result = result + mass * fold.values.bias[:, None]
    result = result.astype(queries.dtype) + (after @ values).astype(queries.dtype)
    return result.reshape(batch, heads, length, -1)


def _prefix_scores(queries: mx.array, fold: Fold) -> mx.array:
    """Scores of queries (B, H, R, d) over the prefix, (B, H, R, P), without the bias's part."""
    batch, _, per_head, _ = queries.shape
    side, scores = fold.keys, None
    for matrix, parts in zip(side.matrices, side.parts, strict=True):
        pulled = fold.rows.gather(queries @ matrix, side.first_part.batch)
        edges = np.cumsum([part.width for part in parts])[:-1].tolist()
        pieces = mx.split(pulled, edges, axis=-1) if edges else [pulled]
        for piece, part in zip(pieces, parts, strict=True):
            product = part.scores(piece)
            scores = product if scores is None else scores + product
    assert scores is not None  # every map reads something
    return fold.rows.scatter(scores, batch, per_head)


def _prefix_values(weights: mx.array, fold: Fold) -> mx.array:
    """Sum the translated values by weights (B, H, R, P): (B, H, R, d), without the bias."""
    batch, _, per_head, _ = weights.shape
    side, result = fold.values, None
    rows = fold.rows.gather(weights, side.first_part.batch)
    for matrix, parts in zip(side.matrices, side.parts, strict=True):
        pooled = mx.concatenate([part.pooled(rows) for part in parts], axis=-1)
        mapped = fold.rows.scatter(pooled, batch, per_head) @ matrix.swapaxes(-1, -2)
        result = mapped if result is None else result + mapped
    assert result is not None
    return result
