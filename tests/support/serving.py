"""A server whose engine runs scripts instead of models, each the prompt of a completion."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from kvlingo_mlx.serving import server
from kvlingo_mlx.serving.engine_thread import EngineThread
from kvlingo_mlx.serving.settings import Settings
from tests.support.processes import until
from tests.support.scripted_engine import ENGINE, TOLD


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


def texts(stream: str) -> list[str]:
    """What the frames of a completion's stream tell: pieces of text, a failure's code, the end."""
    told = []
    for _, frame in frames_of(stream):
        if frame == "[DONE]" or "error" in frame:
            told.append(frame if frame == "[DONE]" else frame["error"]["code"])
        elif text := frame["choices"][0]["text"]:
            told.append(text)
    return told


class Running:
    """A server in a thread of the test's process, over a scripted engine."""

    until = staticmethod(until)

    def __init__(self, settings: Settings, engine: str) -> None:
        self.settings = settings
        self.engine = EngineThread(settings, engine)
        self.server = server.Server(settings, self.engine)
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
        body = {"model": "small", "prompt": script, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def send(self, script: str, stream: bool = True) -> socket.socket:
        """The connection of such a request, whose answer nobody reads."""
        body = json.dumps({"model": "small", "prompt": script, "stream": stream})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        client = socket.create_connection(("127.0.0.1", self.port))
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        return client

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
def running(folder: Path, engine: str = ENGINE, **more: Any) -> Iterator[Running]:
    """A server with short times, which is ready; its engine notes what it is told in a folder."""
    given: dict[str, Any] = {
        "models": {"small": "/models/a", "large": "/models/b"},
        "port": 0, "conversations": str(folder), "keep_alive": 0.3, "stop_timeout": 5.0,
    }  # fmt: skip
    found = Running(Settings(**{**given, **more}), engine)
    found.thread.start()
    try:
        yield found.ready()
    finally:
        found.stop()
