"""The order of a run's records for each kind of sample, and statistics of what it will see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.training.library import Place, Shelf
from kvlingo_mlx.training.mixture import Mixture, PlainText, key_of
from kvlingo_mlx.training.order import Refill, Walk, source_at

ELSEWHERE = 7919  # the distance, in samples, between the records tried for one sample


@dataclass(frozen=True)
class Survey:
    """Statistics of the data that a run will see.

    Attributes:
        records: Records, of all sources, that can end a sample.
        skipped: Records that cannot: they have no usable assistant turn (or text), or no wanted
            length.
        held_out: Records kept from training.
        samples: Samples that the run draws.
        distinct: Different records that end these samples.
        uses: The most samples that end with the same record.
        longest: The approximate length of the longest natural prefix (or text), in tokens.
        wanted: The longest natural prefix of the recipe.
        tokens: The approximate number of tokens of all conversations together.
        packed_share: The share of samples that are concatenated.
        packed_asked: The share that was asked for; it is not kept where the data hold too little
            for different concatenations.
    """

    records: int
    skipped: int
    held_out: int
    samples: int
    distinct: int
    uses: int
    longest: int
    wanted: int
    tokens: int
    packed_share: float
    packed_asked: float

    @property
    def falls_short(self) -> bool:
        """Whether the data make the run differ from its recipe."""
        return (
            self.packed_share != self.packed_asked
            or 2 * self.longest < self.wanted
            or self.uses > 2
        )

    def __str__(self) -> str:
        lengths = f"prefixes of at most {self.longest:,} tokens (the recipe: {self.wanted:,})"
        packed = f"packed: {self.packed_share:.0%} of samples"
        if self.packed_share != self.packed_asked:
            packed += f", not {self.packed_asked:.0%}: too few fit, of {self.tokens:,} tokens"
        return (
            f"data: {self.records:,} records to train on; {self.samples:,} samples end in "
            f"{self.distinct:,} different ones, each used at most {self.uses:,} "
            f"time{'' if self.uses == 1 else 's'}; {lengths}; {packed}"
        )


class Orders:
    """The order of the records of some shelves, for each kind of sample.

    ``planned`` is the number of samples that a run draws.
    """

    def __init__(
        self, shelves: Sequence[Shelf], mixture: Mixture | PlainText, planned: int, seed: int
    ) -> None:
        self.shelves, self.seed = shelves, seed
        self._planned = planned
        packed = 0.0 if isinstance(mixture, PlainText) else mixture.packed_share
        self.natural = self._walks("natural", reach(mixture), 1 - packed)
        if isinstance(mixture, PlainText):
            return
        most = mixture.packed[1]
        self.lifted = self._walks("lifted", (0, most), packed, last=True)
        rows = [np.flatnonzero(shelf.whole <= most) for shelf in shelves]
        self.refills = {
            shelf.source: Refill(kept, shelf.whole[kept], key_of(seed, "packed", shelf.source))
            for shelf, kept in zip(shelves, rows, strict=True)
            if len(kept)
        }

    @property
    def tokens(self) -> float:
        """The tokens of all conversations that can be concatenated."""
        return sum(refill.total for refill in self.refills.values())

    def met(self, walks: dict[int, Walk], share: float) -> tuple[set[Place], int]:
        """The records that a run meets on ``walks``, and the most uses of one of them.

        The walks give ``share`` of the run's samples.
        """
        places: set[Place] = set()
        most = 0
        for (source, walk), part in zip(walks.items(), self.shares(walks), strict=True):
            steps = round(part * share * self._planned)
            places.update((source, row) for row in walk.first(steps))
            most = max(most, -(-steps // len(walk)))
        return places, most

    def shares(self, given: dict[int, Any]) -> list[float]:
        """The relative weights of the sources in ``given``; they add up to 1."""
        weights = [shelf.share for shelf in self.shelves if shelf.source in given]
        return [weight / sum(weights) for weight in weights]

    def of(self, walks: dict[int, Walk], ordinal: int, attempt: int) -> tuple[Shelf, int, int]:
        """The shelf, the record (by row) and the reply for sample ``ordinal`` of its kind."""
        sources = list(walks)
        index, position = source_at(ordinal, self.shares(walks), key_of(self.seed, "source"))
        row, reply = walks[sources[index]].at(position + attempt * ELSEWHERE)
        shelf = next(s for s in self.shelves if s.source == sources[index])
        return shelf, row, reply

    def _walks(
        self, use: str, within: tuple[float, float], share: float, last: bool = False
    ) -> dict[int, Walk]:
        """A walk for each source with usable records; ``last`` allows only their last replies."""
        found = {}
        for shelf in self.shelves:
            starts, lengths, traces = shelf.starts, shelf.lengths, shelf.traces
            if last:
                starts = np.arange(len(shelf.records) + 1)
                lengths, traces = lengths[shelf.last], traces[shelf.last]
            planned = round(self._planned * share * shelf.share)
            key = key_of(self.seed, use, shelf.source)
            strata = {"strata": 1} if last else {}
            walk = Walk(starts, lengths, traces, within, planned, key, **strata)
            if len(walk):
                found[shelf.source] = walk
        return found


def reach(mixture: Mixture | PlainText) -> tuple[float, float]:
    """The shortest and the longest usable natural prefix, or text, in tokens."""
    if isinstance(mixture, PlainText):
        return mixture.prefix + mixture.continuation, float("inf")
    return mixture.natural
