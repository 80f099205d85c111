"""Figures as files, by matplotlib, which an extra brings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import MissingExtraError

WIDTH, HEIGHT = 6.0, 4.0  # inches


def figure(width: float = WIDTH, height: float = HEIGHT) -> Any:
    """An empty matplotlib figure; no window, no global state.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            '--plot needs matplotlib: pip install "kvlingo-mlx[plot]"'
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def check(picture: str) -> None:
    """Refuse before any work what :func:`save` could not do after it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: There is no such folder, or no such kind of picture.
    """
    known = sorted(figure().canvas.get_supported_filetypes())
    path = Path(picture)
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot is {picture!r}; its suffix must be one of {', '.join(known)}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--plot is {picture!r}; name a file in a folder that can be written")


def save(drawn: Any, picture: str) -> None:
    """Write a figure, all of it or nothing."""
    path = Path(picture)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        drawn.savefig(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
