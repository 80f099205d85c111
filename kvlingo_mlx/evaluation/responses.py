"""Responses kept in a file as they come, so that what was computed is not computed again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoError


class Responses:
    """Responses by key: in a JSONL file, each appended as soon as it is known, or in memory.

    A run that was killed in the middle of a line loses that line alone.

    Args:
        path: The file, made when the first response comes; None keeps them in memory.

    Raises:
        KVLingoError: The file holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            self._read(path)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, response: Any) -> None:
        """Keep a response, which JSON must be able to hold."""
        self._known[key] = response
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "response": response}) + "\n")

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry["response"]
            except (ValueError, KeyError, TypeError):
                raise KVLingoError(
                    f"{path}, line {number}, is no kept response; name another file, or delete it"
                ) from None
        if whole < len(data):  # a line that was being written when the run was killed
            with path.open("r+b") as file:
                file.truncate(whole)


def key_of(*parts: Any) -> str:
    """Sha256 of what determines a response, as JSON."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
