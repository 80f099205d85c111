"""Open a fast BLAS for MLX on Linux in time, and warn where MLX does not use it.

MLX's Linux CPU wheel bundles the reference BLAS. If OpenBLAS is open when ``mlx.core`` is imported,
MLX's float32 products run tens of times faster; a library opened later is never used. So importing
this package arranges that OpenBLAS is opened just before MLX, whichever code imports MLX. OpenBLAS
is not opened at once: PyTorch, if imported after it, would use it too, with threads that PyTorch
does not know of. ``KVLINGO_BLAS=0`` switches all this off; ``KVLINGO_BLAS=path`` names another
library.
"""

import ctypes
import os
import platform
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import KVLingoWarning, printable

DEFAULT = "libopenblas.so.0"
BUNDLED = "bundled BLAS"
PRODUCT = "cblas_sgemm"
_KNOWN = {"openblas": "OpenBLAS", "libmkl": "MKL", "libblis": "BLIS"}
_PACKED = re.compile(r"mlx.*\.libs")  # the folder in which a wheel keeps its bundled libraries
ABSENT = (
    "OpenBLAS is not installed, so MLX computes by the slow BLAS that it bundles and takes several "
    "times as long; install it (sudo apt-get install libopenblas0-pthread, or your system's own "
    "package of libopenblas.so.0), or set KVLINGO_BLAS=0 to end this notice"
)
late = False  # whether MLX was imported before this package
long_run = False  # whether what is about to run computes for long; verbs say so


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


def tell_if_missed() -> None:
    """Warn (KVLingoWarning) of :func:`missed`; that none is installed only in a long run."""
    found = missed()
    if found is not None and (long_run or found != ABSENT):
        warnings.warn(printable(found), KVLingoWarning, stacklevel=2)


def in_effect() -> str | None:
    """The name of the BLAS that MLX's products call; None without MLX or not on Linux.

    The loader bound MLX's call to the first open library that offers it, if one was open before.
    """
    if platform.system() != "Linux" or "mlx.core" not in sys.modules:
        return None
    path = None if late else _provider()
    if path is None or _PACKED.fullmatch(path.parent.name):
        return BUNDLED
    file = "/".join(path.parts[-2:])  # Debian's libblas.so.3 may lie in a folder named openblas
    return next((name for part, name in _KNOWN.items() if part in file), path.name)


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _provider() -> Path | None:
    """The library whose product the loader gives to whoever asks for one."""
    everything, found = ctypes.CDLL(None), _SymbolInfo()
    if not hasattr(everything, PRODUCT):
        return None
    address = ctypes.cast(getattr(everything, PRODUCT), ctypes.c_void_p)
    return (
        Path(os.fsdecode(found.file)) if everything.dladdr(address, ctypes.byref(found)) else None
    )
