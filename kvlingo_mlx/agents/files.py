"""Write another program's configuration file, and put back what was there, to the byte.

A copy of a file that is there is laid beside it, and moved back at the end. A note in the store
holds what was written, so that a file which somebody changed since is told from ours.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvlingo_mlx.format import atomic
from kvlingo_mlx.loading.translators import home


@dataclass(frozen=True)
class SetUp:
    """A program's file while the program is set up."""

    path: Path
    before: bytes | None  # what it held; None: it was not there
    changed: bool  # whether somebody changed it since it was written


def content(path: Path) -> bytes | None:
    """What a file holds; None if it is not there."""
    return path.read_bytes() if path.exists() else None


def note_of(name: str) -> Path:
    """The file that says what was written for a program, while it is set up."""
    return home() / "agents" / f"{name}.json"


def copy_of(path: Path) -> Path:
    """Where a file's copy lies while its program is set up."""
    return path.with_name(f"{path.name}.kvlingo-backup")


def set_up(name: str) -> SetUp | None:
    """What was set up for a program; None if nothing was."""
    note = json.loads(content(note_of(name)) or b"null")
    if note is None:
        return None
    path = Path(note["path"])
    now, before = content(path), content(copy_of(path))
    ours = now is not None and hashlib.sha256(now).hexdigest() == note["sha256"]
    return SetUp(path, before, not ours and now != before)


def put_back(name: str) -> None:
    """Put back what a program's file was, with its times and permissions."""
    if found := set_up(name):
        if found.before is None:
            found.path.unlink(missing_ok=True)
        else:
            os.replace(copy_of(found.path), found.path)
        note_of(name).unlink()


def write(name: str, path: Path, data: bytes) -> None:
    """Write a program's file, of which a copy is kept; :func:`put_back` undoes it.

    Raises:
        OSError: It cannot be written, or there is a copy of it from elsewhere.
    """
    put_back(name)
    if copy_of(path).exists():
        raise FileExistsError(f"{copy_of(path)} is there already; move it elsewhere")
    if path.exists():
        shutil.copy2(path, copy_of(path))
    note = {"path": str(path), "sha256": hashlib.sha256(data).hexdigest()}
    for file, content in ((note_of(name), json.dumps(note).encode()), (path, data)):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(content)
            new.flush()
            atomic.sync_file(new.fileno())
        if file.exists():
            shutil.copymode(file, new.name)
        os.replace(new.name, file)
