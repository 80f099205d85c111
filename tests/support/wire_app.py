"""A server that answers requests of all APIs with planted events, as its own tests need it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvlingo_mlx.serving.messages import (
    Ask,
    Begun,
    Counted,
    Ended,
    Event,
    Failed,
    Piece,
    TokenLogprob,
    Usage,
    Waiting,
)
from kvlingo_mlx.serving.wire import BadRequest, anthropic, chat, completions, responses

APIS = (chat.API, completions.API, anthropic.API, responses.API)
USAGE = Usage(
    prompt_tokens=120,
    completion_tokens=7,
    reasoning_tokens=2,
    cached_tokens=100,
    translated_tokens=15,
    read_tokens=5,
    strategy="translate",
    translator="small-to-large",
    translator_digest="ab12",
    ttft_s=0.25,
    queue_s=0.125,
    reread_s=9.5,
)
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Malmö", "days": 2}'},
}
CALL_2 = {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
LOGPROBS = (
    TokenLogprob("Hej", 5, -0.5, (("Hej", 5, -0.5), ("Hallå", 6, float("-inf")))),
    TokenLogprob(" då", 9, -1.0, ()),
)


def events(*pieces: Piece, reason: str = "stop", stop_text: str | None = None) -> list[Event]:
    """All events of an answer of these pieces."""
    begun = Begun("large", replace(USAGE, completion_tokens=0, reasoning_tokens=0))
    return [Waiting(0, 0), Waiting(64, 120), begun, *pieces, Ended(reason, USAGE, stop_text)]


# What is answered, by the model that is asked for; the answering one is always "large".
PLANTED: dict[str, list[Event]] = {
    "plain": events(Piece("Grüß "), Piece("Gott,\n\n"), Piece(""), Piece("data: 世界 \u2028🌍.")),
    "thinks": events(Piece(reasoning="Let me "), Piece(reasoning="see."), Piece("Four")),
    "calls": events(
        Piece(reasoning="Ask."),
        Piece("One moment."),
        Piece(tool_calls=(CALL,)),
        Piece(tool_calls=(CALL_2,)),
        reason="tool_calls",
    ),
    "one_call": events(Piece(tool_calls=(CALL,)), reason="tool_calls"),
    "cut": events(Piece("Once upon a"), reason="length"),
    "stopped": events(Piece("one, two"), stop_text="three"),
    "empty": events(),
    "json": events(Piece('{"city": '), Piece('"Malmö"}')),
    "logprobs": events(Piece("Hej då", logprobs=LOGPROBS, tokens=2)),
    "breaks": [
        *events(Piece("Well"))[:-1],
        Failed("crashed", "the worker stopped; ask again"),
    ],
    "missing": [Failed("not_found", "there is no model missing; there are plain", "model")],
    "busy": [Failed("busy", "the queue is full; ask again later")],
    "long": [Failed("too_long", "the prompt has 9 tokens, expected at most 8; shorten it")],
    "broken": [Failed("internal", "the worker failed")],
}


@dataclass
class Planted:
    """A running server, and what it was asked."""

    url: str
    asks: list[Ask] = field(default_factory=list)


def _reply(api: Any, body: Any, asks: list[Ask]) -> Response:
    try:
        incoming = api.read(body)
    except BadRequest as bad:
        _, told = api.error(Failed("invalid", bad.message, bad.param))
        return JSONResponse(told, bad.status)
    asks.append(incoming.ask)
    planted = PLANTED[incoming.ask.model]
    if isinstance(planted[0], Failed):
        status, told = api.error(planted[0])
        return JSONResponse(told, status)
    if incoming.stream:
        return StreamingResponse(_frames(incoming.answer, planted), media_type="text/event-stream")
    for event in planted:
        incoming.answer.take(event)
    last = planted[-1]
    if isinstance(last, Failed):
        status, told = api.error(last)
        return JSONResponse(told, status)
    return JSONResponse(incoming.answer.body())


def _frames(answer: Any, planted: Iterable[Event]) -> Iterator[str]:
    """All frames, with a sign of life before each event."""
    for event in planted:
        yield answer.keep_alive()
        yield from answer.take(event)


def _app(asks: list[Ask]) -> Starlette:
    def route(api: Any, path: str) -> Route:
        async def answer(request: Request) -> Response:
            return _reply(api, json.loads(await request.body()), asks)

        return Route(path, answer, methods=["POST"])

    async def count(request: Request) -> Response:
        try:
            asked = anthropic.COUNT.read(json.loads(await request.body()))
        except BadRequest as bad:
            _, told = anthropic.COUNT.error(Failed("invalid", bad.message, bad.param))
            return JSONResponse(told, bad.status)
        asks.append(asked.ask)
        return JSONResponse(anthropic.COUNT.body(Counted(321)))

    routes = [route(api, path) for api in APIS for path in api.paths]
    return Starlette(routes=[*routes, Route(anthropic.COUNT.paths[0], count, methods=["POST"])])


@contextmanager
def planted_server() -> Iterator[Planted]:
    """A server on a port of the loopback interface."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        planted = Planted(f"http://127.0.0.1:{listening.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(_app(planted.asks), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield planted
        server.should_exit = True
        thread.join(10)


def frames_of(text: str) -> list[tuple[str | None, Any]]:
    """The events of a stream, each with its name; comments are left out, [DONE] is a text."""
    found: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            named = dict(line.split(": ", 1) for line in lines)
            data = named["data"]
            found.append((named.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def stream(api: Any, body: dict[str, Any], planted: Iterable[Event]) -> list[Any]:
    """The data of all frames of an answer."""
    answer = api.read(body).answer
    frames = [frame for event in planted for frame in answer.take(event)]
    assert all(frame.endswith("\n\n") for frame in frames)
    return [data for _, data in frames_of("".join(frames))]


def whole(api: Any, body: dict[str, Any], planted: Iterable[Event]) -> dict[str, Any]:
    """The body of an answer."""
    answer = api.read(body).answer
    for event in planted:
        answer.take(event)
    return answer.body()
