"""Text and conversations as sequences of one length: documents one after the other, cut anywhere.

A step's batch is a row of lanes. Lane ``i`` of ``n`` reads the documents ``i``, ``i + n``, ... of
one seeded order, and cuts them into sequences. So what a step sees depends on the batch's size,
not on how many processes share it, and where a run stands is two numbers a lane.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import open_data

from kvlingo_mlx.group import Group
from kvlingo_mlx.tokenization.samples import tokenise
from kvlingo_mlx.training.conversations import normalise
from pretraining.completep import CompleteP
from pretraining.losses import losses
from pretraining.models import Model

TOLD = 5  # documents that are passed over, each in a line
PIECE = 1 << 14  # bytes of a text file that are a document, or a few more: to the end of a line

# ---- documents ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextFiles:
    """Text files, in pieces of whole lines; ``sizes`` and ``digest`` as a source of records has."""

    paths: tuple[Path, ...]
    files: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    digest: str

    @classmethod
    def of(cls, paths: Sequence[Path]) -> TextFiles:
        """Their pieces; the files are read once, line by line."""
        digest, pieces = hashlib.sha256(), []
        for number, path in enumerate(paths):
            start = size = 0
            with path.open("rb") as file:
                for line in file:
                    digest.update(line)
                    size += len(line)
                    if size >= PIECE:
                        pieces.append((number, start, size))
                        start, size = start + size, 0
            if size:
                pieces.append((number, start, size))
        columns = np.array(pieces, np.int64).reshape(-1, 3).T
        return cls(tuple(paths), *columns, digest.hexdigest())

    def read(self, number: int) -> tuple[dict[str, str], str]:
        """Piece ``number`` as a record, with its file and first byte.

        Raises:
            ValueError: It is not UTF-8.
        """
        path, start = self.paths[self.files[number]], int(self.starts[number])
        where = f"{path}, from byte {start}"
        with path.open("rb") as file:
            file.seek(start)
            found = file.read(int(self.sizes[number]))
        try:
            return {"text": found.decode()}, where
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from None


def open_documents(spec: str) -> list[Any]:
    """The sources of a name: JSONL or text files, a folder of them, or a Hugging Face dataset.

    Raises:
        ValueError: There is nothing by that name, or nothing in it.
    """
    path = Path(spec).expanduser()
    texts = sorted(path.rglob("*.txt")) if path.is_dir() else [path][: path.suffix == ".txt"]
    if path.is_dir() and not texts and not any(path.rglob("*.jsonl")):
        raise ValueError(f"{path} holds no .jsonl and no .txt file; name a folder that does")
    if texts and not path.exists():
        raise ValueError(f"{path} does not exist; give JSONL or text files, or folders of them")
    sources: list[Any] = [TextFiles.of(texts)] if texts else []
    if not texts or (path.is_dir() and any(path.rglob("*.jsonl"))):
        sources.append(open_data(spec))
    return sources


class Documents:
    """The documents of all sources in a seeded order that never ends, a new one each epoch.

    What cannot be read is passed over: a run of weeks must not end at one bad line. The first few
    are told, all are counted. Each source must have something that can be read.
    """

    def __init__(self, specs: Sequence[str], tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.unread: set[int] = set()
        opened = [(spec, source) for spec in specs for source in open_documents(spec)]
        self.sources = [source for _, source in opened]
        self.ends = np.cumsum([len(source.sizes) for source in self.sources])
        self.count = int(self.ends[-1])
        self.digest = hashlib.sha256("".join(s.digest for s in self.sources).encode()).hexdigest()
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token; give another --tokenizer")
        for (spec, source), end in zip(opened, self.ends.tolist(), strict=True):
            if not any(len(self.tokens(n)) for n in range(end - len(source.sizes), end)):
                raise ValueError(f"{spec} holds no text to train on; give other --data")
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def tokens(self, number: int) -> list[int]:
        """Document ``number``, with the end-of-sequence token behind it.

        None of an empty one, nor of one that cannot be read.
        """
        try:
            return self._tokens(number)
        except ValueError as error:
            self._passed_over(number, error)
            return []

    def _tokens(self, number: int) -> list[int]:
        index = int(np.searchsorted(self.ends, number, side="right"))
        source = self.sources[index]
        record, where = source.read(number - int(self.ends[index]) + len(source.sizes))
        found = {} if record is None else normalise(record, where)
        if not (found.get("messages") or found.get("text")):
            return []
        sample, end = tokenise(found, self.tokenizer), self.tokenizer.eos_token_id
        ids = [*sample.prefix, *sample.continuation]
        return ids if ids[-1:] == [end] else [*ids, end]

    def _passed_over(self, number: int, error: ValueError) -> None:
        if number not in self.unread and len(self.unread) < TOLD:
            last = "; further ones are counted" if len(self.unread) == TOLD - 1 else ""
            print(f"passed over: {error}{last}", file=sys.stderr, flush=True)
        self.unread.add(number)

    def at(self, place: int) -> list[int]:
        """The document at a place of the order."""
        epoch, place = divmod(place, self.count)
        return self.tokens(int(self._order(epoch)[place]))

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.count)


class Lane:
    """One sequence of each batch; ``place`` and ``used`` say where it goes on.

    ``used`` tokens of the document at ``place`` are in sequences already.
    """

    def __init__(self, documents: Documents, index: int, lanes: int, length: int) -> None:
        self.documents, self.lanes, self.length = documents, lanes, length
        self.place, self.used = index, 0
        self._open: list[int] | None = None  # the document at ``place``

    def next(self) -> list[int]:
        """The next ``length`` tokens."""
        ids: list[int] = []
        while len(ids) < self.length:
            if self._open is None:
                self._open = self.documents.at(self.place)
            taken = self._open[self.used : self.used + self.length - len(ids)]
            ids += taken
            self.used += len(taken)
            if self.used == len(self._open):
                self.place, self.used, self._open = self.place + self.lanes, 0, None
        return ids

    def go_to(self, place: int, used: int) -> None:
        self.place, self.used, self._open = place, used, None


# ---- lessons --------------------------------------------------------------------------


class Packed:
    """What a model learns from packed text: each token, from those before it in its sequence.

    ``micro`` sequences are run at once; ``group`` are the processes that share a batch.
    """

    def __init__(
        self, model: Any, plan: Model, scaling: CompleteP, documents: Documents, group: Group,
        micro: int = 1,
    ) -> None:  # fmt: skip
        recipe = plan.recipe
        if recipe.batch < group.size:
            raise ValueError(
                f"{group.size} processes share a batch of {recipe.batch} sequences; start fewer, "
                "or give a larger --batch"
            )
        self.model, self.recipe, self.group, self.micro = model, recipe, group, micro
        self.documents = documents
        self.tokenizer, self.modules = documents.tokenizer, {"model": model}
        self.groups = scaling.groups(model, recipe)
        self.lanes = {
            index: Lane(documents, index, recipe.batch, recipe.length)
            for index in range(recipe.batch)
            if group.owns(index)
        }
        self.state: dict[str, Any] = {}

    def told(self) -> str:
        """What is shown beside the loss."""
        count = len(self.documents.unread)
        return f", {count} documents passed over" if count else ""

    def gradient(self, step: int) -> tuple[float, int]:
        """Add this process's part of the gradient; returns its part of the loss, and its tokens."""
        rows, device = [lane.next() for lane in self.lanes.values()], self.model.device
        mean = 0.0
        for start in range(0, len(rows), self.micro):
            ids = torch.tensor(rows[start : start + self.micro], device=device)
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                logits = self.model(ids, use_cache=False).logits
            ce, z = (part.mean() for part in losses(logits[:, :-1].float(), ids[:, 1:]))
            share = len(ids) / self.recipe.batch
            (share * (ce + self.recipe.z_loss * z)).backward()
            mean += share * ce.item()
        return mean, len(rows) * self.recipe.length

    def position(self) -> dict[str, Any]:
        """Where all lanes go on; each process asks for it at the same time."""
        places = np.zeros((self.recipe.batch, 2), np.int64)
        for index, lane in self.lanes.items():
            places[index] = lane.place, lane.used
        return {"places": self.group.total(places).tolist()}

    def go_to(self, position: dict[str, Any]) -> None:
        """Go on where :meth:`position` was told."""
        for index, lane in self.lanes.items():
            lane.go_to(*position["places"][index])
