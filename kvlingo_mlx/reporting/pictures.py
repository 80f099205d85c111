"""Figures as files, drawn by matplotlib, which is an optional dependency."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.errors import needs_extra

WIDTH, HEIGHT = 6.0, 4.0  # inches
DPI = 150


def figure(width: float = WIDTH, height: float = HEIGHT) -> Any:
    """An empty matplotlib figure, without a window and without global state.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("plot", "--plot needs matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def check(picture: str) -> None:
    """Refuse, before any work, a picture that :func:`save` could not write after it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: There is no such folder, or no such file format.
    """
    known = sorted(figure().canvas.get_supported_filetypes())
    path = Path(picture)
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot is {picture!r}; its suffix must be one of {', '.join(known)}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--plot is {picture!r}; name a file in a folder that can be written")


def pair(source: str, target: str) -> str:
    """The title of a picture of two models: their names, without the path of a folder."""
    return " to ".join(
        Path(name).name if Path(name).is_absolute() else name for name in (source, target)
    )


def save(figure: Any, picture: str | os.PathLike[str], title: str = "") -> None:
    """Write a figure so that the whole file appears, or nothing; ``title`` names its models."""
    path = Path(picture)
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        # As large as all that is drawn: a text longer than its axes would be cut at the edge.
        figure.savefig(partial, format=path.suffix[1:], dpi=DPI, bbox_inches="tight")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def log_scale(axes: Any, which: str, values: Sequence[float]) -> None:
    """Make an axis ("x" or "y") logarithmic for ``values``, with ticks at round numbers.

    The ticks are at 1, 2, 5, 10 and so on, or closer if ``values`` span less than a factor of 10.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    narrow = max(values, default=1) < 10 * min(values, default=1)
    axis.set_major_locator(MaxNLocator(5) if narrow else LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(in_full))
    axis.set_minor_formatter(NullFormatter())


def in_full(value: float, position: int | None = None) -> str:
    """A number written without powers of ten: 60, not 6x10^1."""
    return f"{value:,.12f}".rstrip("0").rstrip(".")
