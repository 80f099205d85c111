"""Write another program's configuration file, and put back what was there, to the byte.

A copy of a file that is there is laid beside it, and moved back at the end. A note in the store
holds what was written, so that a file which somebody changed since is told from ours.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from kvlingo_mlx.format import atomic
from kvlingo_mlx.loading.translators import home


def content(path: Path) -> bytes | None:
    """What a file holds; None if it is not there."""
    return path.read_bytes() if path.exists() else None


def note_of(name: str) -> Path:
    """The file that says what was written for a program, while it is set up."""
    return home() / "agents" / f"{name}.json"


def copy_of(path: Path) -> Path:
    """Where a file's copy lies while its program is set up."""
    return path.with_name(f"{path.name}.kvlingo-backup")


def set_up(name: str) -> tuple[Path, bytes | None, bool] | None:
    """A set-up program's file, what it held before, and whether somebody changed it since.

    Raises:
        FileNotFoundError: The copy of what it held is gone.
    """
    note = json.loads(content(note_of(name)) or b"null")
    if note is None:
        return None
    path = Path(note["path"])
    now, before = content(path), content(copy_of(path))
    if note["copied"] and before is None:
        raise FileNotFoundError(
            f"{copy_of(path)} is gone; take out of {path} by hand what is kvlingo's, then remove "
            f"{note_of(name)}"
        )
    ours = now is not None and hashlib.sha256(now).hexdigest() == note["sha256"]
    return path, before, not ours and now != before


def put_back(name: str) -> None:
    """Put back what a program's file was, with its times and permissions."""
    if found := set_up(name):
        path, before, _ = found
        path.unlink(missing_ok=True) if before is None else os.replace(copy_of(path), path)
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
    note = {"path": str(path), "copied": path.exists(), "sha256": hashlib.sha256(data).hexdigest()}
    for file, put in ((note_of(name), json.dumps(note).encode()), (path, data)):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(put)
            new.flush()
            atomic.sync_file(new.fileno())
        if file.exists():
            shutil.copymode(file, new.name)
        os.replace(new.name, file)
