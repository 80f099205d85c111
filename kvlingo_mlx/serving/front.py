"""The front as a program: its socket, the HTTP server, the worker's life, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import traceback
from collections.abc import Callable
from typing import Any

import uvicorn

from kvlingo_mlx.errors import KVLingoError, MissingModelError
from kvlingo_mlx.loading.hub import SMALL_FILES, model_type, resolve
from kvlingo_mlx.serving.app import Wires, build, wires
from kvlingo_mlx.serving.guard import protocol
from kvlingo_mlx.serving.link import FIRST_PAUSE, WORKER, Link
from kvlingo_mlx.serving.settings import LOG_FORMAT, Settings

log = logging.getLogger("kvlingo_mlx.serving")

CONNECTIONS = 1000  # more at once are told 503
IDLE_S = 75  # how long a connection without a request is kept; clients' pools expect about a minute


class WorkerError(KVLingoError):
    """The worker cannot be started, or crashes whatever is done."""


def serve(
    settings: Settings,
    *,
    entry: str = WORKER,
    listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM; running answers then have a while to end.

    Args:
        settings: All that there is to tell.
        entry: The worker, as ``module:function``.
        listening: Called with the server's address as soon as there is one.

    Raises:
        MissingModelError: A model's name stands for no folder with a config; nobody has listened.
        ValueError: The address cannot be listened at.
        WorkerError: There is no worker any more.
    """
    for name in dict.fromkeys(settings.models.values()):
        model_type(resolve(name, None, SMALL_FILES, MissingModelError)[0])
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        link, spoken = Link(settings, entry, FIRST_PAUSE), wires()
        asyncio.run(Served(settings, link, spoken).until_stopped(listener, listening))


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        ValueError: There is no such host, or the port is taken or reserved.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f"--host is {host}, which is not known ({error.strerror})") from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            told = f"port {port} of {host} is in use; give another --port, or end what uses it"
        else:
            told = f"port {port} of {host} cannot be listened at ({error.strerror}); give others"
        raise ValueError(told) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def configured(app: Any, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves an application."""
    return uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=IDLE_S,
    )


class Served(uvicorn.Server):
    """uvicorn's server, with a worker that starts before it and stops after it."""

    def __init__(self, settings: Settings, link: Link, spoken: Wires) -> None:
        self._settings, self._link = settings, link
        super().__init__(configured(build(settings, link, spoken), settings))

    async def until_stopped(
        self, listener: socket.socket, listening: Callable[[str], None] = lambda url: None
    ) -> None:
        """Serve at a bound socket.

        Raises:
            WorkerError: There is no worker any more.
        """
        await self._link.start()
        self._link.given_up.add_done_callback(lambda _: setattr(self, "should_exit", True))
        try:
            listening(url_of(listener))
            await self.serve(sockets=[listener])
        finally:
            await self._link.stop()
        if self._link.given_up.done():
            raise WorkerError(self._link.given_up.result())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end for a while, then end them and the worker, which saves.

        The worker stops here, before uvicorn raises the signal again that it was ended by.
        """
        loop, limit = asyncio.get_running_loop(), self._settings.stop_timeout
        if number := self._link.asked:
            answers = "an answer" if number == 1 else f"{number} answers"
            log.warning(
                "waiting for %s to end, at most %g s; Ctrl-C again ends them", answers, limit
            )
        cut = loop.call_later(limit, self._link.cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            await self._link.stop()


class NoContents(logging.Filter):
    """Replaces an exception in a log by its type and place, since its text may quote a prompt."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, and keep it."""
        if record.exc_info and record.exc_info[1] is not None:
            error, record.exc_info, record.exc_text = record.exc_info[1], None, None
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            places = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(frames))
            record.msg = f"{record.getMessage().strip()}: {type(error).__name__} at {places}"
            record.args = ()
        return True


def log_to_stderr(level: str) -> None:
    """Log this package's and uvicorn's messages to standard error, one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    handler.addFilter(NoContents())
    for name in ("kvlingo_mlx.serving", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    if level != "debug":  # uvicorn's milestones and accesses: ours tell what matters of them
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.WARNING)
