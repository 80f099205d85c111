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

    Signals that the process ignores, for example under nohup, stay ignored.
    """
    asked = Interruption()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {n: h for n, h in handlers.items() if h not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        asked.signal = number
        restore()

    if threading.current_thread() is not threading.main_thread():
        before.clear()  # only the main thread may handle signals
    for number in before:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        restore()
