"""The training stream: seeded samples by number, from one or more sources of records.

Appendix "Training data and training recipe". A sample is a pure function of the seed and
its number: a run resumes at any number, and processes share a stream by sharing numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlingo_mlx.renderings import front
from kvlingo_mlx.samples import Sample, encode_plain
from kvlingo_mlx.training.conversations import excerpt, keeps_system, pack, to_sample, until
from kvlingo_mlx.training.library import Library, Place, Shelf, Side, Talk, fill
from kvlingo_mlx.training.mixture import (
    STRATA,
    Kind,
    Mixture,
    PlainText,
    Slot,
    key_of,
    shuffled,
    slot_at,
    spread,
)
from kvlingo_mlx.training.records import Spec

POOL = 64  # records looked at for one natural sample
NEAREST = 4  # of those, the ones whose tokens are counted
TRIES = 16  # pools drawn for a sample before it is given up
ELSEWHERE = 7919  # how far apart those pools lie, in visits
PACK_TRIES = 4  # fillings of one pack: each tells better how many characters a token has
PACK_LIMIT = 4096  # records read for one pack at most
SLACK = 0.8  # records may hold somewhat more tokens a byte than those that were measured


@dataclass(frozen=True)
class Draw:
    """A sample and where it comes from: the record that answers stands first."""

    sample: Sample
    kind: Kind
    reasoning: bool
    records: tuple[Place, ...]


class Stream:
    """Samples by number: natural and packed conversations, or windows of plain text.

    Attributes:
        mixture: Lengths and shares; a :class:`PlainText` draws windows of texts instead.
        seed: Another seed holds out other records and draws other samples.
    """

    def __init__(
        self,
        sources: Sequence[Spec],
        tokenizer: Any,
        mixture: Mixture | PlainText | None = None,
        seed: int = 0,
        source_tokenizer: Any = None,
    ) -> None:
        """Open ``sources`` (see ``records.open_source``) for models that share ``tokenizer``.

        ``source_tokenizer`` is the source's where it has another one.

        Raises:
            ValueError: Plain text for two tokenizers; a source cannot be read or has no record
                for the mixture, or a tokenizer has no chat template.
            MissingExtraError: A Hugging Face dataset without the ``datasets`` package.
        """
        self.mixture = Mixture() if mixture is None else mixture
        self.seed = seed
        self._tokenizer, self._source_tokenizer = tokenizer, source_tokenizer
        texts = isinstance(self.mixture, PlainText)
        if texts and source_tokenizer is not None:
            raise ValueError(
                "windows of plain text are cut by one tokenizer, and this pair has two; give "
                "conversations (without --plain-text)"
            )
        both = [tokenizer] if source_tokenizer is None else [tokenizer, source_tokenizer]
        self._fold = not texts and not all(map(keeps_system, both))
        self._library = Library(sources, tokenizer, texts, seed)

    @property
    def skipped(self) -> int:
        """How many different records so far had no usable assistant turn (or no text)."""
        return len(self._library.skipped)

    @property
    def reserved(self) -> int:
        """How many records are kept from training for :meth:`held_out`."""
        return sum(len(shelf.records) for shelf in self._library.reserved.shelves)

    @property
    def contents(self) -> dict[str, str]:
        """Size and hash of each source by its name, for telling other data from the same."""
        return self._library.contents

    def sample(self, index: int) -> Sample:
        """Training sample ``index`` (see :meth:`draw`)."""
        return self.draw(index).sample

    def draw(self, index: int) -> Draw:
        """Training sample ``index`` with its origin, a function of seed and index alone.

        Raises:
            ValueError: Nothing fits in a bounded number of tries, or a record is malformed;
                the message names the lengths wanted, or the record's file and line.
        """
        found = self._find(index, self._library.training)
        if found is None:
            raise ValueError(f"sample {index}: {self._unmet(index)}")
        return found

    def held_out(self, count: int = 64) -> list[Sample]:
        """Up to ``count`` samples of the same mixture, from reserved records only.

        No record is in two of them; there are fewer where the reserved records do not suffice.
        Training reads none of those records, nor others that open with the same question.
        Where they are too few to pack, all samples are natural.

        Raises:
            ValueError: There are too few records to reserve any, or nothing fits.
        """
        found: dict[Sample, None] = {}
        side, spent = self._library.reserved, set()
        kinds = [slot_at(index, self.mixture, self.seed).kind for index in range(4 * count)]
        # A pack takes many records: what is scarce goes to natural samples first.
        order = sorted(range(4 * count), key=lambda i: (i >= count, kinds[i] == "packed", i))
        for index in order if self.reserved else ():
            if len(found) == count or kinds[index] in spent:
                continue
            draw = self._find(index, side)
            if draw is None:  # nor will what is left do for another of its kind
                spent.add(kinds[index])
                continue
            found[draw.sample] = None
            side = replace(side, taken=side.taken.union(draw.records))
        if not found:
            names, held = self._library.names, self.reserved
            raise ValueError(f"no sample in the {held} records held out of {names}; add records")
        return list(found)

    def _find(self, index: int, side: Side) -> Draw | None:
        slot = slot_at(index, self.mixture, self.seed)
        tries = (self._attempt(slot, side, attempt) for attempt in range(TRIES))
        return next((draw for draw in tries if draw is not None), None)

    def _attempt(self, slot: Slot, side: Side, attempt: int) -> Draw | None:
        if isinstance(self.mixture, PlainText):
            return self._window(self.mixture, slot.ordinal, side, attempt)
        if slot.kind == "packed":
            return self._packed(self.mixture, slot.ordinal, side, attempt)
        return self._natural(self.mixture, slot.ordinal, side, attempt)

    def _unmet(self, index: int) -> str:
        """What was looked for in vain, and what to change."""
        names = self._library.names
        if isinstance(self.mixture, PlainText):
            wanted = self.mixture.prefix + self.mixture.continuation
            return f"no text of {wanted} tokens in {names}; give longer texts"
        natural = slot_at(index, self.mixture, self.seed).kind == "natural"
        low, high = self.mixture.natural if natural else self.mixture.packed
        what = "conversation with a prefix" if natural else "concatenation with a prefix"
        change = "" if natural else ", or pack none (--packed-share 0)"
        return f"no {what} of {low} to {high} tokens in {names}; add conversations{change}"

    def _random(self, kind: Kind, ordinal: int, attempt: int) -> random.Random:
        return random.Random(f"{kind}/{self.seed}/{ordinal}/{attempt}")

    # ---- natural ---------------------------------------------------------------------

    def _natural(self, mixture: Mixture, ordinal: int, side: Side, attempt: int) -> Draw | None:
        """One conversation, of a length wanted beforehand (paragraph "Prefix lengths").

        Lengths are near uniform since the parts of their range are visited in turn.
        """
        visit, step = divmod(ordinal, STRATA)
        part = shuffled(step, STRATA, key_of(self.seed, "part", visit))
        rng = self._random("natural", ordinal, attempt)
        low, high = mixture.natural
        width = (high - low) / STRATA
        wanted = low + (part + rng.random()) * width
        reasons = (visit + part) % 2 == 0
        talks = self._pool(side, part, low + part * width, visit, attempt, rng)
        talks.sort(key=lambda t: (t.reasoning != reasons, abs(self._about(t) - wanted)))
        draws = [self._whole(talk, mixture) for talk in talks[:NEAREST]]
        fit = [d for d in draws if low <= d.sample.num_read <= high and d.sample.continuation]
        far = [(d.reasoning != reasons, abs(d.sample.num_read - wanted)) for d in fit]
        return fit[far.index(min(far))] if fit else None

    def _pool(
        self, side: Side, part: int, shortest: float, visit: int, attempt: int, rng: random.Random
    ) -> list[Talk]:
        """The next candidates on the walk of ``part`` through the records large enough for it.

        Each further attempt takes records half as large, where no large one fits.
        """
        shelf = side.pick(rng)
        _, bytes_per_token = self._library.scales[shelf.source]
        among = shelf.at_least(SLACK * bytes_per_token * shortest / 2**attempt, POOL)
        start = (int(visit * shelf.share) + attempt * ELSEWHERE) * POOL
        key = key_of(self.seed, "natural", part)
        places = (shelf.at(start + i, key, among) for i in range(min(POOL, among)))
        return [talk for place in places if (talk := self._library.talk(place, side, rng))]

    def _about(self, talk: Talk) -> float:
        """About how many tokens the prefix of a candidate has."""
        return talk.before / self._library.scales[talk.place[0]][0]

    def _whole(self, talk: Talk, mixture: Mixture) -> Draw:
        messages = until(talk.messages, talk.turn, fold=self._fold)
        sample = to_sample(
            messages, self._tokenizer, mixture.max_continuation, self._source_tokenizer
        )
        return Draw(sample, "natural", talk.reasoning, (talk.place,))

    # ---- packed ----------------------------------------------------------------------

    def _packed(self, mixture: Mixture, ordinal: int, side: Side, attempt: int) -> Draw | None:
        """Conversations one after another, a question out of one of them at the end."""
        rng = self._random("packed", ordinal, attempt)
        low, high = mixture.packed
        target = low + (high - low) * spread(ordinal, self.seed)
        reasons = ordinal % 2 == 0
        visit = ordinal + attempt * ELSEWHERE
        talks = self._material(self._walk(side, high, visit, rng), high, reasons)
        if not talks:
            return None
        lifted = next((talk for talk in talks if talk.reasoning == reasons), talks[0])
        others = [talk for talk in talks if talk.opening != lifted.opening]
        per_token, _ = self._library.scales[lifted.place[0]]
        tried: list[Talk] | None = None
        for _ in range(PACK_TRIES):
            chosen = fill(others, lifted.before, target * per_token, high * per_token)
            if chosen == tried:
                break
            tried, draw = chosen, self._concatenated(lifted, chosen, mixture, rng)
            length = draw.sample.num_read
            if low <= length <= high and draw.sample.continuation:
                return draw
            per_token = (lifted.before + sum(talk.whole for talk in chosen)) / max(length, 1)
        return None

    def _material(self, walk: Iterator[Talk], tokens: int, reasons: bool) -> list[Talk]:
        """More conversations than a prefix of ``tokens`` takes, one that ends as wanted if any."""
        most = tokens * max(per_token for per_token, _ in self._library.scales.values())
        talks: list[Talk] = []
        room, found = 1.5 * most, False
        for talk in walk:
            talks.append(talk)
            room -= talk.whole if talk.whole <= most else 0
            found = found or talk.reasoning == reasons
            if room < 0 and (found or len(talks) >= POOL):
                break
        return talks

    def _walk(self, side: Side, tokens: int, visit: int, rng: random.Random) -> Iterator[Talk]:
        """Conversations of all sources by their weights, each once."""
        positions = {s.source: self._start(s, tokens, visit) for s in side.shelves}
        seen: set[Place] = set()
        for _ in range(min(PACK_LIMIT, 2 * sum(len(shelf.records) for shelf in side.shelves))):
            shelf = side.pick(rng)
            place = shelf.at(positions[shelf.source], key_of(self.seed, "packed"))
            positions[shelf.source] += 1
            if place not in seen and (talk := self._library.talk(place, side)):
                yield talk
            seen.add(place)

    def _start(self, shelf: Shelf, tokens: int, visit: int) -> int:
        """Where a pack begins on a shelf, so that packs together meet each record about once."""
        _, bytes_per_token = self._library.scales[shelf.source]
        stride = max(1, round(tokens * bytes_per_token / float(shelf.sizes.mean())))
        return int(visit * shelf.share) * stride

    def _concatenated(
        self, lifted: Talk, others: list[Talk], mixture: Mixture, rng: random.Random
    ) -> Draw:
        at = rng.randint(0, len(others))
        talks = [*others[:at], lifted, *others[at:]]
        messages = pack([talk.messages for talk in talks], at)
        sample = to_sample(
            messages, self._tokenizer, mixture.max_continuation, self._source_tokenizer
        )
        records = (lifted.place, *(talk.place for talk in others))
        return Draw(sample, "packed", lifted.reasoning, records)

    # ---- plain text ------------------------------------------------------------------

    def _window(self, windows: PlainText, ordinal: int, side: Side, attempt: int) -> Draw | None:
        """A window of one text, at random in it."""
        rng = self._random("text", ordinal, attempt)
        shelf = side.pick(rng)
        first = front(self._tokenizer)  # a window stands where a prompt of text would
        wanted = windows.prefix - len(first) + windows.continuation
        per_token, bytes_per_token = self._library.scales[shelf.source]
        among = shelf.at_least(SLACK * bytes_per_token * wanted, 1)
        position = int(ordinal * shelf.share) + attempt * ELSEWHERE
        place = shelf.at(position, key_of(self.seed, "text"), among)
        record = None if place in side.taken else self._library.read(place)
        text = excerpt(record["text"], int(2 * wanted * per_token), rng) if record else ""
        tokens = encode_plain(self._tokenizer, text)
        if len(tokens) < wanted:
            return None
        start = rng.randint(0, len(tokens) - wanted)
        cut = start + windows.prefix - len(first)
        sample = Sample(first + tokens[start:cut], tokens[cut : start + wanted])
        return Draw(sample, "text", False, (place,))


def prefix_histogram(
    stream: Stream, count: int = 240, bins: int = 12
) -> list[tuple[int, int, int, int]]:
    """Prefix lengths of the first ``count`` samples, in bins of equal width in their logarithm.

    Returns:
        For each bin the shortest length (tokens), the length it stays below, and how many
        samples it has with a reasoning trace and without (figure "prefixhist").
    """
    draws = [stream.draw(index) for index in range(count)]
    lengths = np.array([len(draw.sample.prefix) for draw in draws])
    reasoning = np.array([draw.reasoning for draw in draws])
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, bins + 1).round().astype(int))
    on, off = (np.histogram(lengths[kept], edges)[0] for kept in (reasoning, ~reasoning))
    rows = zip(edges[:-1], edges[1:], on, off, strict=True)
    return [(int(low), int(high), int(with_), int(without)) for low, high, with_, without in rows]
