"""The time by which the worker decides. Ranks that serve together go by the first one's clock."""

from __future__ import annotations

import time

_told: float | None = None


def now() -> float:
    """Seconds since 1970; on ranks, as the first one told them when this round began."""
    return time.time() if _told is None else _told


def tell(moment: float) -> None:
    """Let it be this time until the next is told."""
    global _told
    _told = moment
