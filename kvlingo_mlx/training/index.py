"""The index of all training records: each is read once, when a stream is opened.

So malformed records are found before training starts, and all later choices rest on known lengths.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvlingo_mlx.phases import counted
from kvlingo_mlx.tokenization.records import Skipped, Source, Spec, open_source
from kvlingo_mlx.tokenization.samples import encode_plain
from kvlingo_mlx.training.conversations import normalise, replies

Place = tuple[int, int]  # a source and one of its records, both numbered from 0
# A reply, or a plain text. The last reply of a record stands for the record.
REPLY = np.dtype([
    ("source", int),  # its number
    ("record", int),  # its number in the source
    ("reply", int),  # its number in the conversation
    ("last", bool),  # whether it is the last one there
    ("traced", bool),  # whether it has a reasoning trace
    ("before", float),  # tokens before it, or of a whole text
    ("tokens", float),  # of its record, up to the end of the last reply
    ("opening", int),  # a hash of its record's first question, which identifies duplicates
])  # fmt: skip
HELD_OUT = 2048  # most records of a source kept from training; a small source keeps a tenth
COUNTED = 8_000_000  # bytes of a source up to which tokens are counted, not estimated
MEASURED, MEASURED_CHARACTERS = 32, 4096  # records, and characters of each, that tell the ratio


class RecordIndex:
    """All replies of the sources' records, those to train on apart from those held out."""

    sources: tuple[Source, ...]
    names: str  # theirs, for messages
    shares: np.ndarray  # each source's share of the samples; they add up to 1
    training: np.ndarray  # of REPLY
    reserved: np.ndarray  # of REPLY; chosen by the seed and the records' numbers
    malformed: Skipped  # records that cannot be read
    skipped: int  # these, those without a usable assistant turn (or text), and those refused

    def __init__(
        self,
        specs: Sequence[Spec],
        tokenizers: Sequence[Any],
        template: tuple[float, float] | None,
        seed: int,
        accepts: Any = None,
    ) -> None:
        """Read all records of sources (see ``records.open_source``).

        ``tokenizers`` are the target's, and the source's where it differs. ``template`` is the
        result of ``conversations.boilerplate``; None for plain texts. ``accepts`` refuses some of
        the records (the laboratory's ``RecordFilter``).
        """
        if not specs:
            raise ValueError("no training data; name a JSONL file, a folder or a dataset")
        self.sources, weights = zip(*map(open_source, specs), strict=True)
        self.names = ", ".join(source.name for source in self.sources)
        self.shares = np.array(weights) / sum(weights)
        self.skipped, self.malformed, self._filter = 0, Skipped(), accepts
        self._tokenizers, self._template = tokenizers, template
        found = [self._replies(number, seed) for number in range(len(self.sources))]
        self._separate(np.concatenate(found), seed)

    @property
    def contents(self) -> dict[str, str]:
        """Size and hash of each source by its name, to detect changed data."""
        return {
            s.name: f"{len(s.sizes)} records of {s.sizes.sum()} bytes, sha256 {s.digest}"
            for s in self.sources
        }

    def read(self, place: Place) -> dict[str, Any] | None:
        """A normalised record; None for one that is malformed, not usable, or refused."""
        record, found = None, dict[str, Any]()
        with self.malformed.those_of(ValueError):
            record, where = self.sources[place[0]].read(place[1])
            found = {} if record is None else normalise(record, where)
        usable = found.get("text" if self._template is None else "messages")
        said = record if isinstance(record, dict) else {}
        refused = usable and self._filter and not self._filter.accepts(said, found)
        return found if usable and not refused else None

    def _replies(self, number: int, seed: int) -> np.ndarray:
        """A row of :data:`REPLY` for each reply of a source.

        Raises:
            ValueError: There is none.
        """
        source, rows = self.sources[number], list[tuple[Any, ...]]()
        exact = source.sizes.sum() <= COUNTED
        tokens = self._count if exact else self._estimate(number, seed)
        for record in counted(f"reading the records of {source.name}", range(len(source.sizes))):
            if found := self.read((number, record)):
                rows += ((number, record, *row) for row in self._measured(found, tokens))
            else:
                self.skipped += 1
        if not rows:
            raise self._useless(source)
        return np.array(rows, REPLY)

    def _measured(
        self, record: dict[str, Any], tokens: Callable[[str], float]
    ) -> Iterator[tuple[Any, ...]]:
        """The rows of a record, from ``reply`` on."""
        if self._template is None:
            size = tokens(record["text"])
            yield 0, True, False, size, size, 0
            return
        (base, header), messages = self._template, record["messages"]
        turns = replies(messages)
        ends = np.cumsum([0.0, *(tokens(message["content"]) + header for message in messages)])
        first = next(message["content"] for message in messages if message["role"] == "user")
        opening = int.from_bytes(hashlib.blake2b(first.encode(), digest_size=7).digest(), "big")
        for reply, turn in enumerate(turns):
            traced = bool(messages[turn].get("reasoning_content"))
            whole = ends[turns[-1] + 1]
            yield reply, turn == turns[-1], traced, base + ends[turn], whole, opening

    def _count(self, text: str) -> float:
        """The tokens of a text, by the tokenizer that needs more of them."""
        return max(len(encode_plain(tokenizer, text)) for tokenizer in self._tokenizers)

    def _estimate(self, number: int, seed: int) -> Callable[[str], float]:
        """The tokens of a text by its bytes, as records all over a source have them."""
        size, tokens, met = 1, 1.0, 0
        malformed, self.malformed = self.malformed, Skipped()
        count = len(self.sources[number].sizes)
        for record in np.random.default_rng((seed, number)).permutation(count).tolist():
            if (found := self.read((number, record))) is None:
                continue
            parts = (m.get("reasoning_content", "") + m["content"]
                     for m in found.get("messages", ()))  # fmt: skip
            text = (found.get("text") or "\n".join(parts))[:MEASURED_CHARACTERS]
            size, tokens, met = size + len(text.encode()), tokens + self._count(text), met + 1
            if met == MEASURED:
                break
        if self._filter:
            self._filter.left_out.clear()  # counted when all records are read
        self.malformed = malformed
        return lambda text: len(text.encode()) * tokens / size

    def _separate(self, every: np.ndarray, seed: int) -> None:
        """Hold records out of training, and all that open with the question of one of them.

        Nemotron has many conversations twice, with and without reasoning. A question that opens
        several of the few reserved records is a greeting, and identifies none.
        """
        kept = np.zeros(len(every), bool)
        for number, source in enumerate(self.sources):
            count = len(source.sizes)
            most = min(HELD_OUT, max(2, count // 10), count // 2)
            drawn = np.random.default_rng((seed, number, 1)).permutation(count)[:most]
            kept |= (every["source"] == number) & np.isin(every["record"], drawn)
        self.reserved = every[kept]
        if self._template is not None:
            openings = self.reserved["opening"][self.reserved["last"]]
            known, counts = np.unique(openings, return_counts=True)
            kept |= np.isin(every["opening"], known[counts == 1])
        self.training = every[~kept]

    def _useless(self, source: Source) -> ValueError:
        name, count = source.name, len(source.sizes)
        if self.malformed.count == count:
            return ValueError(f"no record of {name} can be used; {self.malformed}")
        if self._filter and self._filter.left_out.total():
            return ValueError(f"no record of {name} is left: {self._filter}, of {count}")
        if self._template is None:
            return ValueError(f'no text in {name}: none of {count} records is {{"text": ...}}')
        return ValueError(
            f"no assistant turn in {name}: none of {count} records has a question and its "
            'answer; give {"messages": [...]} records, or texts to kvlingo-mlx train --plain-text'
        )
