"""A server of a source in this process, and a network between it and its client that fails."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.serving import prefill, server
from kvlingo_mlx.serving.settings import Settings

PIECE = 2**16


class Offered:
    """A model that is offered on a port of this machine."""

    def __init__(self, model: LanguageModel, jobs: int = 4, **told: Any) -> None:
        settings = Settings(models={"source": "x"}, port=0, **told)
        listener = server.bind(settings.host, settings.port)
        self.port = listener.getsockname()[1]
        self.server = prefill.PrefillServer(model, settings, jobs)
        self._thread = threading.Thread(target=self.server.run, args=([listener],))
        self._thread.start()
        self.listener = listener

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def jobs(self) -> dict[str, Any]:
        return self.server.reader.jobs

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join()
        self.listener.close()


@contextlib.contextmanager
def offered(model: LanguageModel, *args: Any, **told: Any) -> Iterator[Offered]:
    found = Offered(model, *args, **told)
    try:
        yield found
    finally:
        found.stop()


class Network:
    """TCP between a client and a port, which cuts, spoils or slows what passes."""

    def __init__(self, port: int, rate: float | None = None) -> None:
        self.port, self.rate = port, rate  # bytes a second from the server to the client
        self.cut_after: Iterator[int] | None = None  # bytes between two cuts
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.events: list[tuple[int, Callable[[], None]]] = []
        self.cuts = self.passed = 0  # connections, and bytes both ways
        self._next = 0
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self, gaps: Iterator[int]) -> None:
        """Cut connections after so many bytes each."""
        self.cut_after, self._next = gaps, self.passed + next(gaps)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.port), 5)
                except OSError:
                    near.close()
                    continue
                for ends, down in (((near, far), False), ((far, near), True)):
                    threading.Thread(target=self._pump, args=(*ends, down), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(PIECE):
                data = self.spoil(data) if down else data
                whole = self._allowed(len(data))
                if down and self.rate:
                    self._wait(whole if whole is not None else len(data))
                other.sendall(data[:whole])
                if whole is not None:
                    linger = struct.pack("ii", 1, 0)  # a reset, as of a machine that vanished
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    break
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _allowed(self, count: int) -> int | None:
        """How many of so many bytes pass before a cut; None: all, and none comes."""
        due = []
        with self._lock:
            before, self.passed = self.passed, self.passed + count
            while self.events and self.events[0][0] <= self.passed:
                due.append(self.events.pop(0)[1])
            found = None
            if self.cut_after is not None and self._next <= self.passed:
                found = max(0, self._next - before)
                self.passed = before + found  # the rest is lost here
                self.cuts += 1
                gap = next(self.cut_after, None)
                self.cut_after = None if gap is None else self.cut_after
                self._next = self.passed + (gap or 0)
        for event in due:
            event()
        return found

    def _wait(self, count: int) -> None:
        """Take the time that so many bytes take."""
        assert self.rate is not None
        with self._lock:
            begun = max(self._free_at, time.monotonic())
            self._free_at = begun + count / self.rate
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))
