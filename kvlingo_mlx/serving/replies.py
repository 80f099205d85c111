"""How the engine's events become the response to a request: streamed, or whole."""

import asyncio
import logging
import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.engine_thread import ClientGone, EngineThread, EventStream
from kvlingo_mlx.serving.messages import LAST, LEFT, Failure, FirstToken
from kvlingo_mlx.serving.metrics import HttpExchange
from kvlingo_mlx.serving.wire import Refused
from kvlingo_mlx.serving.wire.answers import Gathered
from kvlingo_mlx.serving.wire.requests import Api

log = logging.getLogger("kvlingo_mlx.serving")

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy before us must not keep frames back
}
STRATEGY, FALLBACK = "x-kvlingo-strategy", "x-kvlingo-fallback"
LEFT_OUT = "x-kvlingo-left-out"  # kinds of tools


class Reply:
    """The response to one request: the engine's events in the API's form."""

    def __init__(self, engine: EngineThread, api: Api, answer: Gathered, every: float) -> None:
        self._engine, self._api, self._answer, self._every = engine, api, answer, every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask, and send what comes; a client that leaves cancels the request.

        Raises:
            Refused: It fails before anything was sent.
        """
        answering = self._engine.request("ask", self._answer.ask)
        leaving = asyncio.create_task(tell_when_left(receive, answering))
        exchanged: HttpExchange = scope["kvlingo"]
        try:
            if await self._take_all(answering, exchanged, send):
                whole = JSONResponse(self._answer.body(), headers=self._told())
                await whole(scope, receive, send)
        finally:
            leaving.cancel()
            answering.close()
            self._log(exchanged)

    async def _take_all(self, answering: EventStream, exchanged: HttpExchange, send: Send) -> bool:
        """Gather the answer, sent as it is written if it is a stream; whether to send it whole.

        A stream's headers wait for the first token, or for the first keep-alive, so that a request
        that fails before has a true status.
        """
        answer, stream = self._answer, self._answer.stream
        held: list[str] = []
        started, due = False, time.monotonic() + self._every
        while True:
            event = await answering.next(max(0.0, due - time.monotonic()) if stream else None)
            if isinstance(event, ClientGone):
                exchanged.status = LEFT
                return False
            if event is not None:
                exchanged.take(event)
            if isinstance(event, LAST):
                exchanged.status = 200
            if isinstance(event, Failure):
                exchanged.status = self._api.error(event)[0]
                if not (started or (stream and event.kind in self._api.streamed)):
                    raise Refused(event)
            held += [answer.keep_alive()] if event is None else answer.take(event)
            if not stream:
                if isinstance(event, LAST):
                    return True
                continue
            if not started and (event is None or isinstance(event, (FirstToken, *LAST))):
                await send(_head(self._told()))
                started = True
            if started and held and not answering.more:
                await send(_part("".join(held)))
                held, due = [], time.monotonic() + self._every
            if isinstance(event, LAST):
                await send(_part("", more=False))
                return False

    def _told(self) -> dict[str, str]:
        """What headers tell: which tools are left out, and how the prompt was taken in."""
        usage, told = self._answer.usage, {LEFT_OUT: ", ".join(self._answer.toolbox.left_out)}
        if self._answer.begun:
            told |= {STRATEGY: usage.strategy, FALLBACK: usage.fallback or ""}
        ascii_only = ((n, printable(v).encode("ascii", "replace")) for n, v in told.items() if v)
        return {name: value.decode()[:400] for name, value in ascii_only}

    def _log(self, exchanged: HttpExchange) -> None:
        """Log the numbers, and which tools the model was not shown; texts are never logged."""
        used, left_out = self._answer.usage, ", ".join(self._answer.toolbox.left_out)
        without = f"; tools left out, which only a provider runs: {left_out}" if left_out else ""
        log.info(
            "%s: %s, %s; %d tokens of prompt (%d cached, %d translated, %d read), %d of answer%s",
            exchanged.model, exchanged.status, used.strategy if self._answer.begun else "no token",
            used.prompt_tokens, used.cached_tokens, used.translated_tokens, used.read_tokens,
            used.completion_tokens, printable(without),
        )  # fmt: skip


async def tell_when_left(receive: Receive, answering: EventStream) -> None:
    """Put it into a request's events when its client leaves; ask before any answer is sent, too."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.put(ClientGone())


def _head(told: dict[str, str]) -> dict[str, Any]:
    headers = [(k.encode(), v.encode()) for k, v in {**STREAM_HEADERS, **told}.items()]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(text: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}
