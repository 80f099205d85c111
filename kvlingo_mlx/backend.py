"""Import MLX and mlx-lm once, and handle their side effects on the process.

All other modules import ``mx`` and ``nn`` from here. Two things must happen around these imports:

- On Linux a fast BLAS must be opened before MLX (``blas.py``). If that came too late, users are
  warned.
- mlx-lm lowers the process's file-descriptor limits when it is imported. An application that embeds
  this package must keep its own limits.
- mlx-lm imports transformers, which imports PyTorch, in seconds, wherever it is installed. A
  program that does not need it sets ``sys.modules["torch"]`` to None before this import.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator

from kvlingo_mlx import blas


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

__all__ = ["mx", "nn", "on_gpu"]


def on_gpu() -> bool:
    """Whether arrays are computed on a GPU (Metal or CUDA) by default."""
    return mx.default_device() == mx.gpu


if not on_gpu():
    blas.tell_if_lost()
