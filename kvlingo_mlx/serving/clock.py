"""The server's clock. Ranks that serve together go by the first one's."""

import time

_round: float | None = None


def now() -> float:
    """Seconds since 1970; on ranks, as the first one had them when this round began."""
    return time.time() if _round is None else _round


def set_round(seconds: float) -> None:
    global _round
    _round = seconds
