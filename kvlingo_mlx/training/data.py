"""The training stream: numbered, seeded samples from one or more sources of records.

Appendix "Training data and training recipe". A sample depends only on the seed, its number and how
many samples the run will draw. So a run can resume at any number, and processes share a stream by
dividing the numbers. No record is repeated before all other records of usable length have been
drawn.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence
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
from kvlingo_mlx.training.library import Library, Place, Shelf, Talk, fill
from kvlingo_mlx.training.mixture import Kind, Mixture, PlainText, Range, slot_at, spread
from kvlingo_mlx.training.orders import ELSEWHERE, Orders, Survey, reach
from kvlingo_mlx.training.wanted import Wanted

Bin = tuple[int, int, int, int]

LIFTED = 6  # most exchanges at the end of a pack whose continuation goes on
TRIES = 16  # records tried for one sample before it fails
PACKS_TRIED = 64  # the same for a pack, before one below its lengths will do
PACK_TRIES = 4  # attempts to fill one pack; each gives a better estimate of bytes per token
PACK_LIMIT = 4096  # the most records read for one pack
DIFFERENT_PACKS = 4  # disjoint packs that the data must hold


@dataclass(frozen=True)
class Draw:
    """A sample and its origin; the record that gives the answer is first in ``records``."""

    sample: Sample
    kind: Kind
    reasoning: bool
    records: tuple[Place, ...]


class Stream:
    """Numbered samples: natural and packed conversations, or windows of plain text.

    Attributes:
        mixture: Lengths and shares, adjusted to what the data allow; a :class:`PlainText` draws
            windows of texts instead.
        seed: Chooses the samples and the held-out records.
        survey: Statistics of the data that a run will see.
    """

    def __init__(
        self,
        sources: Sequence[Spec],
        tokenizer: Any,
        mixture: Mixture | PlainText | None = None,
        seed: int = 0,
        source_tokenizer: Any = None,
        planned: int = 40_000,
        wanted: Wanted | None = None,
    ) -> None:
        """Open ``sources`` (see ``records.open_source``) for models that share ``tokenizer``.

        ``source_tokenizer`` is the source's tokenizer where it differs. ``planned`` is the number
        of samples that the run draws (the paper: 5,000 steps of 8), over which lengths are spread.
        ``wanted`` is what is asked of the records; None is nothing.

        Raises:
            ValueError: Plain text is asked for with two tokenizers; a source cannot be read, has a
                malformed record or none that fits the mixture; or a tokenizer has no chat template.
            MissingExtraError: A source is a Hugging Face dataset, and ``datasets`` is not
                installed.
        """
        mixture = Mixture() if mixture is None else mixture
        self.seed, self._planned = seed, planned
        self._tokenizer, self._source_tokenizer = tokenizer, source_tokenizer
        texts = isinstance(mixture, PlainText)
        if texts and source_tokenizer is not None:
            raise ValueError(
                "windows of plain text are cut by one tokenizer, and this pair has two; give "
                "conversations (without --plain-text)"
            )
        both = [tokenizer] if source_tokenizer is None else [tokenizer, source_tokenizer]
        self._fold = not texts and not all(map(keeps_system, both))
        template = None if texts else boilerplate(*both)
        self._library = Library(sources, both, template, reach(mixture), seed, wanted)
        self._order(mixture)

    def at(self, mixture: Mixture) -> Stream:
        """The same data at other lengths, without reading all of them again.

        Where lengths are estimated they are so for the lengths before, so samples may differ from
        those of a stream that is opened with ``mixture``.
        """
        other = copy.copy(self)
        other._order(mixture)
        return other

    def _order(self, mixture: Mixture | PlainText) -> None:
        asked, shelves = mixture, self._library.training
        self._training = Orders(shelves, mixture, self._planned, self.seed)
        if isinstance(mixture, Mixture) and not self._can_pack(mixture):
            mixture = replace(mixture, packed_share=0.0)
            self._training = Orders(shelves, mixture, self._planned, self.seed)
        if not self._training.natural and not (
            isinstance(mixture, Mixture) and mixture.packed_share == 1
        ):
            raise ValueError(self._unmet(mixture, "natural"))
        self.mixture = mixture
        self.survey = self._survey(asked)

    @property
    def skipped(self) -> int:
        """The number of records without a usable assistant turn (or text)."""
        return self._library.skipped

    @property
    def longest(self) -> tuple[int, int]:
        """The tokens of the longest prefix and continuation that it may give, about."""
        if isinstance(self.mixture, PlainText):
            return self.mixture.prefix, self.mixture.continuation
        natural = min(self.mixture.natural[1], self.survey.longest)
        packed = self.mixture.packed[1] if self.mixture.packed_share else 0
        return max(natural, packed), self.mixture.max_continuation

    @property
    def reserved(self) -> int:
        """The number of usable records reserved for :meth:`held_out`."""
        return sum(len(shelf.records) for shelf in self._library.reserved)

    @property
    def contents(self) -> dict[str, str]:
        """Size and hash of each source by its name, to detect changed data."""
        return self._library.contents

    def _can_pack(self, mixture: Mixture) -> bool:
        """Whether the data hold enough different packs; at ``packed_share`` 1, one is enough.

        Enough tokens do not suffice: the conversations must add up to the lengths wanted, which a
        few packs show.

        Raises:
            ValueError: The data hold no pack, and only packs are asked for.
        """
        if mixture.packed_share == 0:
            return True
        least = 1 if mixture.packed_share == 1 else DIFFERENT_PACKS
        enough = math.floor(self._training.tokens / (sum(mixture.packed) / 2)) >= least
        found = enough and any(
            self._find("packed", n, self._training, tries=PACKS_TRIED, mixture=mixture)
            for n in range(DIFFERENT_PACKS)
        )
        if mixture.packed_share == 1 and not found:
            raise ValueError(self._unmet(mixture, "packed"))
        return found

    def _survey(self, asked: Mixture | PlainText) -> Survey:
        orders, mixture = self._training, self.mixture
        share, wanted, tokens, lifted = 0.0, reach(mixture)[0], 0.0, (set[Place](), 0)
        if isinstance(mixture, Mixture):
            share, wanted, tokens = mixture.packed_share, mixture.natural[1], orders.tokens
            lifted = orders.met(orders.lifted, share)
        natural = orders.met(orders.natural, 1 - share)
        walks = orders.lifted if share == 1 else orders.natural
        records = sum(map(len, walks.values()))
        listed = sum(len(source.sizes) for source in self._library.sources)
        return Survey(
            records,
            listed - records - self.reserved,
            self.reserved,
            self._planned,
            len(natural[0] | lifted[0]),
            natural[1] + lifted[1],
            max((walk.longest for walk in walks.values()), default=0),
            int(wanted),
            round(tokens),
            share,
            asked.packed_share if isinstance(asked, Mixture) else 0.0,
        )

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
        slot, mixture = slot_at(index, self.mixture, self.seed), self.mixture
        tries = PACKS_TRIED if slot.kind == "packed" else TRIES
        found = self._find(slot.kind, slot.ordinal, self._training, tries=tries)
        if found is None and isinstance(mixture, Mixture) and slot.kind == "packed":
            shorter = replace(mixture, packed=(mixture.packed[0] // 2, mixture.packed[1]))
            found = self._find("packed", slot.ordinal, self._training, tries=tries, mixture=shorter)
        if found is None:
            raise ValueError(f"sample {index}: {self._unmet(self.mixture, slot.kind)}")
        return found

    def held_out(self, count: int = 64) -> list[Sample]:
        """Up to ``count`` samples of the same mixture, from reserved records only.

        No record is in two samples; there are fewer samples if the reserved records do not suffice.
        Training reads neither these records nor others that open with the same question. If there
        are too few records for a pack, all samples are natural.

        Raises:
            ValueError: There are too few records to reserve any, or none fits.
        """
        kinds: list[Kind] = [slot_at(i, self.mixture, self.seed).kind for i in range(count)]
        orders = Orders(self._library.reserved, self.mixture, count, self.seed)
        found: dict[Sample, None] = {}
        taken: set[Place] = set()
        # Natural samples come first, since a pack uses up many records.
        wanted = [kind for kind in kinds if kind != "packed"]
        spare: list[Kind] = ["text" if isinstance(self.mixture, PlainText) else "natural"] * count
        ordinals = dict.fromkeys([*kinds, *spare], 0)
        for kind in [*wanted, *(kind for kind in kinds if kind == "packed"), *spare]:
            if len(found) == count:
                break
            while ordinals[kind] < 4 * count:
                draw = self._find(kind, ordinals[kind], orders, frozenset(taken), tries=1)
                ordinals[kind] += 1
                if draw is not None:
                    found[draw.sample] = None
                    taken.update(draw.records)
                    break
        if not found:
            names, held = self._library.names, self.reserved
            raise ValueError(f"no sample in the {held} records held out of {names}; add records")
        return list(found)

    def _find(
        self,
        kind: Kind,
        ordinal: int,
        orders: Orders,
        taken: frozenset[Place] = frozenset(),
        *,
        tries: int,
        mixture: Mixture | PlainText | None = None,
    ) -> Draw | None:
        mixture = mixture or self.mixture
        walks = orders.lifted if kind == "packed" else orders.natural
        if not walks:
            return None
        for attempt in range(tries):
            shelf, row, reply = orders.of(walks, ordinal, attempt)
            if shelf.place(row) in taken:
                continue
            if isinstance(mixture, PlainText):
                draw = self._window(mixture, shelf, row, ordinal, attempt)
            elif kind == "packed":
                talk = self._library.talk(shelf.place(row))
                draw = self._packed(mixture, ordinal + attempt * ELSEWHERE, talk, orders, taken)
            else:
                draw = self._natural(mixture, self._library.talk(shelf.place(row), reply))
            if draw is not None:
                return draw
        return None

    def _unmet(self, mixture: Mixture | PlainText, kind: Kind) -> str:
        """The error message for a kind of sample that the data do not hold."""
        names = self._library.names
        if isinstance(mixture, PlainText):
            wanted = mixture.prefix + mixture.continuation
            return f"no text of {wanted} tokens in {names}; give longer texts"
        low, high = mixture.natural if kind == "natural" else mixture.packed
        if kind == "natural":
            what = f"conversation with a prefix of {low} to {high} tokens in {names}"
            return f"no {what}; add conversations, or allow longer ones (train --max-prefix)"
        return (
            f"no concatenation with a prefix of {low} to {high} tokens in {names}, whose "
            f"conversations have {round(self._training.tokens):,} tokens; add conversations, or "
            "pack none (-c packed_share=0)"
        )

    # ---- natural ---------------------------------------------------------------------

    def _natural(self, mixture: Mixture, talk: Talk) -> Draw | None:
        """One conversation up to one of its replies, if its length is within the limits."""
        own = until(talk.messages, talk.turn, fold=self._fold)
        sample = self._cut(own, talk.messages[talk.turn + 1 :], mixture)
        low, high = mixture.natural
        if not (low <= sample.num_read <= high and sample.continuation):
            return None
        return Draw(sample, "natural", talk.reasoning, (talk.place,))

    def _cut(
        self, messages: Sequence[Message], later: Sequence[Message], mixture: Mixture
    ) -> Sample:
        longest, ends = mixture.max_continuation, (self._tokenizer, self._source_tokenizer)
        return to_sample(messages, ends[0], longest, ends[1], later if mixture.later_turns else ())

    # ---- packed ----------------------------------------------------------------------

    def _packed(
        self, mixture: Mixture, ordinal: int, lifted: Talk, orders: Orders, taken: frozenset[Place]
    ) -> Draw | None:
        """Several conversations in a row, with the last question of ``lifted`` at the end."""
        rng = random.Random(f"packed/{self.seed}/{ordinal}")
        low, high = mixture.packed
        target = low + (high - low) * spread(ordinal, self.seed)
        others = self._others(orders, ordinal, lifted, mixture.packed, rng, taken)
        own = self._library.measure(lifted.place[0], {"messages": lifted.messages}).lengths[-1]
        tried: list[Talk] | None = None
        scale = 1.0  # estimated tokens per real token
        for _ in range(PACK_TRIES):
            chosen = fill(others, own, target * scale, high * scale)
            if chosen == tried:
                break
            tried, draw = chosen, self._concatenated(lifted, chosen, mixture, rng)
            length = draw.sample.num_read
            if low <= length <= high and draw.sample.continuation:
                return draw
            sizes = {talk.place: tokens for talk, tokens in others}
            scale = (own + sum(sizes[talk.place] for talk in chosen)) / max(length, 1)
        return None

    def _others(
        self,
        orders: Orders,
        ordinal: int,
        lifted: Talk,
        packed: Range,
        rng: random.Random,
        taken: frozenset[Place],
    ) -> list[tuple[Talk, float]]:
        """More conversations than a pack needs, with their tokens; none opens like ``lifted``."""
        found: list[tuple[Talk, float]] = []
        seen, room = {lifted.place, *taken}, 1.5 * packed[1]
        for shelf, row in self._refill(orders, ordinal, packed, rng):
            place = shelf.place(row)
            if place in seen:
                continue
            seen.add(place)
            talk = self._library.talk(place)
            if talk.opening != lifted.opening:
                found.append((talk, float(shelf.whole[row])))
                room -= found[-1][1]
            if room < 0:
                break
        return found

    def _refill(
        self, orders: Orders, ordinal: int, packed: Range, rng: random.Random
    ) -> Iterator[tuple[Shelf, int]]:
        """Records of all sources by their weights, starting where the previous packs end."""
        refills = orders.refills
        shelves = [shelf for shelf in orders.shelves if shelf.source in refills]
        shares = orders.shares(refills)
        met = ordinal * (packed[0] + packed[1]) / 2
        positions = [
            refills[shelf.source].start(met * share)
            for shelf, share in zip(shelves, shares, strict=True)
        ]
        for _ in range(min(PACK_LIMIT, 2 * sum(map(len, refills.values())))):
            index = rng.choices(range(len(shelves)), shares)[0]
            yield shelves[index], refills[shelves[index].source].at(positions[index])
            positions[index] += 1

    def _concatenated(
        self, lifted: Talk, others: list[Talk], mixture: Mixture, rng: random.Random
    ) -> Draw:
        at = rng.randint(0, len(others))
        talks = [*others[:at], lifted, *others[at:]]
        # The later half of a conversation, rounded up, is moved to the end: the questions there are
        # about what is left of it.
        moved = min(LIFTED, (len(replies(lifted.messages)) + 1) // 2) if mixture.later_turns else 1
        sample = self._cut(*pack([talk.messages for talk in talks], at, moved), mixture)
        records = (lifted.place, *(talk.place for talk in others))
        return Draw(sample, "packed", lifted.reasoning, records)

    # ---- plain text ------------------------------------------------------------------

    def _window(
        self, windows: PlainText, shelf: Shelf, row: int, ordinal: int, attempt: int
    ) -> Draw | None:
        """A window at a random place in one text."""
        rng = random.Random(f"text/{self.seed}/{ordinal}/{attempt}")
        first = front(self._tokenizer)  # the tokens that begin every prompt of plain text
        wanted = windows.prefix - len(first) + windows.continuation
        per_token, _ = self._library.per_token[shelf.source]
        record = self._library.read(shelf.place(row))
        text = excerpt(record["text"], int(2 * wanted * per_token), rng) if record else ""
        tokens = encode_plain(self._tokenizer, text)
        if len(tokens) < wanted:
            return None
        start = rng.randint(0, len(tokens) - wanted)
        cut = start + windows.prefix - len(first)
        sample = Sample(first + tokens[start:cut], tokens[cut : start + wanted])
        return Draw(sample, "text", False, (shelf.place(row),))


def prefix_histogram(stream: Stream, count: int = 240, bins: int = 12, every: int = 1) -> list[Bin]:
    """Prefix lengths of ``count`` samples, in bins of equal logarithmic width.

    ``every`` is the distance between two samples; the first is sample 0.

    Returns:
        For each bin its shortest length (tokens), its exclusive upper bound, and the number of
        samples with a reasoning trace and without (figure "prefixhist").
    """
    draws = [stream.draw(index * every) for index in range(count)]
    if not draws:
        return []
    lengths = np.array([len(draw.sample.prefix) for draw in draws])
    reasoning = np.array([draw.reasoning for draw in draws])
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, bins + 1).round().astype(int))
    on, off = (np.histogram(lengths[kept], edges)[0] for kept in (reasoning, ~reasoning))
    rows = zip(edges[:-1], edges[1:], on, off, strict=True)
    return [(int(low), int(high), int(with_), int(without)) for low, high, with_, without in rows]
