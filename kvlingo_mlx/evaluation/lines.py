"""JSON lines appended one by one, each on disk before the next is computed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoError


class Lines:
    """A JSONL file, made when the first line comes, or nothing where ``path`` is None.

    A run that was killed in the middle of a line loses that line alone.

    Args:
        path: The file.
        take: Given each line that is there; what is not ours makes it raise.
        what: What a line of the file is, for the message where one is none.

    Raises:
        ValueError: The file holds something else, or cannot be read or written.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, take: Callable[[Any], None], what: str
    ) -> None:
        self.path = None if path is None else Path(path)
        if self.path is None:
            return
        if self.path.exists():
            self._read(self.path, take, what)
        elif not (self.path.parent.is_dir() and os.access(self.path.parent, os.W_OK)):
            raise ValueError(f"{self.path} cannot be written; name a file in a folder that can be")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            KVLingoError: The disk is full, or the file can no longer be written.
        """
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise KVLingoError(f"{self.path} cannot be written: {error.strerror}") from None

    @staticmethod
    def _read(path: Path, take: Callable[[Any], None], what: str) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number}: not a line of {what}; name another file"
                ) from None
        if whole < len(data):  # the next line must not join what was cut off
            with path.open("r+b") as file:
                file.truncate(whole)
