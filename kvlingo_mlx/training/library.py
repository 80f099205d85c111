"""The usable training records of all sources, with their lengths.

Every record is read once when a stream is opened. So malformed or unusable records are found before
training starts, and all later choices rest on known lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.phases import counted
from kvlingo_mlx.tokenization.records import Source, Spec, open_source
from kvlingo_mlx.tokenization.samples import encode_plain
from kvlingo_mlx.training.conversations import Message, normalise, replies
from kvlingo_mlx.training.mixture import key_of, shuffled
from kvlingo_mlx.training.wanted import Wanted

Place = tuple[int, int]  # a source and one of its records, both numbered from 0

HELD_OUT = 2048  # most records of a source kept from training; a small source keeps a tenth
COUNTED = 8_000_000  # bytes of a source up to which tokens are counted, not estimated
UNSURE = 1.5  # in larger sources, records within this factor of a limit are counted too
MEASURED = 32  # records from which the bytes per token are measured
MEASURED_CHARACTERS = 4096  # characters read of each of them


@dataclass(frozen=True, eq=False)
class Shelf:
    """The usable records of one source, in the source's order.

    Attributes:
        source: The number of the source.
        share: The source's share of the samples.
        records: The records' numbers in the source (M,).
        whole: Each record's tokens up to the end of its last reply, or of its whole text;
            estimated (M,).
        starts: Where each record's replies begin in ``lengths``, and where the last ones end
            (M + 1,).
        lengths: The tokens before each reply, or of a whole text; estimated (R,).
        traces: Whether a reply has a reasoning trace (R,).
    """

    source: int
    share: float
    records: np.ndarray
    whole: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    traces: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """The last reply of each record, as indices into ``lengths`` (M,)."""
        return self.starts[1:] - 1

    def place(self, row: int) -> Place:
        """The source and number of the record at ``row`` of the shelf."""
        return self.source, int(self.records[row])


@dataclass(frozen=True)
class Measured:
    """The approximate length of a record; a text counts as one reply, after the whole text.

    Attributes:
        lengths: The tokens before each reply.
        whole: The tokens up to the end of the last reply.
        traces: Whether each reply has a reasoning trace.
    """

    lengths: list[float]
    whole: float
    traces: list[bool]


@dataclass(frozen=True)
class Talk:
    """A conversation, and the reply in it that would be a sample's continuation."""

    place: Place
    messages: list[Message]
    turn: int

    @property
    def reasoning(self) -> bool:
        return bool(self.messages[self.turn].get("reasoning_content"))

    @property
    def opening(self) -> str:
        """The first question, which identifies duplicates of a conversation."""
        return opening(self.messages)


class Library:
    """All records, separated into training and held-out ones.

    Attributes:
        sources: The opened sources, in the order given.
        training: A shelf for each source that has records to train on.
        reserved: Shelves of the records kept from training, chosen by the seed and their numbers.
        skipped: The number of records without a usable assistant turn (or text).
        per_token: For each source, its characters per token and its bytes per token.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        tokenizers: Sequence[Any],
        template: tuple[float, float] | None,
        limits: tuple[float, float],
        seed: int,
        wanted: Wanted | None = None,
    ) -> None:
        """Read all records.

        Args:
            specs: The sources, as for ``records.open_source``.
            tokenizers: The target's tokenizer, and the source's where it differs.
            template: The result of ``conversations.boilerplate``; None for plain texts.
            limits: The shortest and the longest usable prefix.
            seed: Chooses the reserved records.
            wanted: What is asked of the records; None is nothing.
        """
        if not specs:
            raise ValueError("no training data; name a JSONL file, a folder or a dataset")
        opened = [open_source(spec) for spec in specs]
        self.sources: tuple[Source, ...] = tuple(source for source, _ in opened)
        self.skipped = 0
        self.wanted = wanted or Wanted()
        self._kind = "text" if template is None else "messages"
        self._template, self._limits = template or (0.0, 0.0), limits
        self._tokenizers = tokenizers
        total = sum(weight for _, weight in opened)
        shares = [weight / total for _, weight in opened]
        kept = [_reserve(len(source.sizes), seed) for source in self.sources]
        self.per_token = {n: self._scale(n) for n in range(len(self.sources))}
        held = [self._shelf(n, shares[n], np.flatnonzero(k)) for n, k in enumerate(kept)]
        known = self._openings(held)
        shelves = [self._shelf(n, shares[n], np.flatnonzero(~k), known) for n, k in enumerate(kept)]
        for shelf, other in zip(shelves, held, strict=True):
            if not len(shelf.records) + len(other.records):
                raise self._useless(shelf.source)
        self.reserved = tuple(shelf for shelf in held if len(shelf.records))
        self.training = tuple(shelf for shelf in shelves if len(shelf.records))

    @property
    def names(self) -> str:
        """The names of the sources, for messages."""
        return ", ".join(source.name for source in self.sources)

    @property
    def contents(self) -> dict[str, str]:
        """Size and hash of each source by its name, to detect changed data."""
        return {
            s.name: f"{len(s.sizes)} records of {s.sizes.sum()} bytes, sha256 {s.digest}"
            for s in self.sources
        }

    def read(self, place: Place) -> dict[str, Any] | None:
        """A normalised record, or None if it is not usable.

        Raises:
            ValueError: The record is malformed; the message names its file and line.
        """
        found, refusal = self._judged(place)
        return found if found.get(self._kind) and not refusal else None

    def _judged(self, place: Place) -> tuple[dict[str, Any], str]:
        """A normalised record, and why it is not wanted."""
        record, where = self.sources[place[0]].read(place[1])
        found = {} if record is None else normalise(record, where)
        asked = found.get(self._kind) and self.wanted.anything
        return found, self.wanted.refusal(record, found) if asked else ""

    def talk(self, place: Place, reply: int = -1) -> Talk:
        """A conversation with one of its replies, by default the last."""
        record = self.read(place)
        assert record is not None, "a record of no use is on no shelf"
        return Talk(place, record["messages"], replies(record["messages"])[reply])

    def measure(self, number: int, record: dict[str, Any]) -> Measured:
        """The length of a record of source ``number``, counted where an estimate is not enough."""
        _, per_token = self.per_token[number]
        if self.sources[number].sizes.sum() <= COUNTED:
            return self._measure(record, self._counted)
        found = self._measure(record, lambda text: len(text.encode()) / per_token)
        low, high = self._limits
        near = any(
            limit / UNSURE < length < limit * UNSURE
            for length in found.lengths
            for limit in (low, high)
        )
        return self._measure(record, self._counted) if near else found

    def _measure(self, record: dict[str, Any], tokens: Callable[[str], float]) -> Measured:
        if "text" in record:
            size = tokens(record["text"])
            return Measured([size], size, [False])
        messages, turns = record["messages"], replies(record["messages"])
        base, header = self._template
        sizes = [tokens(message["content"]) + header for message in messages]
        ends = np.cumsum([0.0, *sizes]).tolist()
        traces = [bool(messages[turn].get("reasoning_content")) for turn in turns]
        return Measured([base + ends[turn] for turn in turns], ends[turns[-1] + 1], traces)

    def _counted(self, text: str) -> float:
        """The tokens of a text, by the tokenizer that needs more of them."""
        return max(len(encode_plain(tokenizer, text)) for tokenizer in self._tokenizers)

    def _useless(self, number: int) -> ValueError:
        source = self.sources[number]
        count, left_out = len(source.sizes), sum(self.wanted.left_out.values())
        if left_out:
            return ValueError(
                f"no record of {source.name} is left: {self.wanted}, of {count}; give other "
                "data, or leave out english or apart_from"
            )
        if self._kind == "text":
            return ValueError(
                f'no text in {source.name}: none of {count} records is {{"text": ...}}'
            )
        return ValueError(
            f"no assistant turn in {source.name}: none of {count} records has a question and its "
            'answer; give {"messages": [...]} records, or texts to kvlingo-mlx train --plain-text'
        )

    def _shelf(
        self, number: int, share: float, records: np.ndarray, known: frozenset[str] = frozenset()
    ) -> Shelf:
        """A shelf of a source's usable ``records``, without those whose opening is ``known``."""
        rows, whole, counts, lengths, traces = [], [], [], [], []
        read = f"reading the records of {self.sources[number].name}"
        for record in counted(read, records.tolist()):
            found, refusal = self._judged((number, record))
            if refusal or not found.get(self._kind):
                self.skipped += 1
                self.wanted.left_out.update([refusal] if refusal else [])
                continue
            if "messages" in found and opening(found["messages"]) in known:
                continue
            measured = self.measure(number, found)
            rows.append(record)
            whole.append(measured.whole)
            counts.append(len(measured.lengths))
            lengths += measured.lengths
            traces += measured.traces
        starts = np.concatenate([[0], np.cumsum(counts, dtype=int)]).astype(int)
        return Shelf(
            number,
            share,
            np.array(rows, int),
            np.array(whole, float),
            starts,
            np.array(lengths, float),
            np.array(traces, bool),
        )

    def _openings(self, kept: Iterable[Shelf]) -> frozenset[str]:
        """The questions that open exactly one reserved record.

        Nemotron has many conversations twice, with and without reasoning. A question that opens
        several of the few reserved records is a greeting or an instruction, and does not identify
        any.
        """
        places = (shelf.place(row) for shelf in kept for row in range(len(shelf.records)))
        found = (self.read(place) or {} for place in places)
        counts = Counter(opening(record["messages"]) for record in found if "messages" in record)
        return frozenset(question for question, count in counts.items() if count == 1)

    def _scale(self, number: int) -> tuple[float, float]:
        """A source's characters per token and bytes per token, from records spread over it."""
        count = len(self.sources[number].sizes)
        characters, size, tokens = 1, 1, 1.0
        found = (self.read((number, shuffled(i, count, 0))) for i in range(count))
        for index, record in enumerate(record for record in found if record):
            part = _text(record)[:MEASURED_CHARACTERS]
            characters += len(part)
            size += len(part.encode())
            tokens += self._counted(part)
            if index + 1 == MEASURED:
                break
        return characters / tokens, size / tokens


def fill(talks: list[tuple[Talk, float]], used: float, target: float, most: float) -> list[Talk]:
    """Conversations in order, until their tokens reach ``target``, without exceeding ``most``.

    Each of ``talks`` is a conversation with its tokens; ``used`` tokens are already taken.
    """
    chosen = []
    for talk, tokens in talks:
        if used >= target:
            break
        if used + tokens <= most:
            chosen.append(talk)
            used += tokens
    return chosen


def opening(messages: Sequence[Message]) -> str:
    """The first user turn of a conversation."""
    return next(message["content"] for message in messages if message["role"] == "user")


def _text(record: dict[str, Any]) -> str:
    if "text" in record:
        return record["text"]
    parts = (m.get("reasoning_content", "") + m["content"] for m in record["messages"])
    return "\n".join(parts)


def _reserve(count: int, seed: int) -> np.ndarray:
    """A mask (count,) of the records of a source that are kept from training."""
    reserve = min(HELD_OUT, max(2, count // 10), count // 2)
    key = key_of(seed, "held out")
    kept = np.zeros(count, bool)
    kept[[shuffled(i, count, key) for i in range(reserve)]] = True
    return kept
