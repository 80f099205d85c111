"""The server as a program: its socket, its two threads, and a graceful end."""

import asyncio
import contextlib
import errno
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import uvicorn

from kvlingo_mlx import blas
from kvlingo_mlx.errors import MissingModelError
from kvlingo_mlx.group import launched
from kvlingo_mlx.loading.hub import SMALL_FILES, model_type, resolve
from kvlingo_mlx.serving.app import build
from kvlingo_mlx.serving.engine_thread import ENGINE, EngineThread
from kvlingo_mlx.serving.guard import protocol
from kvlingo_mlx.serving.settings import LOG_FORMAT, Settings
from kvlingo_mlx.serving.supervisor import ServerError, supervise

log = logging.getLogger("kvlingo_mlx.serving")

CONNECTIONS = 1000  # more at once are told 503
IDLE_S = 75  # how long a connection without a request is kept; clients' pools expect about a minute


def serve(
    settings: Settings, *, engine: str = ENGINE, listening: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until SIGINT or SIGTERM; running answers then have a while to end.

    The server runs in a child process, which is started again if it crashes; under ``mlx.launch``
    in this one, since the others cannot go on with a new one.

    Args:
        engine: The engine's class, as ``module:name``.
        listening: Called with the server's address as soon as there is one.

    Raises:
        MissingModelError: A model's name stands for no folder with a config; nobody has listened.
        ValueError: The address cannot be listened at.
        ServerError: The server cannot begin, or crashes again and again.
    """
    for name in dict.fromkeys(settings.models.values()):
        model_type(resolve(name, None, SMALL_FILES, MissingModelError)[0])
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        listening(url_of(listener))
        if launched():
            asyncio.run(Server(settings, EngineThread(settings, engine)).until_stopped(listener))
        else:
            patience = 2 * settings.stop_timeout + 10
            supervise(_child, listener, settings, engine, patience=patience)


def follow(settings: Settings) -> None:
    """Serve on a machine of ``mlx.launch`` that is not the first.

    Raises:
        KVLingoError, ValueError: A model cannot be opened, or the first has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first decides when all stop
    EngineThread(settings).follow()


def _child(
    listener: socket.socket, pipe: Any, restarts: int, settings: Settings, engine: str
) -> None:
    """The server in a process of its own; it ends with its parent."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # see backend.py
    blas.long_run = True
    log_to_stderr(settings.log_level)
    thread = EngineThread(settings, engine, restarts)
    server = Server(settings, thread)

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True).start()
    status = 0
    try:
        asyncio.run(server.until_stopped(listener))
    except ServerError as error:
        status = 1
        if thread.fatal:
            pipe.send(str(error))
    logging.shutdown()
    os._exit(status)  # an engine that still computes would not let Python end


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        ValueError: There is no such host, or the port is taken or reserved.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f"--host is {host}, which is not known ({error.strerror})") from None
    both = family == socket.AF_INET6
    try:
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        told = f"port {port} of {host} cannot be listened at ({why}); give others"
        if error.errno == errno.EADDRINUSE:
            told = f"port {port} of {host} is in use; give another --port, or end what uses it"
        raise ValueError(told) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def configured(app: Any, settings: Settings) -> uvicorn.Config:
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


class Server(uvicorn.Server):
    """uvicorn's server, with an engine that starts before it and stops after it."""

    def __init__(self, settings: Settings, engine: EngineThread) -> None:
        self._settings, self.engine = settings, engine
        super().__init__(configured(build(settings, engine), settings))

    async def until_stopped(self, listener: socket.socket) -> None:
        """Serve at a bound socket.

        Raises:
            ServerError: The engine has ended by itself.
        """
        self.engine.start()
        self.engine.ended.add_done_callback(lambda _: setattr(self, "should_exit", True))
        try:
            await self.serve(sockets=[listener])
        finally:
            await self.engine.stop()
        if self.engine.ended.done():
            raise ServerError(self.engine.ended.result())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end for a while, then end them."""
        loop, limit = asyncio.get_running_loop(), self._settings.stop_timeout
        if number := self.engine.requests:
            answers = "an answer" if number == 1 else f"{number} answers"
            log.warning(
                "waiting for %s to end, at most %g s; Ctrl-C again ends them", answers, limit
            )
        cut = loop.call_later(limit, self.engine.cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End well at a first signal, at once at a second one; none of them is raised again."""
        self.force_exit, self.should_exit = self.should_exit, True


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
