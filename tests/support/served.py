"""The verb `serve` in a process of its own, with real models."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.support import ROOT
from tests.support.processes import WITHOUT_TORCH, free_ports, until

ZOO = {"large": "tiny-qwen3-l", "moe": "tiny-qwen3-moe"}  # what ``zoo_server`` offers
# The zoo's models begin no reasoning trace then.
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}

# The command of mlx-lm's own server.
THEIRS = [sys.executable, "-c", f"{WITHOUT_TORCH}from mlx_lm.server import main; main()"]


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]
    until = staticmethod(until)

    @property
    def openai(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def status(self) -> Any:
        return httpx.get(f"{self.url}/v1/status").json()["worker"]

    def ready(self) -> None:
        """Wait until the models can answer."""
        self.until(lambda: httpx.get(f"{self.url}/health").is_success)


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


@contextmanager
def of_mlx_lm(home: Path, command: Sequence[str], model: Path) -> Iterator[Server]:
    """mlx-lm's server, ready; translators are in ``home``, and what it says in a file there."""
    port = free_ports()
    words = [*command, "--model", str(model), "--port", str(port)]
    with (home / "log").open("w") as log:
        settings = {**os.environ, "KVLINGO_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(words, env=settings, stdout=log, stderr=log, text=True)
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        server.until(lambda: "Starting httpd" in (home / "log").read_text())
        server.ready()
        yield server
    finally:
        process.terminate()  # which ends it at once
        assert process.wait(timeout=10) == -signal.SIGTERM
