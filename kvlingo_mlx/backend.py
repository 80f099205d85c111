"""Import MLX and mlx-lm once, and handle their side effects on the process.

All other modules import ``mx`` and ``nn`` from here. Three things must happen around these imports:

- On Linux a fast BLAS must be opened before MLX (``blas.py``). If that came too late, users are
  warned.
- On CUDA and on an M5 MLX multiplies float32 matrices in TF32, of 10 bits, unless a variable says
  otherwise, which it reads at the first such product. Here it is set, unless the user has set it.
- mlx-lm lowers the process's file-descriptor limits when it is imported. An application that embeds
  this package must keep its own limits.
- mlx-lm imports transformers, which imports PyTorch, in seconds, wherever it is installed. A
  program that does not need it sets ``sys.modules["torch"]`` to None before this import.
"""

import contextlib
import functools
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvlingo_mlx import blas
from kvlingo_mlx.errors import KVLingoWarning

TF32 = "MLX_ENABLE_TF32"
EXACT = 1e-5  # errors of float32 products are far below this, those of TF32 (5e-4) far above
os.environ.setdefault(TF32, "0")


@contextlib.contextmanager
def _descriptor_limits_kept() -> Iterator[None]:
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


try:
    import mlx.core as mx
except ImportError as error:  # on Linux, plain `pip install mlx` lacks libmlx.so
    raise ImportError(
        f'MLX cannot be loaded ({error}). On Linux it needs its CPU build: pip install "mlx[cpu]"'
    ) from error
with _descriptor_limits_kept():
    import mlx_lm.utils  # noqa: F401  (the import that lowers the limits)
if sys.modules.get("torch", mx) is None:  # transformers has noted by now that there is none
    del sys.modules["torch"]

import mlx.nn as nn  # noqa: E402

__all__ = ["EXACT", "TF32", "float32_error", "mx", "nn", "on_gpu"]


def on_gpu() -> bool:
    """Whether arrays are computed on a GPU (Metal or CUDA) by default."""
    return mx.default_device() == mx.gpu


@functools.cache
def float32_error(product: Callable[[Any, Any], Any] = lambda a, b: a @ b) -> float:
    """The largest error of one float32 product of matrices, as a share of its largest number.

    It is measured on the default device against float64, with ``product`` of two MLX arrays.
    """
    draw = np.random.default_rng(0).standard_normal
    left, right = draw((2, 64, 256)).astype(np.float32), draw((2, 256, 64)).astype(np.float32)
    exact = left.astype(np.float64) @ right
    found = np.array(product(mx.array(left), mx.array(right)))
    return float(abs(found - exact).max() / abs(exact).max())


if not on_gpu():
    blas.tell_if_missed()
elif blas.late and os.environ[TF32] == "0" and float32_error() > EXACT:
    warnings.warn(
        f"MLX multiplies float32 in TF32 here, with errors of {float32_error():.0e}: it computed "
        f"before kvlingo_mlx was imported; put `import kvlingo_mlx` first, or set {TF32}=0",
        KVLingoWarning,
        stacklevel=2,
    )
