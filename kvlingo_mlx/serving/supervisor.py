"""A parent that owns the listening socket, and starts the server again when it crashes.

Metal can end a process. Connections that come while none runs wait in the socket's queue.
"""

import contextlib
import logging
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from kvlingo_mlx.errors import KVLingoError

log = logging.getLogger("kvlingo_mlx.serving")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a crashed server is started again
CRASHES, SHORT_S = 6, 60.0  # so many crashes in a row, each after so short a life, are the end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ServerError(KVLingoError):
    """The server cannot be started, or crashes whatever is done."""


def supervise(
    run: Callable[..., None], listener: socket.socket, *given: Any, patience: float = 60.0
) -> None:
    """Call ``run(listener, pipe, restarts, *given)`` in a process, again after each crash.

    What ``run`` sends by the pipe before it ends is why it need not be tried again. SIGINT and
    SIGTERM end it by SIGTERM, a third one at once.

    Args:
        run: The server, importable by its name.
        listener: Its bound socket.
        *given: What else it is given.
        patience: Seconds that it has to end after a signal.

    Raises:
        ServerError: It cannot be started, or crashes again and again.
    """
    supervisor = _Supervisor(run, listener, given, patience)
    before = {number: signal.signal(number, supervisor.take) for number in SIGNALS}
    try:
        supervisor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGTERM in supervisor.signals:
        signal.raise_signal(signal.SIGTERM)


class _Supervisor:
    def __init__(self, run: Any, listener: socket.socket, given: Any, patience: float) -> None:
        self.signals: list[int] = []
        self._server, self._given, self._patience = run, (listener, given), patience
        self._child: Any = None
        self._until = float("inf")  # when a child that was told to end is killed

    def take(self, number: int, frame: object) -> None:
        """Pass a signal on."""
        self.signals.append(number)
        self._until = min(self._until, time.monotonic() + self._patience)
        if self._child is not None:
            self._child.kill() if len(self.signals) > 2 else self._child.terminate()

    def run(self) -> None:
        """Start the server until it ends well, or crashes too often."""
        crashes = restarts = 0
        while not self.signals:
            began = time.monotonic()
            code, why = self._life(restarts)
            if why is not None:
                raise ServerError(why)
            if self.signals or code == 0:
                return
            how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            crashes = crashes + 1 if time.monotonic() - began < SHORT_S else 1
            if crashes >= CRASHES:
                raise ServerError(
                    f"the server crashed {crashes} times in a row, last by {how}; see the lines "
                    "above, or start with a smaller model"
                )
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (crashes - 1))
            log.error("the server crashed (%s); it is started again in %g s", how, pause)
            restarts, again = restarts + 1, time.monotonic() + pause
            while time.monotonic() < again and not self.signals:
                time.sleep(0.1)

    def _life(self, restarts: int) -> tuple[int, str | None]:
        """One life of the server: its exit status, and why it need not be tried again."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe(duplex=False)
        listener, given = self._given
        child = context.Process(target=self._server, args=(listener, theirs, restarts, *given))
        # A terminal's Ctrl-C goes to both, and is this process's to pass on.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        child.start()
        self._child = child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        if self.signals:
            child.terminate()
        while child.exitcode is None:
            child.join(1.0)
            if time.monotonic() > self._until:
                child.kill()
        self._child = None
        with contextlib.suppress(EOFError, OSError):
            return child.exitcode, str(pipe.recv())
        return child.exitcode, None
