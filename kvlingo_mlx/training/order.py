"""In which order records are drawn: none comes again before the others have come.

Lengths are near uniform as far as that allows: of a data set that is larger than the run, the run
gets records of all lengths in near equal numbers; of a smaller one it gets every record equally
often. Pure arithmetic on arrays, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvlingo_mlx.training.mixture import hashed, key_of, split

STRATA = 16  # equal parts of the lengths there are, filled evenly


class Walk:
    """An endless walk over records, each once an epoch, with the reply that ends its prefix.

    Args:
        starts: Where each record's replies begin in the arrays below, and where the last one's
            end (M + 1,).
        lengths: Tokens before each reply, growing within a record (R,).
        traces: Whether a reply has a reasoning trace (R,).
        reach: Shortest and longest prefix that is wanted.
        planned: How many steps of the walk a run will take. It gets those records first that
            make its lengths near uniform, half of them with a trace where the data allow it.
        key: What the order depends on.
        strata: Into how many equal parts the lengths are divided.
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
        """How many records it meets."""
        return len(self.rows)

    @property
    def longest(self) -> int:
        """The longest prefix it can draw, in tokens."""
        return int(self._lengths[self._candidates].max(initial=0))

    def first(self, steps: int) -> list[int]:
        """The records that so many steps from the beginning meet."""
        return self.rows[self._order(0)[0][:steps]].tolist() if len(self.rows) else []

    def at(self, position: int) -> tuple[int, int]:
        """The record at a position, and which of its replies, both numbered from 0."""
        epoch, step = divmod(position, len(self.rows))
        order, replies = self._order(epoch)
        row = int(self.rows[order[step]])
        return row, int(replies[order[step]] - self._starts[row])

    def _epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of an epoch, and each record's reply in it (both of ``rows``)."""
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
        # A cell's records come at even distances, those that the run needs before the others.
        late = ranks >= quotas[cells]
        share = np.where(late, sizes[cells] - quotas[cells], quotas[cells])
        when = (ranks - late * quotas[cells] + jitter / 2.0**64) / share
        return np.lexsort((when, late)), replies

    def _cells(self, lengths: np.ndarray, traces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each record's cell (a part of the lengths, with or without trace), and cells' quotas."""
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
    """An endless walk over records by the tokens they have, each once an epoch.

    Args:
        rows: The records.
        tokens: How many tokens each has.
        key: What the order depends on.
    """

    def __init__(self, rows: np.ndarray, tokens: np.ndarray, key: int) -> None:
        self._rows, self._tokens, self._key = rows, tokens, key
        self.total = float(tokens.sum())
        self._order = lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        """How many records it meets."""
        return len(self._rows)

    def start(self, token: float) -> int:
        """The position at which the walk has met so many tokens."""
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
    """Which source gives sample ``ordinal``, and the sample's number among that source's.

    Shares, which add up to 1, hold in every stretch of samples.
    """
    left = 1.0
    for source, share in enumerate(shares[:-1]):
        taken, ordinal = split(ordinal, min(1.0, share / left), key_of(key, source))
        if taken:
            return source, ordinal
        left -= share
    return len(shares) - 1, ordinal


def fill_evenly(sizes: np.ndarray, total: int) -> np.ndarray:
    """How much of each size is taken so that ``total`` is, all as equally as sizes allow."""
    quotas = np.zeros_like(sizes)
    while (rest := total - int(quotas.sum())) > 0:
        open_ = np.flatnonzero(quotas < sizes)
        if rest < len(open_):
            open_, rest = open_[:rest], len(open_[:rest])
        quotas[open_] = np.minimum(sizes[open_], quotas[open_] + rest // len(open_))
    return quotas


def halve(some: np.ndarray, others: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """How many of each quota are ``some``, so that half of all are, or as near as they allow."""
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
