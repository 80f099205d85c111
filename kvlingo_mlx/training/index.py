"""The index of all training records: each is read once, when a stream is opened.

So malformed records are found before training starts, and all later choices rest on known lengths.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.phases import counted
from kvlingo_mlx.tokenization.records import Source, Spec, open_source
from kvlingo_mlx.tokenization.samples import encode_plain
from kvlingo_mlx.training.conversations import normalise, replies
from kvlingo_mlx.training.record_filter import RecordFilter

Place = tuple[int, int]  # a source and one of its records, both numbered from 0

HELD_OUT = 2048  # most records of a source kept from training; a small source keeps a tenth
COUNTED = 8_000_000  # bytes of a source up to which tokens are counted, not estimated
MEASURED, MEASURED_CHARACTERS = 32, 4096  # records, and characters of each, that tell the ratio


@dataclass(frozen=True, eq=False)
class Table:
    """Usable records, a row each, and their replies; a plain text counts as one reply."""

    source: np.ndarray  # (M,) the number of the source
    record: np.ndarray  # (M,) the record's number in it
    tokens: np.ndarray  # (M,) up to the end of the last reply, or of the text
    opening: np.ndarray  # (M,) a hash of the first question, which identifies duplicates
    starts: np.ndarray  # (M + 1,) where the replies of each begin below
    before: np.ndarray  # (R,) tokens before a reply, or of a whole text
    traced: np.ndarray  # (R,) whether a reply has a reasoning trace

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]]) -> Table:
        """The table of rows as :meth:`RecordIndex._rows` makes them."""
        source, record, tokens, opening, before, traced = zip(*rows, strict=True)
        starts = np.cumsum([0, *map(len, before)])
        replies = np.concatenate(before).astype(float), np.concatenate(traced).astype(bool)
        columns = (np.array(each) for each in (source, record, tokens, opening))
        return cls(*columns, starts, *replies)  # type: ignore[call-arg]

    def __len__(self) -> int:
        return len(self.record)

    @property
    def last(self) -> np.ndarray:
        """The last reply of each record (M,)."""
        return self.starts[1:] - 1

    def place(self, row: int) -> Place:
        return int(self.source[row]), int(self.record[row])

    def chosen(self, kept: np.ndarray) -> Table:
        """The rows of a mask (M,)."""
        counts = np.diff(self.starts)
        starts, of = np.cumsum([0, *counts[kept].tolist()]), np.repeat(kept, counts)
        own = (a[kept] for a in (self.source, self.record, self.tokens, self.opening))
        return Table(*own, starts, self.before[of], self.traced[of])  # type: ignore[call-arg]


class RecordIndex:
    """All records of the sources, those to train on apart from those that are held out."""

    sources: tuple[Source, ...]
    shares: np.ndarray  # each source's share of the samples; they add up to 1
    training: Table
    reserved: Table  # chosen by the seed and the records' numbers
    skipped: int  # records without a usable assistant turn (or text), or that the filter refuses
    per_token: list[tuple[float, float]]  # characters and bytes per token of each source

    def __init__(
        self,
        specs: Sequence[Spec],
        tokenizers: Sequence[Any],
        template: tuple[float, float] | None,
        seed: int,
        accepts: RecordFilter,
    ) -> None:
        """Read all records.

        Args:
            specs: The sources, as for ``records.open_source``.
            tokenizers: The target's tokenizer, and the source's where it differs.
            template: The result of ``conversations.boilerplate``; None for plain texts.
            seed: Chooses the reserved records.
            accepts: Refuses some of the records.
        """
        if not specs:
            raise ValueError("no training data; name a JSONL file, a folder or a dataset")
        self.sources, weights = zip(*map(open_source, specs), strict=True)
        self.shares = np.array(weights) / sum(weights)
        self.names = ", ".join(source.name for source in self.sources)  # for messages
        self.skipped, self._filter = 0, accepts
        self._tokenizers, self._template = tokenizers, template
        self.per_token, rows = [], []
        for number in range(len(self.sources)):
            self.per_token.append(self._ratios(number, seed))
            rows += self._rows(number)
        self._separate(Table.of(rows), seed)

    @property
    def contents(self) -> dict[str, str]:
        """Size and hash of each source by its name, to detect changed data."""
        return {
            s.name: f"{len(s.sizes)} records of {s.sizes.sum()} bytes, sha256 {s.digest}"
            for s in self.sources
        }

    def read(self, place: Place) -> dict[str, Any] | None:
        """A normalised record; None for one that is not usable, or refused.

        Raises:
            ValueError: The record is malformed; the message names its file and line.
        """
        record, where = self.sources[place[0]].read(place[1])
        found = {} if record is None else normalise(record, where)
        usable = found.get("text" if self._template is None else "messages")
        return found if usable and self._filter.accepts(record, found) else None

    def _rows(self, number: int) -> list[tuple[Any, ...]]:
        """A row of the table for each usable record of a source.

        Raises:
            ValueError: There is none.
        """
        source, (_, per_token) = self.sources[number], self.per_token[number]
        exact, rows = source.sizes.sum() <= COUNTED, []
        tokens = self._count if exact else lambda text: len(text.encode()) / per_token
        for record in counted(f"reading the records of {source.name}", range(len(source.sizes))):
            if found := self.read((number, record)):
                rows.append((number, record, *self._measured(found, tokens)))
        self.skipped += len(source.sizes) - len(rows)
        if not rows:
            raise self._useless(source)
        return rows

    def _measured(self, record: dict[str, Any], tokens: Callable[[str], float]) -> tuple[Any, ...]:
        """A record's tokens, opening, and for each reply the tokens before it and its trace."""
        if self._template is None:
            size = tokens(record["text"])
            return float(size), 0, [size], [False]
        (base, header), messages = self._template, record["messages"]
        turns = replies(messages)
        ends = np.cumsum([0.0, *(tokens(message["content"]) + header for message in messages)])
        first = next(message["content"] for message in messages if message["role"] == "user")
        opening = int.from_bytes(hashlib.blake2b(first.encode(), digest_size=7).digest(), "big")
        traced = [bool(messages[turn].get("reasoning_content")) for turn in turns]
        return ends[turns[-1] + 1], opening, (base + ends[turns]).tolist(), traced

    def _count(self, text: str) -> float:
        """The tokens of a text, by the tokenizer that needs more of them."""
        return max(len(encode_plain(tokenizer, text)) for tokenizer in self._tokenizers)

    def _ratios(self, number: int, seed: int) -> tuple[float, float]:
        """A source's characters and bytes per token, from records all over it."""
        characters, size, tokens, met = 1, 1, 1.0, 0
        count = len(self.sources[number].sizes)
        for record in np.random.default_rng((seed, number)).permutation(count).tolist():
            if (found := self.read((number, record))) is None:
                continue
            parts = (m.get("reasoning_content", "") + m["content"]
                     for m in found.get("messages", ()))  # fmt: skip
            text = (found.get("text") or "\n".join(parts))[:MEASURED_CHARACTERS]
            characters, size = characters + len(text), size + len(text.encode())
            tokens, met = tokens + self._count(text), met + 1
            if met == MEASURED:
                break
        self._filter.left_out.clear()  # counted when all records are read
        return characters / tokens, size / tokens

    def _separate(self, table: Table, seed: int) -> None:
        """Hold records out of training, and all that open with the question of one of them.

        Nemotron has many conversations twice, with and without reasoning. A question that opens
        several of the few reserved records is a greeting, and identifies none.
        """
        kept = np.zeros(len(table), bool)
        for number, source in enumerate(self.sources):
            count = len(source.sizes)
            most = min(HELD_OUT, max(2, count // 10), count // 2)
            rng = np.random.default_rng((seed, number, 1))
            kept |= (table.source == number) & np.isin(table.record, rng.permutation(count)[:most])
        self.reserved = table.chosen(kept)
        if self._template is not None:
            counts = Counter(self.reserved.opening.tolist())
            known = [opening for opening, count in counts.items() if count == 1]
            kept |= np.isin(table.opening, known)
        self.training = table.chosen(~kept)

    def _useless(self, source: Source) -> ValueError:
        name, count = source.name, len(source.sizes)
        if self._filter.left_out.total():
            text = f"no record of {name} is left: {self._filter}, of {count}; give other data, or "
            return ValueError(f"{text}leave out english or apart_from")
        if self._template is None:
            return ValueError(f'no text in {name}: none of {count} records is {{"text": ...}}')
        return ValueError(
            f"no assistant turn in {name}: none of {count} records has a question and its "
            'answer; give {"messages": [...]} records, or texts to kvlingo-mlx train --plain-text'
        )
