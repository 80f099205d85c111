"""What a training keeps on disk: files of tensors and facts, replaced atomically.

The folder ``OUT.partial`` stands beside the translator that is being made. It holds
``initial.safetensors`` (the result of stage 1) and a file for each unfinished distillation. A
process that is killed at any point leaves either the previous state or the new one.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.atomic import sync_file
from kvlingo_mlx.reporting.measure import plain

KEEP_EVERY = 240.0  # the most seconds of work that a kill may lose


@dataclass(frozen=True)
class Checkpoint:
    """A state in a file, and the settings that must not change."""

    path: Path
    settings: Mapping[str, Any]

    def write(self, what: str, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Replace the state, tensors and JSON facts, atomically.

        Raises:
            KVLingoError: The file could not be written; the old one is still there. The message
                names its content, ``what``.
        """
        known = {**facts, "settings": dict(self.settings)}
        with _replaced(self.path, what) as temporary:
            save_file(dict(tensors), temporary, {"facts": json.dumps(known)})

    def facts(self) -> dict[str, Any] | None:
        """The facts of the state; None if there is none.

        Raises:
            ValueError: It is damaged, or of other settings; the message names those that differ.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="np") as file:
                facts: dict[str, Any] = json.loads((file.metadata() or {})["facts"])
        except (SafetensorError, KeyError, ValueError):
            raise ValueError(
                f"{self.path} is damaged, or of another version; remove it to start this stage anew"
            ) from None
        check_settings(self.path.parent, facts["settings"], self.settings)
        return facts

    def read(self) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Tensors and facts, if there are any; raises as :meth:`facts` does."""
        facts = self.facts()
        return None if facts is None else (load_file(self.path), facts)


def log_of(folder: Path) -> Path:
    """The log of a finished stage 2, beside its translator: held-out KL and more, as JSON lines."""
    return folder.with_name(f"{folder.name}.log.jsonl")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a finished training's log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_json(path: Path, what: str, values: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines atomically; raises as :meth:`Checkpoint.write` does."""
    lines = [json.dumps(plain(dict(line))) for line in values]
    with _replaced(path, what) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@contextlib.contextmanager
def _replaced(path: Path, what: str) -> Iterator[Path]:
    """A file to write, which is flushed to the disk and then moved to ``path``."""
    temporary = path.with_name(f"{path.name}.tmp")
    with disk_errors(what, path.parent):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with open(temporary, "rb") as file:
                sync_file(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one line: ``what`` could not be kept in ``folder``."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors wraps OSError in its own text
        full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        raise KVLingoError(
            f"{reason}: {what} could not be kept in {folder}; what was kept before is intact, "
            f"{'free some space' if full else 'mend that'} and run the same command"
        ) from None


def check_settings(folder: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse (ValueError) to resume with other settings; the message names those that differ."""
    current = json.loads(json.dumps(dict(settings)))

    changed = [n for n in sorted({*kept, *current}) if kept.get(n) != current.get(n)]
    if changed:
        listed = "; ".join(f"{n} was {kept.get(n)!r}, is {current.get(n)!r}" for n in changed)
        raise ValueError(
            f"{folder} holds a run with other settings ({listed}); give the same "
            "ones to resume it, or remove the folder to start anew"
        )
