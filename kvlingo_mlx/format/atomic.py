"""Write folders so that they appear on disk at once or not at all, one writer at a time.

A file or folder is written beside its destination, synced to the disk, and then put in place in
one step. A process killed at any moment leaves either the old one or the new one.
"""

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

WAIT = 10.0  # seconds to wait for another process that writes the same folder
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
AT_FDCWD, RENAME_EXCHANGE, RENAME_SWAP = -100, 2, 2  # the latter two: Linux's and macOS's exchange


def followed(folder: Path) -> Path:
    """The place that a link leads to, there or not; any other path as it is.

    A folder is put in place by an exchange, which would take the link itself.
    """
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def temporary_beside(folder: Path) -> Path:
    """Make a new hidden folder beside ``folder``, in which its next content is written."""
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))


@contextlib.contextmanager
def new_folder(
    folder: Path, needed: int, check: Callable[[], bool] = lambda: True
) -> Iterator[Path | None]:
    """A context in which a folder's next content is written, which takes its place at the end.

    Args:
        folder: The folder, there or not.
        needed: The bytes that will be written.
        check: Called when no other process writes the folder; where it returns false, the folder
            stays as it is.

    Yields:
        An empty folder beside it; None where it stays.

    Raises:
        OSError: The disk has less room, or another process writes the folder.
    """
    check_room(folder, needed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        put_back(folder)
        if not check():
            yield None
            return
        temporary = temporary_beside(folder)
        try:
            temporary.chmod(0o755)
            yield temporary
            replace_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def leftovers(folder: Path) -> list[Path]:
    """The unfinished and replaced folders that killed processes left beside ``folder``."""
    ours = re.compile(rf"\.{re.escape(folder.name)}\.(new|old)-[a-z0-9_]{{8}}")
    return [p for p in folder.parent.glob(".*") if ours.fullmatch(p.name)]


def replace_folder(temporary: Path, folder: Path) -> None:
    """Move ``temporary`` to ``folder``; an older folder there is replaced and removed.

    Where the file system cannot exchange two folders in one step, the older folder is moved aside
    first, and moved back if the next step fails. If the process is killed in between, the older
    folder stays aside, and :func:`put_back` restores it.
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
    """Exchange two folders in one step; return False where the system cannot do that.

    Raises:
        OSError: The system supports the exchange, but it failed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    try:
        if platform.system() == "Darwin":
            failed = library.renamex_np(*paths, RENAME_SWAP)
        else:
            failed = library.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE)
    except AttributeError:  # the C library has no such function
        return False
    number = ctypes.get_errno()
    if failed and number not in UNSUPPORTED:
        raise OSError(number, os.strerror(number), str(other))
    return not failed


def put_back(folder: Path) -> None:
    """Remove what killed processes left beside ``folder``; restore a folder that has no other copy.

    The caller must hold :func:`alone`.
    """
    for path in leftovers(folder):
        if (path / "old").is_dir() and not folder.exists():
            os.rename(path / "old", folder)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def alone(folder: Path, wait: float = WAIT) -> Iterator[None]:
    """Lock ``folder`` against other writing processes; readers need no lock.

    Raises:
        OSError: Another process still holds the lock after ``wait`` seconds; the message names it.
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
    """Open and lock the lock file that ``path`` names."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return file  # the file system has no locks
            if time.monotonic() >= until:
                holder = os.pread(file, 100, 0).decode(errors="replace") or "another process"
                os.close(file)
                raise OSError(
                    f"{holder} is writing {path.name[1:-5]} in {path.parent}; wait until it is done"
                ) from None
            time.sleep(0.02)
        else:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file  # otherwise the previous holder has removed this file: try again
        os.close(file)


def check_room(folder: Path, needed: int) -> None:
    """Refuse to write ``needed`` bytes into ``folder`` if its disk has less free space.

    Raises:
        OSError: The message gives the needed and the free space.
    """
    free = shutil.disk_usage(next(p for p in folder.absolute().parents if p.exists())).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the disk is full: {folder.name} needs {needed / 1e6:,.1f} MB and "
            f"{free / 1e6:,.1f} MB are free",
        )


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file part by part, and wait for the disk where the file system supports that.

    Raises:
        OSError: The disk is full or broken; the error names the file.
    """
    try:
        with open(path, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            sync_file(file.fileno())
        path.chmod(0o644)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # what is written to an open file leaves it out
        raise


def sync_file(number: int) -> None:
    """Sync an open file to the disk; do nothing where the file system does not support that."""
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def sync(folder: Path) -> None:
    """Sync a folder's directory entries to the disk, where the file system supports that."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
