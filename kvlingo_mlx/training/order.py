"""The order in which records are drawn: none is repeated before all others have been drawn.

Prefix lengths are as uniform as that rule allows. A run that is shorter than its data set gets
records of all lengths in nearly equal numbers; a longer run gets every record equally often. The
code only computes with arrays, and gives the same order on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvlingo_mlx.training.mixture import hashed, key_of, split

STRATA = 16  # equal parts of the range of lengths, which are filled evenly


class Walk:
    """An endless walk over records and their replies, each record once an epoch.

    Args:
        starts: Where each record's replies begin in the arrays below, and where the last ones end
            (M + 1,).
        lengths: The tokens before each reply, increasing within a record (R,).
        traces: Whether a reply has a reasoning trace (R,).
        reach: The shortest and the longest prefix wanted.
        planned: The number of steps that a run will take. Its records are chosen so that their
            lengths are near uniform, and half of them have a trace where the data allow it.
        key: The seed of the order.
        strata: The number of equal parts into which the lengths are divided.
    """

    def __init__(
        self,
        starts: np.ndarray,
        lengths: np.ndarray,
        traces: np.ndarray,
        reach: tuple[float, float],
        planned: int,
        key: int,
        strata: int = STRATA,
    ) -> None:
        within = (lengths >= reach[0]) & (lengths <= reach[1])
        before = np.concatenate([[0], np.cumsum(within)])
        counts = before[starts[1:]] - before[starts[:-1]]
        self.rows = np.flatnonzero(counts)
        self._candidates, self._counts = np.flatnonzero(within), counts[self.rows]
        self._first = before[starts[:-1]][self.rows]
        self._starts, self._lengths, self._traces = starts, lengths, traces
        self._planned, self._key, self._strata = planned, key, strata
        self._order = lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        """The number of records in an epoch."""
        return len(self.rows)

    @property
    def longest(self) -> int:
        """The longest prefix of the walk, in tokens."""
        return int(self._lengths[self._candidates].max(initial=0))

    def first(self, steps: int) -> list[int]:
        """The records of the first ``steps`` steps."""
        return self.rows[self._order(0)[0][:steps]].tolist() if len(self.rows) else []

    def at(self, position: int) -> tuple[int, int]:
        """The record at a position, and which of its replies, both numbered from 0."""
        epoch, step = divmod(position, len(self.rows))
        order, replies = self._order(epoch)
        row = int(self.rows[order[step]])
        return row, int(replies[order[step]] - self._starts[row])

    def _epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of an epoch, and each record's reply in that epoch (indexed like ``rows``)."""
        draw, place, jitter = (
            hashed(key_of(self._key, number, use), self.rows) for use in ("turn", "rank", "jitter")
        )
        replies = self._candidates[
            self._first + (draw % self._counts.astype(np.uint64)).astype(int)
        ]
        cells, quotas = self._cells(self._lengths[replies], self._traces[replies])
        sizes = np.bincount(cells, minlength=quotas.size)
        sorted_ = np.lexsort((place, cells))
        ranks = np.empty(len(cells), int)
        ranks[sorted_] = np.arange(len(cells)) - (np.cumsum(sizes) - sizes)[cells[sorted_]]
        # The records of a cell are spread evenly; those that the run needs come before the others.
        late = ranks >= quotas[cells]
        share = np.where(late, sizes[cells] - quotas[cells], quotas[cells])
        when = (ranks - late * quotas[cells] + jitter / 2.0**64) / share
        return np.lexsort((when, late)), replies

    def _cells(self, lengths: np.ndarray, traces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each record's cell (a part of the lengths, with or without trace), and all quotas."""
        low, high = lengths.min(), lengths.max()
        parts = (lengths - low) * self._strata / max(high - low, 1)
        strata = np.minimum(parts.astype(int), self._strata - 1)
        cells = 2 * strata + traces
        sizes = np.bincount(cells, minlength=2 * self._strata).reshape(-1, 2)
        if self._planned >= len(lengths):
            return cells, sizes.ravel()
        quotas = fill_evenly(sizes.sum(axis=1), self._planned)
        traced = halve(sizes[:, 1], sizes[:, 0], quotas)
        return cells, np.stack([quotas - traced, traced], axis=1).ravel()


class Refill:
    """An endless walk over records, addressed by tokens, each record once an epoch.

    Args:
        rows: The records.
        tokens: The number of tokens of each record.
        key: The seed of the order.
    """

    def __init__(self, rows: np.ndarray, tokens: np.ndarray, key: int) -> None:
        self._rows, self._tokens, self._key = rows, tokens, key
        self.total = float(tokens.sum())
        self._order = lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        """The number of records in an epoch."""
        return len(self._rows)

    def start(self, token: float) -> int:
        """The position at which the walk has passed ``token`` tokens."""
        epoch, rest = divmod(token, self.total)
        ends = np.cumsum(self._tokens[self._order(int(epoch))])
        return int(epoch) * len(self._rows) + int(np.searchsorted(ends, rest, side="right"))

    def at(self, position: int) -> int:
        """The record at a position."""
        epoch, step = divmod(position, len(self._rows))
        return int(self._rows[self._order(epoch)[step]])

    def _epoch(self, number: int) -> np.ndarray:
        return np.argsort(hashed(key_of(self._key, number), self._rows), kind="stable")


def source_at(ordinal: int, shares: Sequence[float], key: int) -> tuple[int, int]:
    """The source of sample ``ordinal``, and the sample's number within that source.

    The shares add up to 1, and they hold in every stretch of samples.
    """
    left = 1.0
    for source, share in enumerate(shares[:-1]):
        taken, ordinal = split(ordinal, min(1.0, share / left), key_of(key, source))
        if taken:
            return source, ordinal
        left -= share
    return len(shares) - 1, ordinal


def fill_evenly(sizes: np.ndarray, total: int) -> np.ndarray:
    """How much to take of each size so that the sum is ``total``, as equally as sizes allow."""
    quotas = np.zeros_like(sizes)
    while (rest := total - int(quotas.sum())) > 0:
        open_ = np.flatnonzero(quotas < sizes)
        if rest < len(open_):
            open_, rest = open_[:rest], len(open_[:rest])
        quotas[open_] = np.minimum(sizes[open_], quotas[open_] + rest // len(open_))
    return quotas


def halve(some: np.ndarray, others: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """How much of each quota to take from ``some``, so that they are half of all if possible."""
    least, most = np.maximum(quotas - others, 0), np.minimum(some, quotas)
    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        taken = np.clip(np.rint(share * quotas).astype(int), least, most)
        if 2 * taken.sum() < quotas.sum():
            low = share
        else:
            high = share
    return np.clip(np.rint(high * quotas).astype(int), least, most)
