"""The training records on their shelves: which ones train, how large they are, their walks.

Reading stops here: above this room there are conversations and texts, and numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.samples import encode_plain
from kvlingo_mlx.training.conversations import Message, normalise, replies
from kvlingo_mlx.training.mixture import key_of, shuffled
from kvlingo_mlx.training.records import Source, Spec, open_source

Place = tuple[int, int]  # a source and a record of it, both numbered from 0

HELD_OUT = 2048  # records of a source kept from training, of few records a tenth
MEASURED = 32  # records that tell how many characters a token has
MEASURED_CHARACTERS = 4096  # of each
HEADER = 16  # about how many characters' worth of tokens a turn's boilerplate takes


@dataclass(frozen=True, eq=False)
class Shelf:
    """Records of one source, the largest first.

    Attributes:
        source: The number of the source.
        records: Their numbers in it.
        sizes: Their sizes in bytes.
        share: The source's share of the samples.
    """

    source: int
    records: np.ndarray
    sizes: np.ndarray
    share: float

    def at(self, position: int, key: int, among: int | None = None) -> Place:
        """The record at ``position`` of an endless walk, which meets each once an epoch.

        ``among`` keeps the walk to that many of the largest records.
        """
        count = among or len(self.records)
        epoch, step = divmod(position, count)
        return self.source, int(self.records[shuffled(step, count, key_of(key, epoch))])

    def at_least(self, size: float, count: int) -> int:
        """How many records have ``size`` bytes or more, or ``count`` of them if fewer have."""
        larger = int(np.searchsorted(-self.sizes, -size, side="right"))
        return max(larger, min(count, len(self.records)))


@dataclass(frozen=True)
class Side:
    """Training's records or the reserved ones, and what of them must not occur.

    ``excluded`` are opening questions, ``taken`` records.
    """

    shelves: tuple[Shelf, ...]
    excluded: frozenset[str]
    taken: frozenset[Place] = frozenset()

    def pick(self, rng: random.Random) -> Shelf:
        """A shelf, drawn by the sources' weights."""
        return rng.choices(self.shelves, [shelf.share for shelf in self.shelves])[0]


@dataclass(frozen=True)
class Talk:
    """A conversation and the reply in it that would be a sample's continuation."""

    place: Place
    messages: list[Message]
    turn: int

    @property
    def reasoning(self) -> bool:
        """Whether that reply has a reasoning trace."""
        return bool(self.messages[self.turn].get("reasoning_content"))

    @property
    def opening(self) -> str:
        """The first question, by which a conversation is known again."""
        return opening(self.messages)

    @property
    def before(self) -> int:
        """About how many characters stand before the reply, boilerplate included."""
        return _length(self.messages[: self.turn])

    @property
    def whole(self) -> int:
        """About how many characters the conversation has up to its last reply."""
        return _length(self.messages[: replies(self.messages)[-1] + 1])


class Library:
    """All records, apart for training and for validation.

    Attributes:
        sources: The opened sources, in the order given.
        training: The records that train.
        reserved: Those that do not, chosen by the seed and their number.
        skipped: Records met so far without a usable assistant turn (or without text).
        scales: For each source the characters a token has, and the bytes.
    """

    def __init__(self, specs: Sequence[Spec], tokenizer: Any, texts: bool, seed: int) -> None:
        if not specs:
            raise ValueError("no training data; name a JSONL file, a folder or a dataset")
        opened = [open_source(spec) for spec in specs]
        self.sources: tuple[Source, ...] = tuple(source for source, _ in opened)
        self.skipped: set[Place] = set()
        self._kind = "text" if texts else "messages"
        for number in range(len(self.sources)):
            self._check(number)
        total = sum(weight for _, weight in opened)
        shares = [weight / total for _, weight in opened]
        parts = [_part(n, s.sizes, shares[n], seed) for n, s in enumerate(self.sources)]
        kept = tuple(shelf for _, shelf in parts if len(shelf.records))
        self.reserved = Side(kept, frozenset())
        self.training = Side(tuple(s for s, _ in parts), self._openings(kept))
        self.scales = {shelf.source: self._scale(shelf, tokenizer) for shelf, _ in parts}

    @property
    def names(self) -> str:
        """What the sources are called, for messages."""
        return ", ".join(source.name for source in self.sources)

    @property
    def contents(self) -> dict[str, str]:
        """Size and hash of each source by its name, for telling other data from the same."""
        return {
            s.name: f"{len(s.sizes)} records of {s.sizes.sum()} bytes, sha256 {s.digest}"
            for s in self.sources
        }

    def read(self, place: Place) -> dict[str, Any] | None:
        """A normalised record, or None if it is of no use.

        Raises:
            ValueError: It is malformed; the message names its file and line.
        """
        record, where = self.sources[place[0]].read(place[1])
        found = {} if record is None else normalise(record, where)
        if found.get(self._kind):
            return found
        self.skipped.add(place)
        return None

    def talk(self, place: Place, side: Side, rng: random.Random | None = None) -> Talk | None:
        """A conversation with a reply drawn at random, or its last one without ``rng``."""
        record = None if place in side.taken else self.read(place)
        if record is None or opening(record["messages"]) in side.excluded:
            return None
        turns = replies(record["messages"])
        return Talk(place, record["messages"], rng.choice(turns) if rng else turns[-1])

    def _check(self, number: int) -> None:
        source = self.sources[number]
        count = len(source.sizes)
        if any(self.read((number, record)) for record in range(count)):
            return
        if self._kind == "text":
            raise ValueError(
                f'no text in {source.name}: none of {count} records is {{"text": ...}}'
            )
        raise ValueError(
            f"no assistant turn in {source.name}: none of {count} records has a question and its "
            'answer; give {"messages": [...]} records, or --plain-text for texts and base models'
        )

    def _openings(self, kept: Iterable[Shelf]) -> frozenset[str]:
        """Questions that open a reserved record: Nemotron has many twice, with and without
        reasoning. One that opens several of the few reserved is a greeting or an instruction.
        """
        places = ((shelf.source, int(record)) for shelf in kept for record in shelf.records)
        found = (self.read(place) or {} for place in places)
        counts = Counter(opening(record["messages"]) for record in found if "messages" in record)
        return frozenset(question for question, count in counts.items() if count == 1)

    def _scale(self, shelf: Shelf, tokenizer: Any) -> tuple[float, float]:
        """Characters a token and bytes a token, from records spread over all sizes."""
        step = max(1, len(shelf.records) // MEASURED)
        characters, tokens, inflation = 1, 1, []
        for record, size in zip(shelf.records[::step], shelf.sizes[::step], strict=True):
            found = self.read((shelf.source, int(record)))
            text = _text(found) if found else ""
            part = text[:MEASURED_CHARACTERS]
            inflation += [int(size) / len(text)] if text else []
            characters += len(part)
            tokens += len(encode_plain(tokenizer, part))
        per_token = characters / tokens
        return per_token, per_token * float(np.median(inflation or [1.0]))


def fill(talks: list[Talk], used: int, target: float, most: float) -> list[Talk]:
    """Conversations in their order until ``target`` characters are met, none beyond ``most``."""
    chosen = []
    for talk in talks:
        if used >= target:
            break
        if used + talk.whole <= most:
            chosen.append(talk)
            used += talk.whole
    return chosen


def opening(messages: Sequence[Message]) -> str:
    """The first user turn of a conversation."""
    return next(message["content"] for message in messages if message["role"] == "user")


def _text(record: dict[str, Any]) -> str:
    if "text" in record:
        return record["text"]
    parts = (m.get("reasoning_content", "") + m["content"] for m in record["messages"])
    return "\n".join(parts)


def _length(messages: Iterable[Message]) -> int:
    return sum(len(message["content"]) + HEADER for message in messages)


def _part(number: int, sizes: np.ndarray, share: float, seed: int) -> tuple[Shelf, Shelf]:
    """A source's records that train, and those that are reserved."""
    count = len(sizes)
    reserve = min(HELD_OUT, max(2, count // 10), count // 2)
    key = key_of(seed, "held out")
    kept = np.zeros(count, bool)
    kept[[shuffled(i, count, key) for i in range(reserve)]] = True
    order = np.argsort(-sizes, kind="stable")
    training, held_out = order[~kept[order]], order[kept[order]]
    return (
        Shelf(number, training, sizes[training], share),
        Shelf(number, held_out, sizes[held_out], share),
    )
