"""The BLAS that MLX computes by on Linux: opened in time, and told of where it was not.

MLX's Linux CPU wheel bundles reference BLAS. If OpenBLAS is open when ``mlx.core`` is imported,
MLX's float32 products run tens of times faster; what is opened later is never used. So importing
this package arranges that it is opened just before MLX, whoever imports that. It is not opened at
once: PyTorch, imported after it, would compute by it too, with threads that PyTorch does not
know of. ``KVLINGO_BLAS=0`` switches all this off, ``KVLINGO_BLAS=path`` names another library.
"""

from __future__ import annotations

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
_PACKED = re.compile(r"mlx.*\.libs")  # where wheels keep the libraries that they bring
_RELOCATIONS = 4  # SHT_RELA
_late = False


def prepare() -> None:
    """Have the BLAS opened just before MLX is imported, if there is still time."""
    global _late
    _late = "mlx.core" in sys.modules
    if choice() is not None and not _late:
        sys.meta_path.insert(0, _BeforeMLX())


def choice() -> str | None:
    """The library to open; None where that is switched off, or where there is nothing to open."""
    named = os.environ.get("KVLINGO_BLAS") or DEFAULT
    return None if platform.system() != "Linux" or named == "0" else named


class _BeforeMLX:
    """Finds no module. It opens the BLAS when ``mlx.core`` is looked for, and is gone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """As the import system asks every finder."""
        if name == "mlx.core":
            sys.meta_path.remove(self)
            library(ctypes.RTLD_GLOBAL)


def library(mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL | None:
    """The chosen library, opened; None where that is switched off, or it cannot be opened."""
    named = choice()
    if named is None:
        return None
    try:
        return ctypes.CDLL(named, mode=mode)
    except OSError:
        return None


def tell_if_lost() -> None:
    """Warn if the chosen library is not the one that MLX, imported by now, computes by.

    That the default one is not installed is not told: the README says so, and ``doctor``.

    Warns:
        KVLingoWarning: With what to do.
    """
    named, opened = choice(), library()
    if named is None or (opened is None and named == DEFAULT):
        return
    if opened is None:
        found = f"KVLINGO_BLAS names {named}, which cannot be opened; name a library that can"
    elif not hasattr(opened, PRODUCT):
        found = f"KVLINGO_BLAS names {named}, which has no {PRODUCT}; name one that has"
    elif in_effect() != BUNDLED:
        return
    elif _late:
        found = (
            "mlx.core was imported before kvlingo_mlx, so MLX computes by the slow BLAS that it "
            f"bundles, not by {named}; put `import kvlingo_mlx` before mlx and mlx_lm"
        )
    else:
        found = f"{named} was opened, but this build of MLX computes by the BLAS that it bundles"
    warnings.warn(printable(found), KVLingoWarning, stacklevel=2)


def in_effect() -> str | None:
    """The BLAS that MLX's products call, by name; None elsewhere than on Linux, and without MLX.

    It is read from where the loader bound MLX's call, not from what is open.
    """
    if platform.system() != "Linux" or "mlx.core" not in sys.modules:
        return None
    path = _bound()
    if path is None:
        return BUNDLED
    file = "/".join(path.parts[-2:])  # Debian's libblas.so.3 lies in a folder of OpenBLAS's name
    unknown = BUNDLED if _PACKED.fullmatch(path.parent.name) else path.name
    return next((name for part, name in _KNOWN.items() if part in file), unknown)


def _bound() -> Path | None:
    """The library whose product MLX calls; None if it is MLX's own, or cannot be told."""
    maps = list(_maps())
    base, path = next(((start, p) for start, _, p in maps if p.name == "libmlx.so"), (0, None))
    if path is None:
        return None
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
            slot = _slot(elf)
    except (OSError, ValueError, struct.error):  # replaced by an update, or of another make
        return None
    if slot is None:
        return None
    address = ctypes.c_size_t.from_address(base + slot).value
    found = next((p for start, stop, p in maps if start <= address < stop), None)
    return None if found == path else found


def _maps() -> Iterator[tuple[int, int, Path]]:
    """What files lie where in memory, each from its first byte on."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, *_, path = line.split(maxsplit=5)
        if path.startswith("/"):
            start, stop = (int(end, 16) for end in area.split("-"))
            yield start, stop, Path(path)


def _slot(elf: mmap.mmap) -> int | None:
    """Where in a 64-bit ELF library the loader notes the address of the product that it calls."""
    wanted = PRODUCT.encode() + b"\0"
    offset, size, count = struct.unpack_from("<40xQ10xHH", elf)
    sections = [struct.unpack_from("<4xI16xQQI", elf, offset + i * size) for i in range(count)]
    for kind, start, length, link in reversed(sections):  # what is called comes last
        if kind != _RELOCATIONS or not link:
            continue
        _, symbols, _, texts = sections[link]
        names = sections[texts][1]
        for place, info, _ in struct.iter_unpack("<QQq", elf[start : start + length]):
            (name,) = struct.unpack_from("<I", elf, symbols + 24 * (info >> 32))
            if elf[names + name : names + name + len(wanted)] == wanted:
                return place
    return None
