"""Where the time of a hand-over goes."""

import contextlib
import time
from collections.abc import Generator
from typing import Any, TypeVar

R = TypeVar("R")
PHASES = ("prefill", "translate", "native")


class Clock:
    """Seconds by phase since ``started``: each ``lap`` books the time since the last one.

    Attributes:
        started: When it began, by ``time.perf_counter``.
        seconds: Seconds by phase: ``prefill`` by the source, ``translate``, and what the target
            reads itself, ``native``.
        received: What came over the network meanwhile; None if nothing did.
    """

    def __init__(self, started: float | None = None) -> None:
        self.started = self._last = time.perf_counter() if started is None else started
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.received: Any = None

    @property
    def passed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def during(self, steps: Generator[None, None, R]) -> Generator[None, None, R]:
        """The same steps; what others do between them is not booked."""
        with contextlib.closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    found: R = end.value
                    return found
                left = time.perf_counter()
                yield
                pause = time.perf_counter() - left
                self.started, self._last = self.started + pause, self._last + pause
