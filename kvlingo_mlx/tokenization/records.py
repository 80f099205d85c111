"""Sources of training records: JSONL files, folders of them, Hugging Face datasets.

A source returns one record at a time by its number, and keeps only its index in memory.
``conversations`` interprets the records.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import needs_extra
from kvlingo_mlx.phases import phase

Spec = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]

CHUNK = 1 << 24  # bytes read at once while lines are counted
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, eq=False)
class JsonLines:
    """The lines of one or more JSONL files; only their offsets are kept in memory.

    ``starts``, ``sizes`` (bytes), ``lines`` (numbered from 1) and ``files`` (indices into
    ``paths``) have one entry per record. ``digest``, the sha256 of all records, detects changed
    data under the same ``name``, which is the user's.
    """

    name: str
    paths: tuple[Path, ...]
    starts: np.ndarray
    sizes: np.ndarray
    lines: np.ndarray
    files: np.ndarray
    digest: str

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, number: int) -> tuple[Any, str]:
        """Record ``number`` as parsed (None for a blank line), with its file and line.

        Raises:
            ValueError: The line is not JSON; the message names file and line.
        """
        path = self.paths[self.files[number]]
        where = f"{path}, line {self.lines[number]}"
        # Opened each time: forked workers would share the position of a shared handle.
        with path.open("rb") as file:
            file.seek(int(self.starts[number]))
            line = file.read(int(self.sizes[number]))
        if not line.strip():
            return None, where
        try:
            return json.loads(line), where
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error})") from None


@dataclass(frozen=True, eq=False)
class HubDataset:
    """The splits of a Hugging Face dataset in a row; ``ends`` are their cumulative row counts.

    ``name``, ``sizes`` and ``digest`` are as in :class:`JsonLines`.
    """

    name: str
    labels: tuple[str, ...]
    splits: tuple[Any, ...]
    ends: np.ndarray
    sizes: np.ndarray
    digest: str

    def read(self, number: int) -> tuple[Any, str]:
        """Record ``number`` as a dict, with its split and row."""
        split = int(np.searchsorted(self.ends, number, side="right"))
        row = number - (int(self.ends[split - 1]) if split else 0)
        return self.splits[split][row], f"{self.labels[split]}, record {row + 1}"


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
            "dataset as owner/name, owner/name:split or owner/name:config:split"
        )
    return _hub_dataset(name), weight


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


def open_lines(path: Path) -> JsonLines:
    """A JSONL file.

    Raises:
        ValueError: It cannot be read, or is empty.
    """
    return _json_lines(str(path), [path])


def _json_lines(name: str, paths: Sequence[Path]) -> JsonLines:
    digest = hashlib.sha256()
    parts = [_index(path, digest) for path in paths]
    starts, sizes, lines = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    files = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    if not len(starts):
        raise ValueError(
            f'{name} holds no records; each line should be {{"messages": [...]}} or {{"text": ...}}'
        )
    return JsonLines(name, tuple(paths), starts, sizes, lines, files, digest.hexdigest())


def _index(path: Path, digest: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The start, the bytes and the number of each line that can hold a record.

    ``digest``, a hash object of hashlib, is updated with the file's content.
    """
    breaks, length = [np.array([-1], np.int64)], 0
    shown = phase(f"finding the records of {path.name}")
    try:
        with path.open("rb") as file, shown:
            while chunk := file.read(CHUNK):
                breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + length)
                length += len(chunk)
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    edges = np.concatenate([*breaks, np.array([length])])
    starts, sizes = edges[:-1] + 1, np.diff(edges) - 1
    kept = sizes > 1  # the shortest record is {}; an empty line may hold a carriage return
    return starts[kept], sizes[kept], np.flatnonzero(kept) + 1


def _hub_dataset(name: str) -> HubDataset:
    what = f"{name} is no file here, and reading Hugging Face datasets needs the datasets package"
    with needs_extra("cuda", what):
        datasets = importlib.import_module("datasets")
    dataset_id, *rest = name.split(":")
    if len(rest) > 2:
        raise ValueError(
            f"{name}: expected owner/name, owner/name:split or owner/name:config:split"
        )
    config, split = rest[0] if len(rest) == 2 else None, rest[-1] if rest else None
    try:
        loaded = datasets.load_dataset(dataset_id, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"the Hugging Face dataset {name} cannot be loaded: {error}") from None
    parts = {f"{name}:{key}": part for key, part in loaded.items()} if split is None else {}
    parts = parts or {name: loaded}
    # One pass over all rows: their sizes show which of them can hold a long prefix.
    sizes, digest = [], hashlib.sha256()
    for row in (row for part in parts.values() for row in part):
        text = json.dumps(row, default=str).encode()
        sizes.append(len(text))
        digest.update(text)
    if not sizes:
        raise ValueError(f"the Hugging Face dataset {name} holds no records")
    ends = np.cumsum([len(part) for part in parts.values()])
    return HubDataset(
        name, tuple(parts), tuple(parts.values()), ends, np.array(sizes), digest.hexdigest()
    )
