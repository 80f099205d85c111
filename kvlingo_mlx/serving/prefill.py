"""A source offered to other machines: facts, orders, and chunks as resources that never change.

    GET    /v1/prefill            the model's facts
    POST   /v1/prefill            an order -> its job
    GET    /v1/prefill/JOB/N      chunk N, a safetensors file; 202 while it is being read
    DELETE /v1/prefill/JOB        the job is not needed any more

A chunk has an ``ETag``, its ``Repr-Digest`` (RFC 9530) and honours ``Range`` (RFC 9110); ``Prefer:
wait=SECONDS`` (RFC 7240) says how long a client waits for it.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvlingo_mlx.errors import printable
from kvlingo_mlx.format.geometry import digest_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.remote.client import PATH
from kvlingo_mlx.remote.model import facts_of
from kvlingo_mlx.remote.order import Order
from kvlingo_mlx.serving.guard import Gate, error_handlers, read_body
from kvlingo_mlx.serving.messages import Failure
from kvlingo_mlx.serving.reader import Reader, Sealed
from kvlingo_mlx.serving.server import bind, configured, url_of
from kvlingo_mlx.serving.settings import Settings
from kvlingo_mlx.serving.wire import BadRequest, Refused

JOBS = 4
ORDER = TypeAdapter(Order)
LONGEST_WAIT = 30.0
PIECE = 2**18  # bytes that are handed to the connection at once
ONE_RANGE = re.compile(r"bytes=(\d{1,15})-")
WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,4}(?:\.\d+)?)")


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
            Route(PATH, self._begin, methods=["POST"]),
            Route(f"{PATH}/{{job}}", self._end, methods=["DELETE"]),
            Route(f"{PATH}/{{job}}/{{number:int}}", self._chunk, methods=["GET"]),
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
        return _told(self._facts)

    async def _begin(self, request: Request) -> Response:
        """A job for an order; the same order has the same one."""
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
        await self.reader.begin(order)
        return _told({"id": order.id})

    async def _end(self, request: Request) -> Response:
        """Let go of a job."""
        self.reader.end(request.path_params["job"])
        return Response(status_code=204)

    async def _chunk(self, request: Request) -> Response:
        """A chunk, or the rest of it, as soon as it is read."""
        job, number = request.path_params["job"], request.path_params["number"]
        asked = WAIT.search(request.headers.get("prefer", ""))
        seconds = min(float(asked[1]) if asked else LONGEST_WAIT, LONGEST_WAIT)
        future = self.reader.chunk(job, number)
        await asyncio.wait({future}, timeout=seconds)
        if not future.done():
            return _told({"status": "reading"}, 202)
        if (error := future.exception()) is not None:
            self.reader.end(job)
            text = printable(f"{self._facts['name']} did not read the prompt: {error}"[:400])
            raise Refused(Failure("internal", text))
        return _sent(future.result(), request)


def _told(value: Mapping[str, Any], status: int = 200) -> Response:
    body = json.dumps(value).encode()
    digest = {"repr-digest": _digest(hashlib.sha256(body).digest())}
    return Response(body, status, digest, "application/json")


def _digest(sha256: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def _sent(chunk: Sealed, request: Request) -> Response:
    """A chunk from its first byte, or from the one that was asked for if it is still the same.

    Starlette's FileResponse would do this for a file; states of prompts are in memory alone.
    """
    size, tag = len(chunk.blob), f'"{chunk.digest.hex()}"'
    headers = {"etag": tag, "repr-digest": _digest(chunk.digest), "accept-ranges": "bytes"}
    start, status = 0, 200
    asked = ONE_RANGE.fullmatch(request.headers.get("range", ""))
    if asked is not None and request.headers.get("if-range", tag) == tag:
        start, status = int(asked[1]), 206
        if start >= size:
            return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
        headers["content-range"] = f"bytes {start}-{size - 1}/{size}"
    headers["content-length"] = str(size - start)
    view = memoryview(chunk.blob)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(start, size, PIECE):
            yield bytes(view[at : at + PIECE])

    return StreamingResponse(pieces(), status, headers, "application/octet-stream")
