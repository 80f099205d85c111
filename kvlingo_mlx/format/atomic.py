"""Folders that appear on disk at once or not at all, and one writer of each at a time.

A file or folder is written beside its destination, put on the disk, and then takes its place in
one step: a process killed at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

WAIT = 10.0  # seconds for another process that writes the same folder
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
AT_FDCWD, RENAME_EXCHANGE, RENAME_SWAP = -100, 2, 2  # Linux's and macOS's names of the same


def temporary_beside(folder: Path) -> Path:
    """A new folder beside ``folder``, hidden, in which its next content is made."""
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))


def leftovers(folder: Path) -> list[Path]:
    """What a killed process left beside ``folder``: unfinished ones, and replaced ones."""
    ours = re.compile(rf"\.{re.escape(folder.name)}\.(new|old)-[a-z0-9_]{{8}}")
    return [p for p in folder.parent.glob(".*") if ours.fullmatch(p.name)]


def replace_folder(temporary: Path, folder: Path) -> None:
    """Move ``temporary`` to ``folder``, where an older one may stand; that one is removed.

    Where the file system cannot exchange two folders in one step, the older one steps aside first,
    and back if we fail: a process killed between the two leaves it beside, and
    :func:`put_back` finds it.
    """
    sync(temporary)
    if not folder.exists():
        os.rename(temporary, folder)
    elif exchange(temporary, folder):
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        _step_aside(temporary, folder)
    sync(folder.parent)


def _step_aside(temporary: Path, folder: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old-", dir=folder.parent))
    try:
        os.rename(folder, aside / "old")
        os.rename(temporary, folder)
    except BaseException:
        if not folder.exists():
            os.rename(aside / "old", folder)
        raise
    finally:
        if folder.exists():  # otherwise ``aside`` holds the only copy
            shutil.rmtree(aside, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders take each other's place in one step; False where that cannot be done.

    Raises:
        OSError: The system can, and did not.
    """
    library = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    try:
        if platform.system() == "Darwin":
            failed = library.renamex_np(*paths, RENAME_SWAP)
        else:
            failed = library.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE)
    except AttributeError:  # a C library without it
        return False
    number = ctypes.get_errno()
    if failed and number not in UNSUPPORTED:
        raise OSError(number, os.strerror(number), str(other))
    return not failed


def put_back(folder: Path) -> None:
    """Clear away what killed processes left beside ``folder``; an only copy goes back to it.

    To be called by who has :func:`alone`.
    """
    for path in leftovers(folder):
        if (path / "old").is_dir() and not folder.exists():
            os.rename(path / "old", folder)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def alone(folder: Path, wait: float = WAIT) -> Iterator[None]:
    """Keep other processes from writing ``folder`` meanwhile; readers need not ask.

    Raises:
        OSError: Another process has it still, after ``wait`` seconds; says which.
    """
    path = folder.with_name(f".{folder.name}.lock")
    file = _locked(path, time.monotonic() + wait)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()}".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _locked(path: Path, until: float) -> int:
    """An open lock file that is ours, and is what ``path`` names."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return file  # a file system without locks
            if time.monotonic() >= until:
                holder = os.pread(file, 100, 0).decode(errors="replace") or "another process"
                os.close(file)
                raise OSError(
                    f"{holder} is writing {path.name[1:-5]} in {path.parent}; wait until it is done"
                ) from None
            time.sleep(0.02)
        else:
            if _names(path, file):
                return file  # or whoever had it removed it meanwhile
        os.close(file)


def _names(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin writing ``needed`` bytes into ``folder``'s disk where they do not fit.

    Raises:
        OSError: With what is needed and what is free.
    """
    free = shutil.disk_usage(next(p for p in folder.absolute().parents if p.exists())).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the disk is full: {folder.name} needs {needed / 1e6:,.1f} MB and "
            f"{free / 1e6:,.1f} MB are free",
        )


def sync_file(number: int) -> None:
    """Put an open file on the disk; where the file system cannot be told to, it does so itself.

    Raises:
        OSError: The disk is full, or broken.
    """
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def sync(folder: Path) -> None:
    """Put a folder's list of names on the disk, where the file system lets us."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
