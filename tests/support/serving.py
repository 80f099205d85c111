"""A server whose engine runs scripts instead of models, and an API that is only for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from kvlingo_mlx.serving import server
from kvlingo_mlx.serving.engine_thread import EngineThread
from kvlingo_mlx.serving.messages import (
    Delta,
    Event,
    Failure,
    Finished,
    GenerationRequest,
    TokenCount,
)
from kvlingo_mlx.serving.settings import Settings
from kvlingo_mlx.serving.wire import BadRequest, openai_error
from kvlingo_mlx.serving.wire.requests import Incoming
from tests.support.scripted_engine import ENGINE, TOLD


class PlainAnswer:
    """Texts as frames."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def take(self, event: Event) -> list[str]:
        self.events.append(event)
        match event:
            case Delta(content):
                return [f"data: {content}\n\n"]
            case Failure(kind):
                return [f"data: failed {kind}\n\n"]
            case Finished():
                return ["data: [DONE]\n\n"]
        return []

    def keep_alive(self) -> str:
        return ": still here\n\n"

    def body(self) -> dict[str, Any]:
        if isinstance(self.events[-1], TokenCount):
            return {"input_tokens": self.events[-1].tokens}
        return {"text": "".join(e.content for e in self.events if isinstance(e, Delta))}


class PlainApi:
    """A body of model, prompt and stream."""

    paths: tuple[str, ...] = ("/v1/plain", "/plain")
    streamed: tuple[str, ...] = ()

    def read(self, body: Any) -> Incoming:
        if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
            raise BadRequest("prompt is no text; give one", "prompt", 422)
        ask = GenerationRequest(str(body.get("model", "small")), prompt=body["prompt"])
        answer: Any = PlainAnswer()
        return Incoming(ask, bool(body.get("stream")), answer)

    def error(self, failed: Failure) -> tuple[int, dict[str, Any]]:
        status, body = openai_error(failed)
        return status, {"plain": body["error"]}


class PlainCount(PlainApi):
    """Counts a prompt."""

    paths = ("/v1/plain/count",)

    def read(self, body: Any) -> Incoming:
        incoming = PlainApi.read(self, body)
        return replace(incoming, ask=replace(incoming.ask, count=True), stream=False)


API = PlainApi()
PLAIN = (API, PlainCount())


class Running:
    """A server in a thread of the test's process, over a scripted engine."""

    def __init__(self, settings: Settings, spoken: Sequence[Any], engine: str) -> None:
        self.settings = settings
        self.engine = EngineThread(settings, engine)
        self.server = server.Server(settings, self.engine, spoken)
        self.listener = server.bind(settings.host, settings.port)
        self.url, self.port = server.url_of(self.listener), self.listener.getsockname()[1]
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            asyncio.run(self.server.until_stopped(self.listener))
        except server.ServerError as error:
            self.error = error
        finally:
            self.listener.close()

    def told(self) -> list[list[Any]]:
        """What the engine was told, so far."""
        file = Path(self.settings.conversations or "") / TOLD
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def ask(self, script: str, **more: Any) -> httpx.Response:
        """A request of the plain API."""
        body = {"model": "small", "prompt": script, **more}
        return httpx.post(f"{self.url}/v1/plain", json=body, timeout=60)

    def send(self, script: str, stream: bool = True) -> socket.socket:
        """The connection of such a request, whose answer nobody reads."""
        body = json.dumps({"model": "small", "prompt": script, "stream": stream})
        head = f"POST /v1/plain HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        client = socket.create_connection(("127.0.0.1", self.port))
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        return client

    def until(self, true: Any, seconds: float = 30.0) -> Any:
        """What a function returns as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := true():
                return found
            time.sleep(0.02)
        raise AssertionError("did not come true in time")

    def ready(self) -> Running:
        """Wait until the engine answers."""
        self.until(lambda: self.engine.status or self.error)
        return self

    def stop(self) -> None:
        """As a signal does."""
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(
    folder: Path, spoken: Sequence[Any] = PLAIN, engine: str = ENGINE, **more: Any
) -> Iterator[Running]:
    """A server with short times, which is ready; its engine notes what it is told in a folder."""
    given: dict[str, Any] = {
        "models": {"small": "/models/a", "large": "/models/b"},
        "port": 0, "conversations": str(folder), "keep_alive": 0.3, "stop_timeout": 5.0,
    }  # fmt: skip
    found = Running(Settings(**{**given, **more}), spoken, engine)
    found.thread.start()
    try:
        yield found.ready()
    finally:
        found.stop()
