"""A source offered to other machines.

    GET   /v1/prefill    the model's facts
    POST  /v1/prefill    an order -> its chunks, each as soon as it is read

An answer is a stream of frames (:mod:`kvlingo_mlx.remote.frames`).
"""

import contextlib
import json
import socket
from collections.abc import Callable

import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvlingo_mlx.format.geometry import digest_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.remote import frames
from kvlingo_mlx.remote.client import PATH
from kvlingo_mlx.remote.model import facts_of
from kvlingo_mlx.remote.order import Order
from kvlingo_mlx.serving.guard import Gate, error_handlers, read_body
from kvlingo_mlx.serving.reader import Reader
from kvlingo_mlx.serving.server import bind, configured, url_of
from kvlingo_mlx.serving.settings import Settings
from kvlingo_mlx.serving.wire import BadRequest

JOBS = 4
ORDER = TypeAdapter(Order)


def serve(
    model: LanguageModel,
    settings: Settings,
    jobs: int = JOBS,
    listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Offer a loaded source until SIGINT or SIGTERM.

    Args:
        model: The source.
        settings: The address, the key and the limits of a server.
        jobs: Prompts that are read at once, in turns; more are told 503.
        listening: Called with the server's address as soon as there is one.

    Raises:
        ValueError: The address cannot be listened at.
    """
    if jobs < 1:
        raise ValueError(f"max_jobs is {jobs}; give 1 or more")
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        server = PrefillServer(model, settings, jobs)
        listening(url_of(listener))
        server.run([listener])


class PrefillServer(uvicorn.Server):
    """uvicorn's server over a loaded source; those who wait for a chunk hear that it stops."""

    def __init__(self, model: LanguageModel, settings: Settings, jobs: int = JOBS) -> None:
        self._facts, self._settings = facts_of(model), settings
        self.reader = Reader(model, digest_of(self._facts), jobs)
        routes = [
            Route(PATH, self._tell_facts, methods=["GET"]),
            Route(PATH, self._read, methods=["POST"]),
        ]
        gate = Middleware(Gate, settings=settings, forms={})
        handlers = error_handlers({}, f"GET {PATH}")
        app = Starlette(routes=routes, middleware=[gate], exception_handlers=handlers)
        super().__init__(configured(app, settings))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.reader.stop()
        await super().shutdown(sockets)

    async def _tell_facts(self, request: Request) -> Response:
        """What a client must know of the model before it asks for states."""
        told = json.dumps(self._facts).encode()
        return Response(frames.head("", frames.CHUNK, told) + told)

    async def _read(self, request: Request) -> Response:
        """The chunks of an order."""
        body = await read_body(request, self._settings)
        try:
            order = ORDER.validate_json(bytes(body), strict=True)
            order.check()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(map(str, first["loc"]))
            raise BadRequest(f"an order's {path}: {first['msg']}") from None
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return _Chunks(self.reader, order)


class _Chunks(StreamingResponse):
    """The chunks of an order, until its client leaves."""

    def __init__(self, reader: Reader, order: Order) -> None:
        self._reader, self._job = reader, reader.begin(order, self)
        super().__init__(
            reader.frames(self._job, order, self), media_type="application/octet-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reader.leave(self._job, self)
