"""Open a fast BLAS for MLX on Linux in time, and warn where MLX does not use it.

MLX's Linux CPU wheel bundles the reference BLAS. If OpenBLAS is open when ``mlx.core`` is imported,
MLX's float32 products run tens of times faster; a library opened later is never used. So importing
this package arranges that OpenBLAS is opened just before MLX, whichever code imports MLX. OpenBLAS
is not opened at once: PyTorch, if imported after it, would use it too, with threads that PyTorch
does not know of. ``KVLINGO_BLAS=0`` switches all this off; ``KVLINGO_BLAS=path`` names another
library.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoWarning, printable

DEFAULT = "libopenblas.so.0"
BUNDLED = "bundled BLAS"
PRODUCT = "cblas_sgemm"
_KNOWN = {"openblas": "OpenBLAS", "libmkl": "MKL", "libblis": "BLIS"}
_PACKED = re.compile(r"mlx.*\.libs")  # the folder in which a wheel keeps its bundled libraries
_RELOCATIONS = 4  # SHT_RELA
ABSENT = (
    "OpenBLAS is not installed, so MLX computes by the slow BLAS that it bundles and takes several "
    "times as long; install it (sudo apt-get install libopenblas0-pthread, or your system's own "
    "package of libopenblas.so.0), or set KVLINGO_BLAS=0 to end this notice"
)
late = False  # whether MLX was imported before this package
LONG_RUN = "KVLINGO_LONG_RUN"  # set by verbs that compute for long, also for their processes


def prepare() -> None:
    """Arrange that the BLAS is opened just before MLX is imported, if MLX is not imported yet."""
    global late
    late = "mlx.core" in sys.modules
    if choice() is not None and not late:
        sys.meta_path.insert(0, _BeforeMLX())


def choice() -> str | None:
    """The library to open; None if that is switched off or the system is not Linux."""
    named = os.environ.get("KVLINGO_BLAS") or DEFAULT
    return None if platform.system() != "Linux" or named == "0" else named


class _BeforeMLX:
    """An import finder that finds no module: it opens the BLAS before ``mlx.core``, once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Open the BLAS if ``mlx.core`` is looked for; called by the import system."""
        if name == "mlx.core":
            sys.meta_path.remove(self)
            library(ctypes.RTLD_GLOBAL)


def library(mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL | None:
    """The chosen library, opened; None if it is switched off or cannot be opened."""
    named = choice()
    if named is None:
        return None
    try:
        return ctypes.CDLL(named, mode=mode)
    except OSError:
        return None


def missed() -> str | None:
    """Why MLX, which must be imported by now, computes by a slow BLAS, and the remedy.

    None if it does not, or if that was chosen (``KVLINGO_BLAS=0``).
    """
    named, opened = choice(), library()
    if named is None:
        return None
    if opened is None and named != DEFAULT:
        return f"KVLINGO_BLAS names {named}, which cannot be opened; name a library that can"
    if opened is not None and not hasattr(opened, PRODUCT):
        return f"KVLINGO_BLAS names {named}, which has no {PRODUCT}; name one that has"
    if in_effect() != BUNDLED:
        return None
    if opened is None:
        return ABSENT
    if late:
        return (
            "mlx.core was imported before kvlingo_mlx, so MLX computes by the slow BLAS that it "
            f"bundles, not by {named}; put `import kvlingo_mlx` before mlx and mlx_lm"
        )
    return f"{named} was opened, but this build of MLX computes by the BLAS that it bundles"


@contextlib.contextmanager
def in_run(long: bool) -> Iterator[None]:
    """A context in which work begins that takes long, or not: so for its own processes, too."""
    before = os.environ.pop(LONG_RUN, None)
    os.environ |= {LONG_RUN: "1"} if long else {}
    try:
        yield
    finally:
        os.environ.pop(LONG_RUN, None)
        os.environ |= {} if before is None else {LONG_RUN: before}


def tell_if_missed() -> None:
    """Warn (KVLingoWarning) of :func:`missed`; that none is installed only in a long run."""
    found = missed()
    if found is not None and (os.environ.get(LONG_RUN) or found != ABSENT):
        warnings.warn(printable(found), KVLingoWarning, stacklevel=2)


def in_effect() -> str | None:
    """The name of the BLAS that MLX's products call; None without MLX or not on Linux.

    The name comes from the address to which the loader bound MLX's call, not from open libraries.
    """
    if platform.system() != "Linux" or "mlx.core" not in sys.modules:
        return None
    path = _bound()
    if path is None:
        return BUNDLED
    file = "/".join(path.parts[-2:])  # Debian's libblas.so.3 may lie in a folder named openblas
    unknown = BUNDLED if _PACKED.fullmatch(path.parent.name) else path.name
    return next((name for part, name in _KNOWN.items() if part in file), unknown)


def _bound() -> Path | None:
    """The library whose product MLX calls; None if it is MLX's own or cannot be determined."""
    maps = list(_maps())
    base, path = next(((start, p) for start, _, p in maps if p.name == "libmlx.so"), (0, None))
    if path is None:
        return None
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
            slot = _slot(elf)
    except (OSError, ValueError, struct.error):  # replaced by an update, or of another file format
        return None
    if slot is None:
        return None
    address = ctypes.c_size_t.from_address(base + slot).value
    found = next((p for start, stop, p in maps if start <= address < stop), None)
    return None if found == path else found


def _maps() -> Iterator[tuple[int, int, Path]]:
    """Yield (start, end, file) of this process's mapped areas; a file's first one is its start."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, *_, path = line.split(maxsplit=5)
        if path.startswith("/"):
            start, stop = (int(end, 16) for end in area.split("-"))
            yield start, stop, Path(path)


def _slot(elf: mmap.mmap) -> int | None:
    """The offset in a 64-bit ELF library at which the loader stores the called product's address.

    None if the library has no such entry.
    """
    wanted = PRODUCT.encode() + b"\0"
    offset, size, count = struct.unpack_from("<40xQ10xHH", elf)
    sections = [struct.unpack_from("<4xI16xQQI", elf, offset + i * size) for i in range(count)]
    for kind, start, length, link in reversed(sections):  # relocations of calls come last
        if kind != _RELOCATIONS or not link:
            continue
        _, symbols, _, texts = sections[link]
        names = sections[texts][1]
        for place, info, _ in struct.iter_unpack("<QQq", elf[start : start + length]):
            (name,) = struct.unpack_from("<I", elf, symbols + 24 * (info >> 32))
            if elf[names + name : names + name + len(wanted)] == wanted:
                return place
    return None
