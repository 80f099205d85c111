"""Responses that are kept in a file immediately, so that none is computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlingo_mlx.evaluation.lines import Lines


class Responses:
    """Responses by key, in a JSONL file or in memory; a file gets each one as soon as it is known.

    Args:
        path: The file; None keeps them in memory.

    Raises:
        ValueError: The file holds something else, or cannot be read or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, Any] = {}
        self._lines = Lines(path, self._take, "kept responses")

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, response: Any) -> None:
        """Keep a response, which must be a JSON value."""
        self._lines.append({"key": key, "response": response})
        self._known[key] = response

    def fill(self, wanted: Mapping[str, Callable[[], Any]]) -> Iterator[str]:
        """Make the responses that are missing; yields each key, once its response is there."""
        for key, make in wanted.items():
            if key not in self:
                self.add(key, make())
            yield key

    def _take(self, entry: dict[str, Any]) -> None:
        self._known[entry["key"]] = entry["response"]


def key_of(*parts: Any) -> str:
    """The sha256 of all that determines a response, as JSON."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
