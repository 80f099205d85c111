"""JSON lines that are appended one by one, each written before the next is computed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoError


class Lines:
    """A JSONL file, created with its first line; nothing is written if ``path`` is None.

    A run that is killed while it writes a line loses that line only.

    Args:
        path: The file.
        take: Called with each existing line; it raises for a line of another kind.
        what: A name for the file's content, for error messages.

    Raises:
        ValueError: The file holds something else, or cannot be read or written.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, take: Callable[[Any], None], what: str
    ) -> None:
        self.path = None if path is None else Path(path)
        if self.path is None:
            return
        data = self._read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path}, line {number}: not a line of {what}; name another file"
                ) from None
        if whole < len(data):  # the next line must not join an incomplete one
            with self.path.open("r+b") as file:
                file.truncate(whole)

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

    def _read(self) -> bytes:
        path = self.path
        assert path is not None
        if not path.exists():
            if path.parent.is_dir() and os.access(path.parent, os.W_OK):
                return b""
            raise ValueError(f"{path} cannot be written; name a file in a folder that can be")
        try:
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
