"""JSONL files of scores and responses, kept as soon as they are known and never computed twice."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.geometry import digest_of

Scores = dict[str, float]
Seeds = tuple[Scores, ...]  # an item's scores for each seed of a condition
KEY_LENGTH = 16


def key_of(*parts: Any) -> str:
    """The sha256 of all that determines a response, as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Responses:
    """JSON values by key, in memory or in a JSONL file, which gets each as soon as it is known.

    A run that is killed while it writes a line loses that line only.

    Raises:
        ValueError: The file holds something else, or cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._known: dict[str, Any] = {}
        if self.path is not None:
            self._read(self.path)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, value: Any) -> None:
        """Keep a value; it is in the file when this returns."""
        self._known[key] = value
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "response": value}) + "\n")
        except OSError as error:
            raise KVLingoError(f"{self.path} cannot be written: {error.strerror}") from None

    def fill(self, wanted: Mapping[str, Callable[[], Any]]) -> Iterator[str]:
        """Make the values that are missing; yields each key, once its value is there."""
        for key, make in wanted.items():
            if key not in self:
                self.add(key, make())
            yield key

    def _read(self, path: Path) -> None:
        data = _bytes_of(path)
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                found = json.loads(line)
                self._known[found["key"]] = found["response"]
            except (ValueError, KeyError, TypeError):
                told = f"{path}, line {number}: not a line of kept responses or scores"
                raise ValueError(f"{told}; name another file") from None
        if whole < len(data):  # the next line must not join an incomplete one
            with path.open("r+b") as file:
                file.truncate(whole)


def _bytes_of(path: Path) -> bytes:
    try:
        if path.exists():
            return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if path.parent.is_dir() and os.access(path.parent, os.W_OK):
        return b""
    raise ValueError(f"{path} cannot be written; name a file in a folder that can be")


class Journal(Responses):
    """Scores of single items: by a run's key and an item's name, one dict for each seed.

    A run's key is a hash of its settings, which a line of its own describes. So one file can hold
    many runs, and a changed model or translator makes a different run.
    """

    def run(self, settings: Mapping[str, Any], *told: str) -> str:
        """The key of a run with these settings; its line has beside them what a reader is told."""
        key = digest_of(settings)[:KEY_LENGTH]
        if key not in self:
            super().add(key, {"told": told, "settings": settings})
        return key


def averaged(seeds: Any) -> Scores:
    """The mean of each score over seeds (appendix "Seeds and error bars")."""
    return {name: float(np.mean([scores[name] for scores in seeds])) for name in seeds[0]}
