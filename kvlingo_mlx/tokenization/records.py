"""Sources of training records: JSONL files, folders of them, Hugging Face datasets.

A source returns one record at a time by its number, and keeps only its index in memory.
``conversations`` interprets the records.
"""

import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import needs_extra, printable
from kvlingo_mlx.phases import phase
from kvlingo_mlx.tokenization.chat_messages import repaired

NAMED = 3  # records of which it is told why they are left out
Spec = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]

CHUNK = 1 << 24  # bytes read at once while lines are counted
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FORMS = "owner/name, owner/name:split or owner/name:config:split"


@dataclass
class Skipped:
    """Records that are left out: how many, and why the first of them."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.count)

    def __str__(self) -> str:
        more = [f"and {self.count - NAMED:,} more"] if self.count > NAMED else []
        records = "record is" if self.count == 1 else "records are"
        return f"{self.count:,} {records} skipped: {'; '.join([*self.reasons, *more])}"

    @contextmanager
    def those_of(self, kind: type[Exception]) -> Iterator[None]:
        """Count a record whose reading raises an error of this kind, and go on."""
        try:
            yield
        except kind as error:
            self.count += 1
            self.reasons += [printable(str(error))][: NAMED - len(self.reasons)]


@dataclass(frozen=True, eq=False)
class JsonLines:
    """The lines of one or more JSONL files; only their offsets are kept in memory."""

    name: str  # the user's
    paths: tuple[Path, ...]
    lines: np.ndarray  # (N, 3) each record's file (an index of ``paths``), line from 1, and start
    sizes: np.ndarray  # (N,) bytes
    digest: str  # the sha256 of all records, which detects changed data

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, number: int) -> tuple[Any, str]:
        """Record ``number`` as parsed (None for a blank line), with its file and line.

        Raises:
            ValueError: The line is not JSON; the message names file and line.
        """
        file_number, line_number, start = self.lines[number].tolist()
        path = self.paths[file_number]
        where = f"{path}, line {line_number}"
        # Opened each time: forked workers would share the position of a shared handle.
        with path.open("rb") as file:
            file.seek(start)
            line = file.read(int(self.sizes[number]))
        if not line.strip():
            return None, where
        try:
            return json.loads(repaired(line.decode(json.detect_encoding(line), "replace"))), where
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error})") from None


@dataclass(frozen=True, eq=False)
class HubDataset:
    """The splits of a Hugging Face dataset in a row; the rest is as in :class:`JsonLines`."""

    name: str
    splits: dict[str, Any]  # by the label that messages show
    sizes: np.ndarray
    digest: str

    def read(self, number: int) -> tuple[Any, str]:
        """Record ``number`` as a dict, with its split and row."""
        for label, rows in self.splits.items():
            if number < len(rows):
                return rows[number], f"{label}, record {number + 1}"
            number -= len(rows)
        raise IndexError(number)


Source = JsonLines | HubDataset


def open_source(spec: Spec) -> tuple[Source, float]:
    """Open ``NAME``, ``NAME@WEIGHT`` or (name, weight); returns the source and its weight.

    A name is a JSONL file, a folder of them, or a Hugging Face dataset: ``owner/name`` (all its
    splits), ``owner/name:split`` or ``owner/name:config:split``.

    Raises:
        ValueError: There is no such file or dataset, it has no records, or the weight is not
            positive.
        MissingExtraError: The source is a Hugging Face dataset, and ``datasets`` is not installed.
    """
    name, weight = _weighted(spec)
    path = Path(name).expanduser()
    if path.is_dir():
        paths = sorted(path.rglob("*.jsonl"))
        if not paths:
            raise ValueError(f"{path} holds no .jsonl file; name a folder of JSONL files")
        return _json_lines(name, paths), weight
    if path.exists():
        return _json_lines(name, [path]), weight
    if name.endswith((".json", ".jsonl")) or not HUB_ID.fullmatch(name.split(":")[0]):
        raise ValueError(
            f"{name} does not exist; give a JSONL file, a folder of them, or a Hugging Face "
            f"dataset as {FORMS}"
        )
    return _hub_dataset(name), weight


def open_lines(path: Path) -> JsonLines:
    """A JSONL file.

    Raises:
        ValueError: It cannot be read, or is empty.
    """
    return _json_lines(str(path), [path])


def _weighted(spec: Spec) -> tuple[str, float]:
    if isinstance(spec, tuple):
        name, weight = os.fspath(spec[0]), spec[1]
    else:
        name, at, number = os.fspath(spec).rpartition("@")
        try:
            weight = float(number) if at else 1.0
        except ValueError:
            at, weight = "", 1.0  # the sign is part of a file's name
        name = name if at else os.fspath(spec)
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"{name}: weight {weight}, expected a positive number, as in NAME@0.5")
    return name, weight


def _json_lines(name: str, paths: Sequence[Path]) -> JsonLines:
    digest = hashlib.sha256()
    indices = [_index(path, number, digest) for number, path in enumerate(paths)]
    lines, sizes = (np.concatenate(columns) for columns in zip(*indices, strict=True))
    if not len(lines):
        raise ValueError(
            f'{name} holds no records; each line should be {{"messages": [...]}} or {{"text": ...}}'
        )
    return JsonLines(name, tuple(paths), lines, sizes, digest.hexdigest())


def _index(path: Path, number: int, digest: Any) -> tuple[np.ndarray, np.ndarray]:
    """The places (N, 3) and the bytes of the lines that can hold a record; updates ``digest``."""
    breaks, length = [np.array([-1], np.int64)], 0
    try:
        with path.open("rb") as file, phase(f"finding the records of {path.name}"):
            while chunk := file.read(CHUNK):
                breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + length)
                length += len(chunk)
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    edges = np.concatenate([*breaks, np.array([length])])
    starts, sizes = edges[:-1] + 1, np.diff(edges) - 1
    kept = np.flatnonzero(sizes > 1)  # the shortest record is {}; an empty line may hold a CR
    return np.stack([np.full_like(kept, number), kept + 1, starts[kept]], axis=1), sizes[kept]


def _hub_dataset(name: str) -> HubDataset:
    what = f"{name} is no file here, and reading Hugging Face datasets needs the datasets package"
    with needs_extra("cuda", what):
        datasets = importlib.import_module("datasets")
    dataset_id, *rest = name.split(":")
    if len(rest) > 2:
        raise ValueError(f"{name}: expected {FORMS}")
    config, split = rest[0] if len(rest) == 2 else None, rest[-1] if rest else None
    try:
        loaded = datasets.load_dataset(dataset_id, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"the Hugging Face dataset {name} cannot be loaded: {error}") from None
    splits = {f"{name}:{key}": part for key, part in loaded.items()} if split is None else {}
    splits = splits or {name: loaded}
    # One pass over all rows: their sizes show which of them can hold a long prefix.
    sizes, digest = [], hashlib.sha256()
    for row in (row for part in splits.values() for row in part):
        text = json.dumps(row, default=str).encode()
        sizes.append(len(text))
        digest.update(text)
    if not sizes:
        raise ValueError(f"the Hugging Face dataset {name} holds no records")
    return HubDataset(name, splits, np.array(sizes), digest.hexdigest())
