"""The memory that a run of MLX takes."""

from __future__ import annotations

from collections.abc import Callable

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream


def _idle() -> None:
    mx.synchronize(generation_stream)  # a plain synchronize waits for the default stream only
    mx.synchronize()


def peak_bytes(action: Callable[[], object]) -> int:
    """The most bytes that MLX held while ``action`` ran."""
    _idle()
    mx.clear_cache()
    mx.reset_peak_memory()
    action()
    mx.synchronize()
    return mx.get_peak_memory()


def grown_bytes(action: Callable[[], object]) -> int:
    """The most bytes that a second run of ``action`` adds to those held after a first run."""
    action()
    _idle()
    resident = mx.get_active_memory()
    return peak_bytes(action) - resident
