"""The verb `serve` in a process of its own, with real models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.support import ROOT

# The zoo's models begin no reasoning trace then.
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    @property
    def openai(self) -> Any:
        """OpenAI's client of it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def status(self) -> Any:
        """What the worker holds."""
        return httpx.get(f"{self.url}/v1/status").json()

    def ready(self) -> None:
        """Wait until the models can answer."""
        for _ in range(600):
            if httpx.get(f"{self.url}/health").json().get("status") == "ok":
                return
            time.sleep(0.1)
        raise AssertionError("the server did not become ready")

    def worker(self) -> int:
        """The process that owns the models."""
        command = ["pgrep", "-f", "-P", str(self.process.pid), "spawn_main"]
        (line,) = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return int(line)


@contextmanager
def served(home: Path, models: Mapping[str, Path], *options: str) -> Iterator[Server]:
    """A server of these models, ready; its store and conversations are in ``home``."""
    named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlingo_mlx.cli", "serve", *named, "--port", "0", *options],
        cwd=ROOT,
        env={**os.environ, "KVLINGO_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    server = Server(re.findall(r"a chat at (http://\S+?)/ ", line)[0], process)
    try:
        server.ready()
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
