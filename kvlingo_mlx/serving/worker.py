"""The worker's process: takes requests from the front, works, and tells what comes of it."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import maybe_set_recommended_wired_limit

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.loading import sharding
from kvlingo_mlx.serving import moment
from kvlingo_mlx.serving.engine import Engine
from kvlingo_mlx.serving.messages import Ask, Count, Counted, Event, Failed
from kvlingo_mlx.serving.settings import LOG_FORMAT, Settings

log = logging.getLogger("kvlingo_mlx.serving")

STATUS_S = 1.0  # how often the front is told how things stand while there is work
IDLE_S = 5.0  # and how often idle conversations are looked after
PAUSE_S = 0.05  # how long idle ranks pause between two rounds


def main(connection: Connection, settings: Settings) -> None:
    """Serve the front over a pipe until it says stop, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when the worker stops
    logging.basicConfig(level=settings.log_level.upper(), format=LOG_FORMAT)
    warnings.showwarning = _log_warning
    try:
        engine = Engine(settings)
    except (KVLingoError, ValueError, OSError) as error:
        connection.send(("fatal", str(sharding.lost(error) or error)))
        return
    for (source, target), way in engine.policy.ways.items():
        log.info("%s to %s: %s (%s)", source, target, way.strategy, way.why)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            _Worker(connection, engine).run()
        except (KVLingoError, RuntimeError) as error:
            if not engine.together or (lost := sharding.lost(error)) is None:
                raise
            connection.send(("fatal", str(lost)))
            return
    engine.close()


def follow(settings: Settings) -> None:
    """Serve on a rank that is not the first, which tells it all that clients ask.

    Raises:
        KVLingoError, ValueError: A model cannot be opened, or the first rank has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides when all stop
    warnings.showwarning = lambda *_, **__: None  # which it tells, too
    engine = Engine(settings)
    _Worker(None, engine).run()
    engine.close()


def _log_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line of the log, without the place in our code."""
    log.warning("%s", message)


class _Worker:
    """Takes messages and works; ``connection`` is None on a rank that follows the first one."""

    def __init__(self, connection: Connection | None, engine: Engine) -> None:
        self._pipe, self._engine = connection, engine
        self._told = 0.0
        engine.residents.between = self._tell_now_and_then  # else a long load looks like a hang

    def run(self) -> None:
        """Take what the front sends, and work in between."""
        maybe_set_recommended_wired_limit()  # once, since somebody always answers
        self._tell_status()
        healing = False
        while True:
            idle = PAUSE_S if self._engine.together else IDLE_S
            for message in self._messages(0 if self._engine.busy or healing else idle):
                if not self._take(*message):
                    return
            if self._engine.busy:
                self._engine.work()
            healing = not self._engine.busy and self._engine.heal()
            if not (self._engine.busy or healing):
                self._engine.keeper.tidy()
            if self._engine.busy or healing or self._engine.together:
                self._tell_now_and_then()
            else:
                self._tell_status()

    def _messages(self, wait: float) -> list[tuple[Any, ...]]:
        """What the front has sent, waiting at most so long for the first message."""
        found = list[tuple[Any, ...]]()
        if self._pipe is None:
            time.sleep(wait)  # MLX's ring keeps a processor busy while it waits
        while self._pipe is not None and self._pipe.poll(0 if found else wait):
            found.append(self._pipe.recv())
        if not self._engine.together:
            return found
        told: tuple[float, list[tuple[Any, ...]]]
        told = pickle.loads(sharding.gathered_bytes(pickle.dumps((time.time(), found)))[0])
        moment.tell(told[0])
        return told[1]

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._pipe is not None:
            self._pipe.send(message)

    def _take(self, what: str, *rest: Any) -> bool:
        """Do what the front says; False to stop."""
        if what == "stop":
            return False
        number = rest[0]

        def tell(event: Event) -> None:
            self._send(("event", number, event))

        if what == "ask":
            asked: Ask | Count = rest[1]
            if isinstance(asked, Count):
                self._engine.count(asked.ask, tell)
            else:
                self._engine.ask(number, asked, tell)
        elif what == "cancel":
            self._engine.cancel(number)
        else:
            try:
                (self._engine.load if what == "load" else self._engine.unload)(rest[1])
                tell(Counted(0))
            except (KVLingoError, ValueError, RuntimeError) as error:
                tell(Failed("memory", str(error)))
            self._tell_status()
        return True

    def _tell_now_and_then(self) -> None:
        if time.monotonic() - self._told > STATUS_S:
            self._tell_status()

    def _tell_status(self) -> None:
        self._told = time.monotonic()
        self._send(("status", self._engine.status()))
