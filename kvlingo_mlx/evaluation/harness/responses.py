"""Responses that are kept in a file immediately, so that none is computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlingo_mlx.evaluation.lines import Lines, group


class Responses:
    """Responses by key, in a JSONL file or in memory; a file gets each one as soon as it is known.

    Args:
        path: The file; None keeps them in memory.

    Raises:
        ValueError: The file holds something else, or cannot be read or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, Any] = {}
        self._new: dict[str, Any] = {}  # which other ranks do not know yet
        self._lines = Lines(path, self._take, "kept responses")

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, response: Any) -> None:
        """Keep a response, which must be a JSON value."""
        self._lines.append({"key": key, "response": response})
        self._known[key] = self._new[key] = response

    def exchange(self) -> None:
        """Give the other ranks of ``mlx.launch`` what is new here, and add what is new there.

        All of them call it at the same point.
        """
        new, self._new = self._new, {}
        for theirs in group().gathered(new):
            for key, response in theirs.items():
                if key not in self:
                    self.add(key, response)
        self._new = {}

    def fill(self, wanted: Mapping[str, tuple[int, Callable[[], Any]]]) -> Iterator[str]:
        """Make the responses that are missing; the ranks share them, round by round.

        Args:
            wanted: What each key's response costs, and what makes it.

        Yields:
            Each key, once its response is there.
        """
        missing = [key for key in wanted if key not in self]
        yield from (key for key in wanted if key in self)
        here = group()
        for numbers in here.rounds([wanted[key][0] for key in missing]):
            for number in numbers[here.rank : here.rank + 1]:
                self.add(missing[number], wanted[missing[number]][1]())
            self.exchange()
            yield from (missing[number] for number in numbers)

    def _take(self, entry: dict[str, Any]) -> None:
        self._known[entry["key"]] = entry["response"]


def key_of(*parts: Any) -> str:
    """The sha256 of all that determines a response, as JSON."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
