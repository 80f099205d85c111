"""How the engine's events become the response to a request: streamed, or whole."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.engine_thread import ClientGone, EngineThread, EventStream
from kvlingo_mlx.serving.messages import LAST, LEFT, Failure, FirstToken, Usage
from kvlingo_mlx.serving.metrics import HttpExchange
from kvlingo_mlx.serving.wire.requests import Api, Incoming

log = logging.getLogger("kvlingo_mlx.serving")

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy before us must not keep frames back
}
STRATEGY, FALLBACK = "x-kvlingo-strategy", "x-kvlingo-fallback"
LEFT_OUT = "x-kvlingo-left-out"  # kinds of tools
RETRY_S = "2"  # what a client is told to wait where nothing better is known


class Reply:
    """The response to one request: the engine's events in the API's form."""

    def __init__(self, engine: EngineThread, api: Api, incoming: Incoming, every: float) -> None:
        self._engine, self._api, self._incoming, self._every = engine, api, incoming, every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask, and send what comes; a client that leaves cancels the request."""
        answering = self._engine.request("ask", self._incoming.ask)
        leaving = asyncio.create_task(tell_when_left(receive, answering))
        exchanged: HttpExchange = scope["kvlingo"]
        try:
            response, exchanged.status = await self._answer(answering, exchanged, send)
            if response is not None:
                await response(scope, receive, send)
        finally:
            leaving.cancel()
            answering.close()
            _log(exchanged, self._incoming.left_out)

    async def _answer(
        self, answering: EventStream, exchanged: HttpExchange, send: Send
    ) -> tuple[Response | None, int]:
        """The answer whole, or sent as it is written; and its status.

        A stream's headers wait for the first token, or for the first keep-alive, so that a request
        that fails before has a true status.
        """
        answer, stream = self._incoming.answer, self._incoming.stream
        held: list[str] = []
        started, due = False, time.monotonic() + self._every
        while True:
            event = await answering.next(max(0.0, due - time.monotonic()) if stream else None)
            if isinstance(event, ClientGone):
                return None, LEFT
            if event is not None:
                exchanged.take(event)
            within = isinstance(event, Failure) and stream and event.kind in self._api.streamed
            if isinstance(event, Failure) and not (started or within):
                return self._failure(event)
            frames = [answer.keep_alive()] if event is None else answer.take(event)
            if not stream:
                if isinstance(event, LAST):
                    return JSONResponse(answer.body(), headers=self._told(exchanged)), 200
                continue
            held += frames
            if not started and (event is None or isinstance(event, (FirstToken, *LAST))):
                await send(_head(self._told(exchanged)))
                started = True
            if started and held and not answering.more:
                await send(_part("".join(held)))
                held, due = [], time.monotonic() + self._every
            if isinstance(event, LAST):
                await send(_part("", more=False))
                return None, self._api.error(event)[0] if isinstance(event, Failure) else 200

    def _told(self, exchanged: HttpExchange) -> dict[str, str]:
        """What headers tell: which tools are left out, and how the prompt was taken in."""
        usage, told = exchanged.usage, {LEFT_OUT: ", ".join(self._incoming.left_out)}
        if usage is not None:
            told |= {STRATEGY: usage.strategy, FALLBACK: usage.fallback or ""}
        ascii_only = ((n, printable(v).encode("ascii", "replace")) for n, v in told.items() if v)
        return {name: value.decode()[:400] for name, value in ascii_only}

    def _failure(self, failed: Failure) -> tuple[Response, int]:
        status, body = self._api.error(failed)
        return JSONResponse(body, status, retry_headers(failed)), status


async def tell_when_left(receive: Receive, answering: EventStream) -> None:
    """Put it into a request's events when its client leaves; ask before any answer is sent, too."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.put(ClientGone())


def retry_headers(failed: Failure) -> dict[str, str]:
    """What tells a client's library whether to send a request again by itself.

    One that was there when the engine failed may be why it did, so a person should decide.
    """
    if failed.kind == "crashed":
        return {"x-should-retry": "false"}
    return {"retry-after": RETRY_S} if failed.kind in ("busy", "unready", "memory") else {}


def _head(told: dict[str, str]) -> dict[str, Any]:
    headers = [(k.encode(), v.encode()) for k, v in {**STREAM_HEADERS, **told}.items()]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(text: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def _log(exchanged: HttpExchange, left_out: Sequence[str]) -> None:
    """Log an answer's numbers, and which tools its model was not shown; texts are never logged."""
    used = exchanged.usage or Usage()
    without = f"; tools left out, which only a provider runs: {', '.join(left_out)}"
    log.info(
        "%s: %s, %s; %d tokens of prompt (%d cached, %d translated, %d read), %d of answer%s",
        exchanged.model, exchanged.status, used.strategy if exchanged.usage else "no token",
        used.prompt_tokens, used.cached_tokens, used.translated_tokens, used.read_tokens,
        used.completion_tokens, printable(without) if left_out else "",
    )  # fmt: skip
