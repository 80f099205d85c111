"""The verb `serve` as a process, with the embedded models."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from kvlingo_mlx.embedded import zoo

MODELS = {"large": "tiny-qwen3-l", "moe": "tiny-qwen3-moe", "small": "tiny-qwen3-s"}
READY_S = 120


class Server:
    """A server that can be killed and started again at the same port.

    Args:
        folder: Its home, its conversations and its log are kept here.
        options: Further options of the verb.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.kept, self._log = folder / "kept", folder / "log"
        self._folder, self._options, self._port = folder, options, 0
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start it, and wait until its models can answer."""
        models = [part for n, f in MODELS.items() for part in ("--model", f"{n}={zoo(f)}")]
        command = [sys.executable, "-m", "kvlingo_mlx.cli", "serve", *models, *self._options]
        command += ["--port", str(self._port), "--conversations", str(self.kept)]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "KVLINGO_HOME": str(self._folder)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not (found := re.search(r"a chat at (http://\S+?:(\d+))/", line)):
            raise RuntimeError(f"the server did not start: {self.log().splitlines()[-1:]}")
        self.url, self._port = found[1], int(found[2])
        self.starts += 1
        self.ready()

    def ready(self) -> None:
        """Wait until its models can answer."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log().splitlines()[-1:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the server was not ready within {READY_S} s")

    def status(self) -> dict[str, Any]:
        """What ``/v1/status`` tells."""
        return dict(httpx.get(f"{self.url}/v1/status", timeout=60).json())

    def child(self) -> int | None:
        """The process that owns the models; None while there is none."""
        command = ["pgrep", "-f", "-P", str(self.process.pid), "spawn_main"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return int(found[0]) if found else None

    def kill(self, what: str) -> bool:
        """Kill the "server", its "parent", or "both"; whether there was one."""
        if what == "both":
            os.killpg(self.process.pid, signal.SIGKILL)
        elif what == "parent":
            self.process.kill()
        elif (number := self.child()) is None:
            return False
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if what != "server":
            self.process.wait()
        return True

    def memory(self) -> dict[str, int]:
        """The bytes in memory of both processes."""
        found = {"parent": _resident(self.process.pid)}
        if (child := self.child()) is not None:
            found["server"] = _resident(child)
        return found

    def log(self) -> str:
        """What it wrote to standard error."""
        return self._log.read_text()

    def tracebacks(self) -> int:
        """How often its log holds a traceback, or tells of a fault of the program."""
        return len(re.findall(r"Traceback|could not be answered|made a mistake", self.log()))

    def stop(self) -> int:
        """End it as Ctrl-C does; return its exit status, and leave no process behind."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
