"""The order of a run's samples, listed once: sample i is row i.

No record comes again before all others of its source have. A run that is shorter than its data gets
records of all lengths in nearly equal numbers, half of them with a reasoning trace; a longer run
gets every record equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvlingo_mlx.training.index import Table
from kvlingo_mlx.training.mixture import Kind

STRATA = 16  # equal parts of the range of lengths, which are filled evenly
GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly in every stretch


@dataclass(frozen=True, eq=False)
class Cell:
    """Records of one source that serve for one kind of sample."""

    kind: Kind
    share: float  # of the samples
    rows: np.ndarray  # (N,) of the table
    replies: np.ndarray  # usable replies of all these records, one record after the other
    starts: np.ndarray  # (N + 1,) where those of each begin


def cells(
    table: Table, kind: Kind, share: float, shares: np.ndarray, usable: np.ndarray
) -> list[Cell]:
    """A cell for each source that has usable replies.

    Args:
        table: The records.
        kind: What samples they serve for.
        share: The share of the run's samples that are of this kind.
        shares: The share of each source in these.
        usable: A mask (R,) of the table's replies.
    """
    before = np.concatenate([[0], np.cumsum(usable)])
    counts = before[table.starts[1:]] - before[table.starts[:-1]]
    owner = np.repeat(table.source, np.diff(table.starts))
    found = []
    for source in np.unique(table.source[counts > 0]):
        rows = np.flatnonzero((counts > 0) & (table.source == source))
        starts = np.concatenate([[0], np.cumsum(counts[rows])]).astype(int)
        replies = np.flatnonzero(usable & (owner == source))
        found.append(Cell(kind, shares[source], rows, replies, starts))
    total = sum(cell.share for cell in found)
    return [replace(cell, share=share * cell.share / total) for cell in found if share]


class Schedule:
    """An endless list of samples, each a cell, a row of the table and one of its replies.

    Args:
        table: The records.
        mixed: The cells of which it is mixed, by their shares; none make an empty list.
        planned: The samples that a run draws, over which lengths are spread.
        seed: The seed of the order.
    """

    def __init__(self, table: Table, mixed: Sequence[Cell], planned: int, seed: int) -> None:
        self.table, self.cells, self.planned, self._seed = table, mixed, planned, seed
        self._list = self._listed(max(planned, 64))
        self._kinds = np.array([cell.kind for cell in mixed])
        self.base = len(self._list)  # the samples that all other choices are made among

    def at(self, index: int) -> tuple[Kind, int, int]:
        """The kind of sample ``index``, its row of the table and its reply there."""
        while index >= len(self._list):
            self._list = self._listed(2 * len(self._list))  # which begins like the shorter one
        cell, row, reply = self._list[index].tolist()
        return self.cells[cell].kind, row, reply

    def others(self, index: int, count: int) -> list[int]:
        """Samples of the same kind, to be tried where sample ``index`` does not fit."""
        alike = self.numbers(self.at(index)[0])
        rng = np.random.default_rng((self._seed, index))
        return rng.choice(alike, count).tolist() if len(alike) else []

    def numbers(self, kind: Kind) -> np.ndarray:
        """The numbers of the samples of a kind, among those listed at first."""
        return np.flatnonzero(self._kinds[self._list[: self.base, 0]] == kind)

    @property
    def first(self) -> np.ndarray:
        """The rows of the samples that the run draws (planned,)."""
        return self._list[: self.planned, 1]

    def _listed(self, count: int) -> np.ndarray:
        """The first ``count`` samples: cell, row and reply (count, 3)."""
        if not self.cells:
            return np.empty((0, 3), int)
        edges = np.cumsum([cell.share for cell in self.cells])
        start = np.random.default_rng(self._seed).random()
        places = (start + GOLDEN * np.arange(count)) % 1.0 * edges[-1]
        number = np.searchsorted(edges[:-1], places, side="right")
        found = np.empty((count, 3), int)
        for n, cell in enumerate(self.cells):
            there = np.flatnonzero(number == n)
            epochs = range(-(-len(there) // len(cell.rows)))
            if epochs:
                own = np.concatenate([self._epoch(n, epoch) for epoch in epochs])[: len(there)]
                found[there] = np.column_stack([np.full(len(there), n), own])
        return found

    def _epoch(self, number: int, epoch: int) -> np.ndarray:
        """All rows of a cell in the order of an epoch, each with one of its replies (N, 2)."""
        cell, table = self.cells[number], self.table
        rng, many = np.random.default_rng((self._seed, number, epoch)), len(cell.rows)
        counts = np.diff(cell.starts)
        replies = cell.replies[cell.starts[:-1] + (rng.random(many) * counts).astype(int)]
        order = rng.permutation(many)
        drawn = round(self.planned * cell.share)
        if drawn < many and epoch == 0 and cell.kind != "filler":
            lengths = table.before[replies]
            parts = STRATA * (lengths - lengths.min()) / max(np.ptp(lengths), 1)
            stratum = 2 * np.minimum(parts.astype(int), STRATA - 1) * (cell.kind == "natural")
            order = _evenly(order, (stratum + table.traced[replies])[order])
            order = np.concatenate([rng.permutation(order[:drawn]), order[drawn:]])
        return np.column_stack([cell.rows, replies - table.starts[cell.rows]])[order]


def _evenly(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """``order`` with the first of each group in front, then the second of each, and so on."""
    by_group = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    rank = np.empty(len(order), int)
    rank[by_group] = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[groups[by_group]]
    return order[np.argsort(rank, kind="stable")]
