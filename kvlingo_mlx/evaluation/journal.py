"""Scores of single items, kept as they are made: what is in the journal is not computed again.

A JSON line says what a run is made of and gives it a key, the hash of that; the lines after it
hold one item's scores each under that key. So one file can hold many runs, an interrupted run
goes on where it stopped, and a model or a translator that has changed is another run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.geometry import canonical_json

Scores = dict[str, float]
KEY_LENGTH = 16


class Journal:
    """A file of items' scores, or memory alone where ``path`` is None.

    Raises:
        ValueError: The file is not such a journal, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.scores: dict[tuple[str, str], Scores] = {}
        self.known: set[str] = set()
        if self.path is not None:
            self._read(self.path)

    def run(self, settings: Mapping[str, Any]) -> str:
        """The key of a run with these settings."""
        key = hashlib.sha256(canonical_json(settings).encode()).hexdigest()[:KEY_LENGTH]
        if key not in self.known:
            self._write({"run": key, "settings": settings})
            self.known.add(key)
        return key

    def find(self, key: str, item: str) -> Scores | None:
        """An item's scores, if that run has it."""
        return self.scores.get((key, item))

    def keep(self, key: str, item: str, scores: Scores) -> None:
        """Add an item's scores, on disk before this returns."""
        self._write({"run": key, "item": item, "scores": scores})
        self.scores[key, item] = scores

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise KVLingoError(f"{self.path} cannot be written: {error.strerror}") from None

    def _read(self, path: Path) -> None:
        if not path.exists():
            if not os.access(path.parent, os.W_OK) or not path.parent.is_dir():
                raise ValueError(f"{path} cannot be written; name a file in a folder that can be")
            return
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read ({error})") from None
        whole, _, cut = text.rpartition("\n")
        for number, line in enumerate(whole.split("\n") if whole else [], 1):
            self._take(line, f"{path}, line {number}")
        if cut:  # a run was killed as it wrote; the next line must not join what it left
            with path.open("r+", encoding="utf-8") as file:
                file.truncate(len(text.encode()) - len(cut.encode()))

    def _take(self, line: str, where: str) -> None:
        try:
            entry = json.loads(line)
            key = entry["run"]
            if "settings" in entry:
                self.known.add(key)
            else:
                self.scores[key, entry["item"]] = dict(entry["scores"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{where}: not a line of an evaluation's journal; give another --out"
            ) from None
