"""The training stream: numbered, seeded samples from one or more sources of records.

Appendix "Training data and training recipe". The records are indexed once, and the order of a run
is listed once: sample i is row i of that list. So a run can resume at any number, and processes
share a stream by dividing the numbers. The list depends on the seed, the data and how many samples
the run will draw.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlingo_mlx.tokenization.records import Spec
from kvlingo_mlx.tokenization.renderings import front
from kvlingo_mlx.tokenization.samples import Sample, encode_plain
from kvlingo_mlx.training.conversations import (
    Message,
    boilerplate,
    excerpt,
    keeps_system,
    pack,
    replies,
    to_sample,
    until,
)
from kvlingo_mlx.training.index import Place, RecordIndex
from kvlingo_mlx.training.mixture import Kind, Mixture
from kvlingo_mlx.training.schedule import Schedule, parts_of

LIFTED = 6  # most exchanges at the end of a pack whose continuation goes on
TRIES = {"natural": 16, "text": 16, "packed": 64}  # records tried for one sample before it fails
PACK_TRIES = 4  # attempts to fill one pack; each gives a better estimate of its tokens
OTHER_FILLERS = 8  # tries to fill a pack, before its record is left for another
DIFFERENT_PACKS = 4  # packs that the data must hold


@dataclass(frozen=True)
class Draw:
    """A sample and its origin; the record that gives the answer is first in ``records``."""

    sample: Sample
    kind: Kind
    reasoning: bool
    records: tuple[Place, ...]


@dataclass(frozen=True)
class Survey:
    """Statistics of the data that a run will see."""

    records: int  # of all sources, that can end a sample
    samples: int  # that the run draws
    distinct: int  # different records that end these samples
    uses: int  # the most samples that end with the same record
    longest: int  # about the tokens of the longest natural prefix (or text)
    wanted: int  # the longest natural prefix of the recipe
    tokens: int  # about those of all conversations together
    packed_share: float  # the share of samples that are concatenated
    packed_asked: float  # the share asked for; not kept where the data hold too few packs

    @property
    def falls_short(self) -> bool:
        """Whether the data make the run differ from its recipe."""
        unpacked = self.packed_share != self.packed_asked
        return unpacked or 2 * self.longest < self.wanted or self.uses > 2

    def __str__(self) -> str:
        packed = f"packed: {self.packed_share:.0%} of samples"
        if self.packed_share != self.packed_asked:
            few = f"conversations of {self.tokens:,} tokens are too few"
            packed += f", not {self.packed_asked:.0%}: {few}"
        repeated = "none repeated" if self.uses == 1 else f"each at most {self.uses:,} times"
        return (
            f"data: {self.records:,} records to train on; {self.samples:,} samples from "
            f"{self.distinct:,} of them, {repeated}; prefixes of at most {self.longest:,} tokens "
            f"(the recipe: {self.wanted:,}); {packed}"
        )


@dataclass(frozen=True, eq=False)
class RecordOrder:
    """Some records in the order of a run."""

    replies: np.ndarray  # the rows of an index
    ends: Schedule  # of the replies that end samples
    fillers: Schedule  # of the records that fill packs; empty where there are no packs
    per_sample: float  # how many of these a sample takes, on average
    tokens: float  # of all of these

    def place(self, row: int) -> Place:
        """The record of a row."""
        return int(self.replies["source"][row]), int(self.replies["record"][row])


class Stream:
    """Numbered samples: natural and packed conversations, or windows of plain text.

    Attributes:
        mixture: Lengths and shares, adjusted to what the data allow.
        seed: Chooses the samples and the held-out records.
        survey: Statistics of the data that a run will see.
        skipped: The number of records without a usable assistant turn (or text).
        reserved: The number of usable records reserved for :meth:`held_out`.
        contents: Size and hash of each source by its name, to detect changed data.
    """

    _taken: Set[Place] = frozenset()  # records that may be in no further sample

    def __init__(
        self,
        sources: Sequence[Spec],
        tokenizer: Any,
        mixture: Mixture | None = None,
        seed: int = 0,
        source_tokenizer: Any = None,
        planned: int = 40_000,
        accepts: Any = None,
    ) -> None:
        """Open ``sources`` (see ``records.open_source``) for models that share ``tokenizer``.

        ``source_tokenizer`` is the source's tokenizer where it differs. ``planned`` is the number
        of samples that the run draws (the paper: 5,000 steps of 8), over which lengths are spread.
        ``accepts`` leaves out some of the records.

        Raises:
            ValueError: Plain text is asked for with two tokenizers; a source cannot be read, has a
                malformed record or none that fits the mixture; or a tokenizer has no chat template.
            MissingExtraError: A source is a Hugging Face dataset, and ``datasets`` is not
                installed.
        """
        self.seed, self._planned, mixture = seed, planned, mixture or Mixture()
        self._tokenizer, self._source_tokenizer = tokenizer, source_tokenizer
        if mixture.windows and source_tokenizer is not None:
            raise ValueError(
                "windows of plain text are cut by one tokenizer, and this pair has two; give "
                "conversations (without --plain-text)"
            )
        both = [tokenizer] if source_tokenizer is None else [tokenizer, source_tokenizer]
        self._fold = not mixture.windows and not all(map(keeps_system, both))
        template = None if mixture.windows else boilerplate(*both)
        self._index = RecordIndex(sources, both, template, seed, accepts)
        self.skipped, self.contents = self._index.skipped, self._index.contents
        self.reserved = int(self._index.reserved["last"].sum())
        self._mix(mixture)

    def at(self, mixture: Mixture) -> Stream:
        """The same data at other lengths, without reading all of them again."""
        other = self._but()
        other._mix(mixture)
        return other

    def _but(self, **changes: Any) -> Stream:
        """A stream of the same data in which some attributes are others."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @property
    def notes(self) -> list[str]:
        """What is to be told of the data before they are trained on, if anything."""
        malformed, short = self._index.malformed, self.survey.falls_short
        return [str(self.survey)] * short + [f"data: {malformed}"] * bool(malformed)

    @property
    def longest(self) -> tuple[int, int]:
        """The tokens of the longest prefix and continuation that it may give, about."""
        mixture = self.mixture
        own = int(min(self.survey.longest, mixture.reach[1], mixture.max_prefix))
        packed = mixture.packed[1] if mixture.packed_share else 0
        return max(own, packed), mixture.max_continuation

    # ---- the order of a run ---------------------------------------------------------------

    def _mix(self, asked: Mixture) -> None:
        """List the order of a mixture, without packs where the data hold too few.

        Raises:
            ValueError: The data hold nothing of a kind that is asked for.
        """
        self.mixture, self._order = asked, self._order_of(asked, self._index.training)
        if asked.packed_share and not self._can_pack():
            if asked.packed_share == 1:
                raise ValueError(self._unmet("packed"))
            self.mixture = replace(asked, packed_share=0.0)
            self._order = self._order_of(self.mixture, self._index.training)
        only_packs = all(part.kind == "packed" for part in self._order.ends.parts)
        if self.mixture.packed_share < 1 and only_packs:
            raise ValueError(self._unmet(asked.own))
        self.survey = self._surveyed(asked)

    def _order_of(self, mixture: Mixture, replies: np.ndarray, planned: int = 0) -> RecordOrder:
        """The order of ``replies`` for a mixture, of which a run draws ``planned`` samples."""
        shares, planned = self._index.shares, planned or self._planned
        (low, high), share, packed = mixture.reach, mixture.packed_share, mixture.packed
        within = (replies["before"] >= low) & (replies["before"] <= high)
        small = replies["last"] & (replies["tokens"] <= packed[1])
        lifted = replies["last"] & (replies["before"] <= packed[1])
        parts = parts_of(replies, mixture.own, 1 - share, shares, within)
        packs = parts_of(replies, "packed", share, shares, lifted)
        fillers = parts_of(replies, "filler", 1.0, shares, small) if packs else []
        tokens = replies["tokens"][small]
        return RecordOrder(
            replies,
            Schedule(replies, parts + packs, planned, self.seed),
            Schedule(replies, fillers, planned, self.seed),
            share * sum(packed) / 2 / float(tokens.mean()) if fillers else 0.0,
            float(tokens.sum()) if fillers else 0.0,
        )

    def _can_pack(self) -> bool:
        """Whether the data hold enough different packs; at ``packed_share`` 1, one is enough.

        Enough tokens do not suffice: the conversations must add up to the lengths wanted, which a
        few packs show.
        """
        least = 1 if self.mixture.packed_share == 1 else DIFFERENT_PACKS
        first = self._order.ends.numbers("packed")[:DIFFERENT_PACKS].tolist()
        enough = self._order.tokens >= least * sum(self.mixture.packed) / 2
        return enough and any(map(self._found, first))

    def _surveyed(self, asked: Mixture) -> Survey:
        index, ends, share = self._index, self._order.ends, self.mixture.packed_share
        own = [part for part in ends.parts if (part.kind == "packed") == (share == 1)]
        drawn = index.training[["source", "record"]][ends.first]
        uses = np.unique(drawn, return_counts=True)[1]
        return Survey(
            sum(part.records for part in own),
            self._planned,
            len(uses),
            int(uses.max(initial=0)),
            int(max(index.training["before"][part.rows].max() for part in own)),
            int(asked.reach[0] if asked.windows else asked.reach[1]),
            round(self._order.tokens),
            share,
            asked.packed_share,
        )

    def _unmet(self, kind: Kind) -> str:
        """The error message for a kind of sample that the data do not hold."""
        names, (low, high) = self._index.names, self.mixture.reach
        if kind == "text":
            return f"no text of {low} tokens in {names}; give longer texts"
        if kind == "natural":
            what = f"conversation with a prefix of {low} to {high} tokens in {names}"
            return f"no {what}; add conversations, or allow longer ones (train --max-prefix)"
        low, high = self.mixture.packed
        return (
            f"no concatenation with a prefix of {low} to {high} tokens in {names}, whose "
            f"conversations have {round(self._order.tokens):,} tokens; add conversations, or "
            "pack none (-c packed_share=0)"
        )

    # ---- samples --------------------------------------------------------------------------

    def sample(self, index: int) -> Sample:
        """Training sample ``index`` (see :meth:`draw`)."""
        return self.draw(index).sample

    def draw(self, index: int) -> Draw:
        """Training sample ``index`` with its origin, a function of ``index`` and the stream alone.

        Whole conversations rarely add up to a length, so a pack takes several tries. One that none
        of them brings to its lengths may be shorter, down to half: no run ends over one sample.

        Raises:
            ValueError: No record fits within a bounded number of tries; the message names the
                lengths wanted.
        """
        found, kind = self._found(index), self._order.ends.at(index)[0]
        if found is None and kind == "packed":
            low, high = self.mixture.packed
            shorter = replace(self.mixture, packed=(low // 2, high))
            found = self._but(mixture=shorter)._found(index)
        if found is None:
            raise ValueError(f"sample {index}: {self._unmet(kind)}")
        return found

    def held_out(self, count: int = 64) -> list[Sample]:
        """Up to ``count`` samples of the same mixture, from reserved records only.

        No record is in two samples; there are fewer samples if the reserved records do not suffice.
        Training reads neither these records nor others that open with the same question. If there
        are too few records for a pack, all samples are natural.

        Raises:
            ValueError: There are too few records to reserve any, or none fits.
        """
        own, planned = self.mixture.own, 4 * max(count, self.reserved)
        order = self._order_of(self.mixture, self._index.reserved, planned)
        found, taken = dict[Sample, None](), set[Place]()
        reserved = self._but(_order=order, _taken=taken)
        # Natural samples come first, since a pack uses up many records; then in place of packs.
        unpacked = count - round(self.mixture.packed_share * count)
        plan: tuple[tuple[Kind, int], ...] = (own, unpacked), ("packed", count), (own, count)
        for kind, enough in plan:
            for index in order.ends.numbers(kind).tolist():
                if len(found) == enough:
                    break
                draw = reserved._drawn(index, index)
                if draw is not None:
                    found[draw.sample] = None
                    taken.update(draw.records)
        if not found:
            names, held = self._index.names, self.reserved
            raise ValueError(f"no sample in the {held} records held out of {names}; add records")
        return list(found)

    def _found(self, index: int) -> Draw | None:
        """Sample ``index``; where its record does not fit, one that ends with another."""
        ends = self._order.ends
        kind = ends.at(index)[0]
        others = ends.others(index, TRIES[kind])
        tries = [(index, index), *((number, number) for number in others)]
        if kind == "packed":  # first the same record among other ones
            tries[1:1] = [(index, number) for number in others[:OTHER_FILLERS]]
        return next(filter(None, itertools.starmap(self._drawn, tries)), None)

    def _drawn(self, number: int, start: int) -> Draw | None:
        """The record of sample ``number``, if it fits and is not taken.

        A pack is filled by the records that pack ``start`` would be.
        """
        kind, row = self._order.ends.at(number)
        if self._order.place(row) in self._taken:
            return None
        if kind == "text":
            return self._window(row, np.random.default_rng((self.seed, number)))
        return self._packed(row, start) if kind == "packed" else self._natural(row)

    # ---- one sample -----------------------------------------------------------------------

    def _read(self, row: int) -> Any:
        """The messages of a row's record, or its text."""
        record = self._index.read(self._order.place(row))
        assert record is not None, "a record of no use is not in the table"
        return record["text" if self.mixture.windows else "messages"]

    def _cut(self, messages: Sequence[Message], later: Sequence[Message]) -> Sample:
        longest, ends = self.mixture.max_continuation, (self._tokenizer, self._source_tokenizer)
        later = later if self.mixture.later_turns else ()
        return to_sample(messages, ends[0], longest, ends[1], later)

    def _natural(self, row: int) -> Draw | None:
        """One conversation up to one of its replies, if its length is within the limits."""
        order, messages = self._order, self._read(row)
        turn = replies(messages)[order.replies["reply"][row]]
        own = until(messages, turn, fold=self._fold)
        sample = self._cut(own, messages[turn + 1 :])
        low, high = self.mixture.natural
        if not (low <= sample.num_read <= high and sample.continuation):
            return None
        return Draw(sample, "natural", bool(order.replies["traced"][row]), (order.place(row),))

    def _packed(self, row: int, start: int) -> Draw | None:
        """Several conversations in a row, with the last question of one of them at the end."""
        order, (low, high) = self._order, self.mixture.packed
        tokens = order.replies["tokens"]
        rng = np.random.default_rng((self.seed, row, start))
        lifted, target = self._read(row), rng.uniform(low, high)
        others = self._fillers(row, start, 1.5 * high)
        own = float(order.replies["before"][row])
        at, scale = rng.random(), 1.0
        tried: list[int] | None = None
        for _ in range(PACK_TRIES):
            chosen = _filled(others, tokens, own, target * scale, high * scale)
            if chosen == tried:
                break
            tried, place = chosen, round(at * len(chosen))
            talks = [self._read(other) for other in chosen]
            # The later half of a conversation, rounded up, is moved to the end: the questions there
            # are about what is left of it.
            half = (len(replies(lifted)) + 1) // 2
            moved = min(LIFTED, half) if self.mixture.later_turns else 1
            packed = pack([*talks[:place], lifted, *talks[place:]], place, moved)
            sample = self._cut(*packed)
            if low <= sample.num_read <= high and sample.continuation:
                records = tuple(order.place(each) for each in (row, *chosen))
                return Draw(sample, "packed", bool(order.replies["traced"][row]), records)
            scale = (own + float(tokens[chosen].sum())) / max(sample.num_read, 1)
        return None

    def _fillers(self, own: int, start: int, room: float) -> list[int]:
        """Rows of more conversations than a pack needs; none opens like the pack's own."""
        order, found = self._order, dict[int, None]()
        replies = order.replies
        first = round(start * order.per_sample)  # about where the packs before end
        for step in range(2 * len(replies) if order.fillers.parts else 0):
            row = order.fillers.at(first + step)[1]
            if row in found or order.place(row) in self._taken:
                continue
            if replies["opening"][row] != replies["opening"][own]:
                found[row] = None
                room -= replies["tokens"][row]
            if room < 0:
                break
        return list(found)

    def _window(self, row: int, rng: np.random.Generator) -> Draw | None:
        """A window at a random place in one text."""
        first = front(self._tokenizer)  # the tokens that begin every prompt of plain text
        wanted = int(self.mixture.reach[0]) - len(first)
        text = self._read(row)
        per_token = len(text) / self._order.replies["before"][row]
        text = excerpt(text, int(2 * wanted * per_token), rng)
        tokens = encode_plain(self._tokenizer, text)
        if len(tokens) < wanted:
            return None
        start = int(rng.integers(len(tokens) - wanted + 1))
        cut = start + self.mixture.max_prefix - len(first)
        sample = Sample(first + tokens[start:cut], tokens[cut : start + wanted])
        return Draw(sample, "text", False, (self._order.place(row),))


def _filled(
    rows: Sequence[int], tokens: np.ndarray, used: float, target: float, most: float
) -> list[int]:
    """Rows in order, until their tokens reach ``target``, without exceeding ``most``."""
    chosen = []
    for row in rows:
        if used >= target:
            break
        if used + tokens[row] <= most:
            chosen.append(row)
            used += tokens[row]
    return chosen
