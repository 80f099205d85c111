"""The front's side of the worker: its process, its restarts, and the events of each request.

The worker is a function that is called as ``main(connection, settings)`` in a process of its own.
The front sends it ``("ask", id, Ask | Count)``, ``("load", id, name)``, ``("unload", id, name)``,
``("cancel", id)`` and ``("stop",)``; it sends ``("event", id, Event)``, ``("status", Status)`` and,
before it ends for good, ``("fatal", message)``. The first status says that it is ready. A load or
unload ends with :class:`Ended`, :class:`Counted` or :class:`Failed`, as a request does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection as pipes
from typing import Any, Protocol

from kvlingo_mlx.serving.messages import Ask, Count, Counted, Ended, Event, Failed, Status, Waiting

log = logging.getLogger("kvlingo_mlx.serving")

WORKER = "kvlingo_mlx.serving.worker:main"
LAST = (Ended, Counted, Failed)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a crashed worker is started again
ENDING_S = 5.0  # that a process whose pipe is closed has to end
RANK = "MLX_RANK"  # which mlx.launch sets; the front imports no NumPy
CRASHES = 6  # in a row, without an answer between them: then the server gives up
# What reading a dead or dying process's pipe can raise.
BROKEN = (EOFError, OSError, pickle.UnpicklingError, AttributeError, ImportError, ValueError)


class Limits(Protocol):
    """The settings that the link itself reads."""

    @property
    def worker_timeout(self) -> float: ...
    @property
    def stop_timeout(self) -> float: ...


class ClientGone:
    """Stands in a request's events where its client has left."""


class Asked:
    """One request's events, in order. Closing it before the last one cancels the request."""

    def __init__(self, close: Callable[[Asked], None], model: str | None) -> None:
        self.model = model
        self.waiting = True  # for its first token
        self.over = False  # the last event has come
        self._close = close
        self._events: asyncio.Queue[Event | ClientGone] = asyncio.Queue()

    def put(self, event: Event | ClientGone) -> None:
        """Add an event; those after the last one are dropped."""
        if not self.over:
            self.waiting = self.waiting and isinstance(event, Waiting)
            self.over = isinstance(event, LAST)
            self._events.put_nowait(event)

    @property
    def more(self) -> bool:
        """Whether another event is there already."""
        return not self._events.empty()

    async def next(self, within: float | None = None) -> Event | ClientGone | None:
        """The next event, or None if there is none within so many seconds."""
        if self.more:
            return self._events.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                return await self._events.get()
        return None

    async def last(self) -> Event | ClientGone:
        """The event that ends the request."""
        while True:
            event = await self.next()
            if event is not None and isinstance(event, (*LAST, ClientGone)):
                return event

    def close(self) -> None:
        """Cancel the request in the worker, unless it is over."""
        self._close(self)


class Link:
    """A worker that is kept running, and the requests that it has.

    Attributes:
        status: What the worker last told of itself; None while it is not ready.
        restarts: How many times it has been started again.
        given_up: A future whose result is the one line that says why there is no worker any more.
    """

    def __init__(self, settings: Limits, entry: str = WORKER, pause: float = FIRST_PAUSE) -> None:
        self.status: Status | None = None
        self.restarts = 0
        self.given_up: asyncio.Future[str]
        self._settings, self._entry, self._pause = settings, entry, pause
        self._process: _Process | None = None
        self._asked: dict[int, Asked] = {}
        self._numbers = itertools.count(1)
        self._crashes = 0
        self._heard = 0.0
        self._fatal: str | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """Whether the worker answers."""
        return self.status is not None

    @property
    def waiting(self) -> int:
        """Requests that have no token yet."""
        return sum(asked.waiting for asked in self._asked.values())

    @property
    def asked(self) -> int:
        """Requests that are not over."""
        return len(self._asked)

    async def start(self) -> None:
        """Start the worker; it is ready when it has sent a status."""
        self.given_up = asyncio.get_running_loop().create_future()
        self._start_process()
        self._keep(self._watch())

    async def stop(self) -> None:
        """End all requests; let the worker save, and end it."""
        self._stopping = True
        self.cut()
        for task in self._tasks:
            task.cancel()
        process, self._process, self.status = self._process, None, None
        if process is None:
            return
        process.send(("stop",))
        try:
            if not await asyncio.to_thread(process.ended.wait, self._settings.stop_timeout):
                log.warning("the worker did not stop in time; what it had not saved is lost")
        finally:  # also when somebody presses Ctrl-C once more
            process.kill()

    def cut(self) -> None:
        """End all requests, since the server stops."""
        self._stopping = True
        for number in list(self._asked):
            self._send(("cancel", number))
            self._asked.pop(number).put(
                Failed("unready", "the server is stopping; send the request again when it is back")
            )

    # ---- requests ------------------------------------------------------------------------------

    def ask(self, ask: Ask | Count) -> Asked:
        """Ask the worker; what it answers is in the events of what is returned."""
        return self._request("ask", ask, ask.model if isinstance(ask, Ask) else ask.ask.model)

    def load(self, name: str) -> Asked:
        """Let the worker load a model's weights."""
        return self._request("load", name)

    def unload(self, name: str) -> Asked:
        """Let the worker give a model's memory back."""
        return self._request("unload", name)

    def _request(self, verb: str, value: Any, model: str | None = None) -> Asked:
        number = next(self._numbers)
        asked = Asked(lambda _: self._forget(number), model)
        if why := self.unready():
            asked.put(why)
            return asked
        if not self._asked:
            self._heard = time.monotonic()  # silence counts from here
        self._asked[number] = asked
        asked.waiting = verb == "ask"
        self._send((verb, number, value))
        return asked

    def unready(self) -> Failed | None:
        """Why nothing can be asked now; None if it can."""
        if self._stopping:
            return Failed(
                "unready", "the server is stopping; send the request again when it is back"
            )
        if self.given_up.done():
            return Failed("crashed", self.given_up.result())
        if self.status is None:
            crashed = "crashed and is started again" if self._crashes else "is being started"
            return Failed("unready", f"the worker that runs the models {crashed}; try again soon")
        return None

    def _forget(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._send(("cancel", number))

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._process is not None:
            self._process.send(message)

    # ---- the worker's life ---------------------------------------------------------------------

    def _start_process(self) -> None:
        loop = asyncio.get_running_loop()

        def tell(process: _Process, message: tuple[Any, ...] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(self._told, process, message)

        self._process = _Process(self._entry, self._settings, tell)

    def _told(self, process: _Process, message: tuple[Any, ...] | None) -> None:
        """Heed a message; None says that the process has ended."""
        if process is not self._process:
            return
        self._heard = time.monotonic()
        match message:
            case None:
                self._lost(process.how_ended())
            case ("event", int(number), event):
                self._came(number, event)
            case ("status", Status() as status):
                if self.status is None:
                    log.info("the worker is ready: %s", ", ".join(m.name for m in status.models))
                self.status = status
            case ("fatal", str(why)):
                self._fatal = why
            case _:
                log.error("the worker sent something unknown (%s)", type(message).__name__)

    def _came(self, number: int, event: Event) -> None:
        if isinstance(event, Ended):
            self._crashes = 0
        asked = self._asked.get(number)
        if asked is not None:  # else it was cancelled meanwhile
            asked.put(event)
            if asked.over:
                del self._asked[number]

    def _lost(self, how: str) -> None:
        """End all requests, and start the worker again or give up."""
        self.status, self._process = None, None
        again = "" if self._fatal else "; it is started again, so send the request again"
        for number in list(self._asked):
            self._asked.pop(number).put(
                Failed("crashed", f"the worker that runs the models crashed ({how}){again}")
            )
        if self._stopping or self.given_up.done():
            return
        self._crashes += 1
        if self._fatal is not None:
            self.given_up.set_result(self._fatal)
        elif RANK in os.environ:  # the others cannot go on with a new one
            self.given_up.set_result(
                f"the worker that runs the models crashed ({how}), and so its ranks end; see the "
                "lines above"
            )
        elif self._crashes >= CRASHES:
            self.given_up.set_result(
                f"the worker that runs the models crashed {self._crashes} times in a row without "
                f"an answer, last by {how}; see the lines above, or start with a smaller model"
            )
        else:
            pause = min(LONGEST_PAUSE, self._pause * 2 ** (self._crashes - 1))
            log.error("the worker crashed (%s); it is started again in %g s", how, pause)
            self._keep(self._again(pause))

    async def _again(self, pause: float) -> None:
        await asyncio.sleep(pause)
        self.restarts += 1
        self._start_process()

    async def _watch(self) -> None:
        """Kill a worker that has requests and neither says nor takes anything."""
        limit = self._settings.worker_timeout
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            process, now = self._process, time.monotonic()
            if process is None:
                continue
            silent = bool(self._asked) and now - self._heard > limit
            deaf = process.sending_since is not None and now - process.sending_since > limit
            if silent or deaf:
                log.error("the worker has been %s for %g s", "silent" if silent else "deaf", limit)
                process.hung = True
                process.kill()

    def _keep(self, work: Any) -> None:
        """Run a task that lives as long as the link."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


Tell = Callable[["_Process", tuple[Any, ...] | None], None]


class _Process:
    """One life of the worker: its process, and the two threads that read and write its pipe.

    Writing has a thread of its own since a pipe that nobody reads blocks. The threads end with the
    process.
    """

    def __init__(self, entry: str, settings: Any, tell: Tell) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(
            target=_run, args=(entry, theirs, settings), name="kvlingo-worker"
        )
        self._child.start()
        theirs.close()  # so that its end is seen when the process ends
        self._tell = tell
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.sending_since: float | None = None
        self.hung = False
        self.ended = threading.Event()
        threading.Thread(target=self._write, name="kvlingo-write", daemon=True).start()
        threading.Thread(target=self._read, name="kvlingo-read", daemon=True).start()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message, in its turn."""
        self._outbox.put(message)

    def kill(self) -> None:
        """End the process at once."""
        self._child.kill()

    def how_ended(self) -> str:
        """The signal or the exit status."""
        code = self._child.exitcode
        if self.hung:
            return "it hung"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit status {code}"

    def _read(self) -> None:
        ends: list[Any] = [self._pipe, self._child.sentinel]
        while self._pipe in pipes.wait(ends):  # the sentinel alone: it is dead and all is read
            try:
                message = self._pipe.recv()
            except BROKEN:
                break
            self._tell(self, message)
        self._child.join(ENDING_S)  # a pipe that is closed comes a little before the end
        self._child.kill()
        self._child.join()
        self._outbox.put(None)
        self.ended.set()
        self._tell(self, None)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            self.sending_since = time.monotonic()
            try:
                self._pipe.send(message)
            except OSError:  # it is ending, which the reader tells
                return
            self.sending_since = None
        self._pipe.close()


def _run(entry: str, pipe: Any, settings: Any) -> None:
    """Run the worker in its process; Ctrl-C is the front's, who then says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    module, _, name = entry.partition(":")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # see backend.py
    getattr(importlib.import_module(module), name)(pipe, settings)
