"""The engine in a thread of its own: requests go in by one queue, each answer's events come by one.

HTTP runs in the main thread and answers while the engine computes, since MLX lets go of Python's
lock meanwhile. On several machines, each round begins with a message of the first one's: what
clients sent, and the time. So all decide alike.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import itertools
import logging
import pickle
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.serving import clock
from kvlingo_mlx.serving.messages import LAST, Event, Failure, Progress, Status, TokenCount
from kvlingo_mlx.serving.settings import Settings

log = logging.getLogger("kvlingo_mlx.serving")

ENGINE = "kvlingo_mlx.serving.scheduler:Scheduler"  # imported in its thread, and MLX with it
STATUS_S = 1.0  # how often the status is renewed while there is work
IDLE_S = 5.0  # and how often idle conversations are looked after
PAUSE_S = 0.05  # how long several machines pause between two idle rounds
SWITCH_S = 0.001  # for which the engine's Python may keep HTTP waiting
STOPPING = Failure("unready", "the server is stopping; send the request again when it is back")


class ClientGone:
    """Stands in a request's events where its client has left."""


class EventStream:
    """One request's events, in order; closing it before the last one cancels the request."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self.waiting = True  # for its first token
        self.over = False  # the last event has come
        self._events: asyncio.Queue[Event | ClientGone] = asyncio.Queue()

    def put(self, event: Event | ClientGone) -> None:
        """Add an event; those after the last one are dropped."""
        if not self.over:
            self.waiting = self.waiting and isinstance(event, Progress)
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


class EngineThread:
    """An engine, its thread, and the requests that it has.

    Args:
        engine: The engine's class, as ``module:name``.
        restarts: How many servers before this one have crashed.
    """

    def __init__(self, settings: Settings, engine: str = ENGINE, restarts: int = 0) -> None:
        self.status: Status | None = None  # None until the models are opened
        self.restarts = restarts
        self.ended: asyncio.Future[str]  # why the engine has ended, unless it was stopped
        self.fatal = False  # whether another engine would end alike
        self._settings, self._entry = settings, engine
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._answering: dict[int, EventStream] = {}
        self._numbers = itertools.count(1)
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None  # none where the first machine leads
        self._thread = threading.Thread(target=self._run, name="kvlingo-engine", daemon=True)
        self._shown = 0.0

    def start(self) -> None:
        """Start the engine; its models can answer when there is a status."""
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    async def stop(self) -> None:
        """End all requests and let the engine save, if it does so in time."""
        self.cut()
        self._inbox.put(("stop",))
        await asyncio.to_thread(self._thread.join, self._settings.stop_timeout)
        if self._thread.is_alive():
            log.warning("the engine did not stop in time; what it had not saved is lost")

    def cut(self, why: Failure = STOPPING) -> None:
        """End all requests."""
        self._stopping = True
        for number in list(self._answering):
            self._inbox.put(("cancel", number))
            self._answering.pop(number).put(why)

    @property
    def waiting(self) -> int:
        """Requests that have no token yet."""
        return sum(each.waiting for each in self._answering.values())

    @property
    def requests(self) -> int:
        """Requests that are not over."""
        return len(self._answering)

    def request(self, verb: str, value: Any) -> EventStream:
        """Have something done; the events of what is returned say what comes of it.

        Args:
            verb: "ask" for an answer; "load" a model's weights or "unload" them, which ends with
                :class:`TokenCount` or :class:`Failure`.
            value: A :class:`GenerationRequest`, or a model's name.
        """
        number = next(self._numbers)
        answering = EventStream(lambda: self._forget(number))
        if why := self.unready():
            answering.put(why)
            return answering
        self._answering[number] = answering
        answering.waiting = verb == "ask"
        self._inbox.put((verb, number, value))
        return answering

    def unready(self) -> Failure | None:
        """Why nothing can be asked now; None if it can."""
        if self._stopping:
            return STOPPING
        if self.status is None:
            crashed = "crashed and is started again" if self.restarts else "is being started"
            return Failure("unready", f"the server {crashed}, its models open; try again soon")
        return None

    def _forget(self, number: int) -> None:
        if self._answering.pop(number, None) is not None:
            self._inbox.put(("cancel", number))

    def _arrived(self, number: int, event: Event) -> None:
        if (answering := self._answering.get(number)) is not None:  # else it was cancelled
            answering.put(event)
            if answering.over:
                del self._answering[number]

    def _lost(self, why: str, fatal: bool) -> None:
        self.fatal = fatal
        self.cut(Failure("crashed", f"the server crashed ({why}) and is started again"))
        if not self.ended.done():
            self.ended.set_result(why)

    def follow(self) -> None:
        """Serve on a machine that is not the first, which tells it all that clients ask.

        Raises:
            KVLingoError, ValueError: A model cannot be opened, or the first has ended.
        """
        warnings.showwarning = lambda *_, **__: None  # which the first tells, too
        self._rounds(self._engine())

    def _engine(self) -> Any:
        module, _, name = self._entry.partition(":")
        return getattr(importlib.import_module(module), name)(self._settings)

    def _run(self) -> None:
        warnings.showwarning = lambda message, *_, **__: log.warning("%s", message)
        try:
            engine = self._engine()
        except (KVLingoError, ValueError, OSError) as error:
            self._call(self._lost, str(_elsewhere(error) or error), True)
            return
        try:
            self._rounds(engine)
        except Exception as error:
            if (lost := _elsewhere(error)) is None:
                log.exception("the engine failed")
            self._call(self._lost, str(lost or type(error).__name__), lost is not None)

    def _rounds(self, engine: Any) -> None:
        """Take what clients send, and work in between, until it is said to stop."""
        engine.pool.between = lambda: self._show(engine)  # a long load is not a hang
        self._show(engine, now=True)
        log.info("ready: %s", ", ".join(model.name for model in engine.status().models))
        try:
            more = False
            while True:
                idle = PAUSE_S if engine.group.several else IDLE_S
                for message in self._messages(engine, 0 if engine.busy or more else idle):
                    if message == ("stop",):
                        return engine.close()
                    self._carry_out(engine, *message)
                if engine.busy:
                    engine.work()
                more = not engine.busy and engine.use_idle_time()
                self._show(engine, now=not (engine.busy or more or engine.group.several))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _messages(self, engine: Any, wait: float) -> list[tuple[Any, ...]]:
        """What clients have sent, waiting at most so long for the first message."""
        found = list[tuple[Any, ...]]()
        if wait:
            faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get(timeout=0 if found else wait))
        if wait:
            self._watch_from_now()
        if not engine.group.several:
            return found
        sent = engine.group.firsts(lambda: pickle.dumps((time.time(), found)).hex())
        seconds, found = pickle.loads(bytes.fromhex(sent))
        clock.set_round(seconds)
        return found

    def _carry_out(self, engine: Any, verb: str, number: int, value: Any = None) -> None:
        def tell(event: Event) -> None:
            self._call(self._arrived, number, event)

        if verb == "ask":
            engine.ask(number, value, tell)
        elif verb == "cancel":
            engine.cancel(number)
        else:
            try:
                getattr(engine, verb)(value)
                self._show(engine, now=True)
                tell(TokenCount(0))
            except (KVLingoError, ValueError, RuntimeError) as error:
                tell(Failure("memory", str(error)))

    def _show(self, engine: Any, now: bool = False) -> None:
        """Renew the status now and then, and show that the engine does not hang."""
        if now or time.monotonic() - self._shown > STATUS_S:
            self._shown, self.status = time.monotonic(), engine.status()
            self._watch_from_now()

    def _watch_from_now(self) -> None:
        """End the process if this is not called again in time; no thread can keep it from that."""
        faulthandler.dump_traceback_later(self._settings.worker_timeout, exit=True, file=2)

    def _call(self, function: Callable[..., None], *given: Any) -> None:
        """Let HTTP's thread call a function, unless it is gone."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *given)


def _elsewhere(error: Exception) -> KVLingoError | None:
    """What is to be said of an error where it shows that another machine has ended; else None."""
    from kvlingo_mlx.machines import lost

    return lost(error)
