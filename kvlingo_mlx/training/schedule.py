"""The order of a run's samples, listed once: sample i is row i.

No record comes again before all others of its source have. A run that is shorter than its data gets
records of all lengths in nearly equal numbers, half of them with a reasoning trace; a longer run
gets every record equally often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.training.mixture import Kind

STRATA = 16  # equal parts of the range of lengths, which are filled evenly
GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly in every stretch


@dataclass(frozen=True, eq=False)
class ScheduledReplies:
    """Replies of one source that serve for one kind of sample."""

    kind: Kind
    share: float  # of the samples
    rows: np.ndarray  # (N,) of the index
    records: int  # how many different ones


def parts_of(
    replies: np.ndarray, kind: Kind, share: float, shares: np.ndarray, usable: np.ndarray
) -> list[ScheduledReplies]:
    """A part for each source that has ``usable`` ones among ``replies``, the rows of an index.

    ``share`` of the run's samples are of this kind, and of these each source has one of ``shares``.
    """
    sources = np.unique(replies["source"][usable])
    total = shares[sources].sum()
    found = []
    for source in sources if share else ():
        rows = np.flatnonzero(usable & (replies["source"] == source))
        records = len(np.unique(replies["record"][rows]))
        found.append(ScheduledReplies(kind, share * float(shares[source] / total), rows, records))
    return found


class Schedule:
    """An endless list of samples, each of a part, and a row of the index (``replies``).

    It is mixed of parts by their shares; none make an empty list. A run draws ``planned`` samples,
    over which lengths are spread.
    """

    def __init__(
        self, replies: np.ndarray, parts: Sequence[ScheduledReplies], planned: int, seed: int
    ) -> None:
        self.parts, self.planned = parts, planned
        self._replies, self._seed = replies, seed
        self._list = self._listed(max(planned, 64))
        self._kinds = np.array([part.kind for part in parts])
        self._base = len(self._list)  # the samples that all other choices are made among

    def at(self, index: int) -> tuple[Kind, int]:
        """The kind of sample ``index``, and its row of the index."""
        while index >= len(self._list):
            self._list = self._listed(2 * len(self._list))  # which begins like the shorter one
        part, row = self._list[index].tolist()
        return self.parts[part].kind, row

    def others(self, index: int, count: int) -> list[int]:
        """Samples of the same kind, to be tried where sample ``index`` does not fit."""
        alike = self.numbers(self.at(index)[0])
        rng = np.random.default_rng((self._seed, index))
        return rng.choice(alike, count).tolist() if len(alike) else []

    def numbers(self, kind: Kind) -> np.ndarray:
        """The numbers of the samples of a kind, among those listed at first."""
        return np.flatnonzero(self._kinds[self._list[: self._base, 0]] == kind)

    @property
    def first(self) -> np.ndarray:
        """The rows of the samples that the run draws (planned,)."""
        return self._list[: self.planned, 1]

    def _listed(self, count: int) -> np.ndarray:
        """The first ``count`` samples: part and row (count, 2)."""
        found = np.empty((count if self.parts else 0, 2), int)
        edges = np.cumsum([part.share for part in self.parts])
        start = np.random.default_rng(self._seed).random()
        places = (start + GOLDEN * np.arange(len(found))) % 1.0 * sum(edges[-1:])
        found[:, 0] = np.searchsorted(edges[:-1], places, side="right")
        for number, part in enumerate(self.parts):
            there = np.flatnonzero(found[:, 0] == number)
            epochs = range(-(-len(there) // part.records))
            own = [self._epoch(number, epoch) for epoch in epochs]
            found[there, 1] = np.concatenate([*own, part.rows[:0]])[: len(there)]
        return found

    def _epoch(self, number: int, epoch: int) -> np.ndarray:
        """All records of a part in the order of an epoch, each by one of its replies."""
        part, replies = self.parts[number], self._replies
        rng = np.random.default_rng((self._seed, number, epoch))
        order = rng.permutation(part.rows)
        order = order[np.sort(np.unique(replies["record"][order], return_index=True)[1])]
        drawn = round(self.planned * part.share)
        if drawn < len(order) and epoch == 0 and part.kind != "filler":
            lengths = replies["before"][order]
            stratum = (STRATA * (lengths - lengths.min()) / max(np.ptp(lengths), 1)).astype(int)
            stratum = 2 * np.minimum(stratum, STRATA - 1) * (part.kind == "natural")
            order = _evenly(order, stratum + replies["traced"][order])
            order = np.concatenate([rng.permutation(order[:drawn]), order[drawn:]])
        return order


def _evenly(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """``order`` with the first of each group in front, then the second of each, and so on."""
    by_group = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    rank = np.empty(len(order), int)
    rank[by_group] = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[groups[by_group]]
    return order[np.argsort(rank, kind="stable")]
