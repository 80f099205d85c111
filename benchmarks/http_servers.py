"""Servers in processes of their own, and requests that time their answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """What one streamed request brought; times in seconds."""

    text: str
    tokens: int
    first: float  # after the request was sent
    last: float
    began: float  # time.perf_counter
    facts: dict[str, Any]

    @property
    def step(self) -> float:
        """Seconds a token after the first one."""
        return (self.last - self.first) / max(1, self.tokens - 1)


class Server:
    """A server in a process of its own."""

    def __init__(self, command: Sequence[str], port: int, log: Path, step: int = 2048) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port), "--prefill-step-size", str(step)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        self.client = httpx.Client(timeout=3600)

    def ready(self) -> None:
        """Wait until it answers."""
        for _ in range(3000):
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get(f"{self.url}/health").json().get("status") == "ok":
                    return
            if self.process.poll() is not None:
                raise SystemExit(f"{' '.join(map(str, self.process.args))} ended")
            time.sleep(0.1)
        raise SystemExit(f"{self.url} did not become ready")

    def idle(self) -> None:
        """Wait until our server has nothing to do; a busy worker tells its state each second."""
        time.sleep(1.2)
        while True:
            status = self.client.get(f"{self.url}/v1/status").json()["worker"]
            if not status["running"] and not status["queued"]:
                return
            time.sleep(0.05)

    def memory(self) -> int:
        """Bytes that the server's processes hold in memory."""
        pids, kilobytes = [str(self.process.pid)], 0
        while pids:
            listed = subprocess.run(
                ["ps", "-o", "rss=", "-p", ",".join(pids)], capture_output=True, text=True
            )
            kilobytes += sum(map(int, listed.stdout.split()))
            below = ["pgrep", "-P", ",".join(pids)]
            pids = subprocess.run(below, capture_output=True, text=True).stdout.split()
        return 1024 * kilobytes

    def ask(self, model: str, prompt: str | Messages, tokens: int, **fields: Any) -> Answer:
        """Stream an answer; a string is gone on with, messages are answered."""
        path, key = ("chat/completions", "messages")
        if isinstance(prompt, str):
            path, key = ("completions", "prompt")
        body = {
            "model": model, key: prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip
        began = time.perf_counter()
        first, last, text, facts = 0.0, 0.0, "", {}
        with self.client.stream("POST", f"{self.url}/v1/{path}", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line[6:])
                if "error" in data or answer.status_code != 200:
                    raise SystemExit(line)
                for choice in data.get("choices", ()):
                    said = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    if said:
                        last = time.perf_counter() - began
                        first = first or last
                    text += said
                facts = data.get("usage") or facts
        return Answer(text, facts["completion_tokens"], first, last, began, facts)
