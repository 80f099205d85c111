"""Who may ask, how much, and how slowly: keys, hosts and origins, bodies, slow clients."""

import asyncio
import contextlib
import hmac
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvlingo_mlx.serving.messages import LEFT, Failure
from kvlingo_mlx.serving.settings import API_KEY, Settings, is_loopback
from kvlingo_mlx.serving.wire import BadRequest, Refused, openai_error
from kvlingo_mlx.tokenization.chat_messages import repaired

OPEN = ("/", "/page/chat.js", "/page/chat.css", "/health", "/health/live")  # without a key
CHARSET = re.compile(r"charset=\W?(iso-8859-1|latin-?1|cp1252)\b", re.IGNORECASE)
DRAIN_S = 1.0  # how long a body that is too large is still taken, so that its sender hears why


# How the API of a path tells of a failure, by status and body; other paths do it as OpenAI's.
Forms = Mapping[str, Callable[[Failure], tuple[int, dict[str, Any]]]]
RETRY_S = "2"  # what a client is told to wait where nothing better is known


def refusal(forms: Forms, path: str, refused: Refused) -> Response:
    status, body = forms.get(path, openai_error)(refused.failed)
    headers = {**_retry_headers(refused.failed.kind), **refused.headers}
    return JSONResponse(body, refused.status or status, headers)


def _retry_headers(kind: str) -> dict[str, str]:
    """What tells a client's library whether to send a request again by itself.

    One that was there when the engine failed may be why it did, so a person should decide.
    """
    if kind == "crashed":
        return {"x-should-retry": "false"}
    return {"retry-after": RETRY_S} if kind in ("busy", "unready", "memory") else {}


class Gate:
    """Refuses requests without the key, and those that another site's page makes in a browser."""

    def __init__(self, app: ASGIApp, settings: Settings, forms: Forms) -> None:
        self._app, self._settings, self._forms = app, settings, forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except Refused as refused:
                app = refusal(self._forms, scope["path"], refused)
        await app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self._settings.api_key is None:
            self._check_site(headers)
        elif path not in OPEN:
            check_key(self._settings.api_key, headers)

    def _check_site(self, headers: Headers) -> None:
        """Without a key, a browser could be led here by any page that its user visits."""
        told = self._settings
        host, origin = headers.get("host", ""), headers.get("origin")
        name = ""  # without the port
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
        if not (told.allow_anyone or is_loopback(name) or name == told.host):
            raise _forbidden(
                f"this server is named {name!r:.80} in the request's Host header and has no key; "
                f"ask for {told.host}, or start it with --api-key"
            )
        same = origin is None or urlsplit(origin).netloc == host
        if not (same or {"*", origin} & {*(told.cors or ())}):
            raise _forbidden(
                f"a page of {origin!r:.80} asks, which is not listed; start the server with --cors "
                "and that origin to allow it"
            )


def check_key(key: str, headers: Headers) -> None:
    """Refuse (401) a request without the key; the time that this takes does not tell the key."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else ""
    given = given or headers.get("x-api-key", "")
    if not hmac.compare_digest(given.encode(), key.encode()):
        found = "a wrong key was given" if given else "no key was given"
        message = (
            f"{found}; send `Authorization: Bearer KEY` or `x-api-key: KEY`, with the key that the "
            f"server got by --api-key or {API_KEY}"
        )
        raise Refused(Failure("unauthorized", message), {"www-authenticate": "Bearer"})


def _forbidden(message: str) -> Refused:
    return Refused(Failure("forbidden", message))


async def read_json(request: Request, settings: Settings) -> Any:
    """The parsed JSON of a request's body, as :func:`read_body`, in any encoding of Unicode.

    If it is in none, one of CHARSET counts that its headers name. Halves of surrogate pairs are
    U+FFFD.
    """
    body = await read_body(request, settings)
    encoding = request.headers.get("content-encoding", "").lower() or "identity"
    if encoding != "identity":
        body = _unpacked(body, encoding, settings.body_limit)
    try:
        text = body.decode(json.detect_encoding(body))
    except UnicodeDecodeError as error:
        if (named := CHARSET.search(request.headers.get("content-type", ""))) is None:
            how = "send UTF-8 (in PowerShell: -ContentType 'application/json; charset=utf-8')"
            raise BadRequest(f"the body is not UTF-8 ({error}); {how}") from None
        text = body.decode(named[1], "replace")
    try:
        return from_json(repaired(text), allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON ({error}); send one JSON object in UTF-8") from None


async def read_body(request: Request, settings: Settings) -> bytearray:
    """A request's body.

    Raises:
        Refused: It is too large or too slow.
        ClientDisconnect: The client left.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > settings.body_limit:
        raise _too_large(settings.body_limit)
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await _body(request, settings.body_limit)
    except TimeoutError:
        message = f"the request's body did not arrive within {settings.body_timeout:g} s"
        raise Refused(Failure("timeout", f"{message}; send it faster"), CLOSE) from None


def _unpacked(body: bytearray, encoding: str, limit: int) -> bytearray:
    """A body without its content-encoding; it may unpack to no more than a plain one has."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        message = f"content-encoding is {encoding!r:.80}, expected gzip, deflate or none; send none"
        if encoding == "zstd":
            message += " (in Codex: enable_request_compression = false below [features])"
        raise BadRequest(message, status=415)
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of either format
    try:
        found = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        message = f"the body is not {encoding} ({error}); send it as its content-encoding says"
        raise BadRequest(message) from None
    if len(found) > limit:
        raise _too_large(limit)
    return bytearray(found)


CLOSE = {"connection": "close"}  # the rest of the body is not read


async def _body(request: Request, limit: int) -> bytearray:
    body, parts = bytearray(), request.stream()
    async for part in parts:
        body += part
        if len(body) > limit:
            await _drain(parts)
            raise _too_large(limit)
    return body


async def _drain(parts: Any) -> None:
    """Take what else comes, for a moment: a sender that is cut off would not read the answer."""
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DRAIN_S):
            async for _ in parts:
                pass


def _too_large(limit: int) -> Refused:
    message = f"the request's body has more than {limit:,} bytes; send less"
    return Refused(Failure("too_large", f"{message}, or start with -c body_limit=64MB"), CLOSE)


def error_handlers(forms: Forms, instead: str) -> dict[Any, Any]:
    """Starlette's handlers of what an endpoint raises; ``instead`` says which paths there are."""

    async def refused(request: Request, error: Refused) -> Response:
        return refusal(forms, request.url.path, error)

    async def no_such(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = f"there is no {request.method} {path!r:.80}; {instead}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "POST")
            message = f"{path} takes no {request.method}; use {allowed.replace(', ', ' or ')}"
        bad = BadRequest(message, headers=error.headers, status=error.status_code)
        return refusal(forms, path, bad)

    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=LEFT)

    async def broken(request: Request, error: Exception) -> Response:  # which is logged
        message = f"the server made a mistake ({type(error).__name__}), which its log tells"
        return refusal(forms, request.url.path, Refused(Failure("internal", message)))

    return {Refused: refused, HTTPException: no_such, ClientDisconnect: left, Exception: broken}


def protocol(settings: Settings) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, which also ends connections whose client is too slow.

    uvicorn itself waits for ever for a request's headers, and for a reader that takes nothing.
    """

    class TimedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
            super().connection_made(transport)
            self.timers = dict[str, asyncio.TimerHandle]()
            self._time_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._time_headers()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._time("write", settings.write_timeout)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._time("write", None)

        def connection_lost(self, exc: Exception | None) -> None:
            self._time("write", None)
            self._time("headers", None)
            super().connection_lost(exc)

        def _time_headers(self) -> None:
            """Time the headers of the next request, from its connection or first byte on."""
            answering = self.cycle is not None and not self.cycle.response_complete
            self._time("headers", None if answering else settings.header_timeout)

        def _time(self, what: str, seconds: float | None) -> None:
            """End the connection after so many seconds, if nothing does so yet; None: do not."""
            if seconds is None and what in self.timers:
                self.timers.pop(what).cancel()
            elif seconds is not None and what not in self.timers:
                # Not closed: that would wait until what is buffered has been taken.
                self.timers[what] = self.loop.call_later(seconds, self.transport.abort)

    return TimedProtocol
