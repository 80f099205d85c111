"""Ctrl-C and SIGTERM, postponed until a training has kept its work."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Interruption:
    """Whether a signal has asked this process to stop, and which one."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def error(self) -> BaseException:
        """The exception that ends the process as the signal would have done."""
        if self.signal == signal.SIGTERM:
            return SystemExit(128 + signal.SIGTERM)
        return KeyboardInterrupt()


@contextlib.contextmanager
def postponed() -> Iterator[Interruption]:
    """Record the first signal instead of raising it; a second one acts at once.

    Signals that the process ignores, for example under nohup, stay ignored. Only the main thread
    may handle signals.
    """
    received = Interruption()
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if main}

    def restore() -> None:
        for number, handler in handlers.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        received.signal = number
        restore()

    for number, handler in handlers.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
