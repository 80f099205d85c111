"""A worker of a server that runs scripts instead of models.

A request's prompt is a script of commands, separated by semicolons. It runs in the worker's
process, so that a test decides when tokens come, what fails, and how the worker dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.serving.messages import (
    Ask,
    Begun,
    Count,
    Counted,
    Ended,
    Event,
    Failed,
    ModelInfo,
    Piece,
    Status,
    Usage,
    Waiting,
)

if TYPE_CHECKING:
    from kvlingo_mlx.serving.settings import Settings

WORKER = "tests.support.scripted_worker:main"
TOLD = "told.jsonl"  # what the worker was told, in the folder of conversations
USAGE = Usage(
    prompt_tokens=100, cached_tokens=60, translated_tokens=30, read_tokens=10,
    strategy="translate", ttft_s=0.25, reread_s=4.0,
)  # fmt: skip


class Scripted:
    """The worker: it runs each request's script in a thread."""

    def __init__(self, pipe: Any, settings: Settings) -> None:
        self.pipe, self.settings = pipe, settings
        self.lock = threading.Lock()
        self.cancelled: dict[int, threading.Event] = {}
        self.loaded = dict.fromkeys(settings.models, True)
        self.usage: dict[int, Usage] = {}
        self.folder = Path(settings.conversations or "/nonexistent")

    def send(self, *message: Any) -> None:
        with self.lock, contextlib.suppress(OSError):
            self.pipe.send(message)

    def note(self, *told: Any) -> None:
        if self.folder.exists():
            with (self.folder / TOLD).open("a") as file:
                file.write(json.dumps(told) + "\n")

    def status(self) -> None:
        models = tuple(
            ModelInfo(name, path, 4096, self.loaded[name], 1_000_000, "qwen3")
            for name, path in self.settings.models.items()
        )
        pairs = (("small", "large", "translate", "receipt 0.95"),)
        self.send(
            "status",
            Status(models, bool(self.settings.routes), (2, 1), 5_000, 700, 9_000_000, 0, 0, pairs),
        )

    def run(self) -> None:
        first = self.folder / "first"
        if first.exists():  # how the worker is to begin, in each of its lives
            for command in first.read_text().split(";"):
                self.do(0, command, "")
        self.status()
        while True:
            try:
                told = self.pipe.recv()
            except EOFError:
                return self.note("end of pipe")
            match told:
                case ("ask", number, Count(ask)):
                    self.note("count", ask.model)
                    self.send("event", number, Counted(len(text_of(ask))))
                case ("ask", number, Ask() as ask):
                    self.note("ask", ask.model)
                    if text_of(ask) == "deaf":
                        time.sleep(1e6)
                    self.cancelled[number] = threading.Event()
                    threading.Thread(target=self.script, args=(number, ask), daemon=True).start()
                case ("cancel", number):
                    self.note("cancel")
                    self.cancelled.setdefault(number, threading.Event()).set()
                case ("load" | "unload" as verb, number, name):
                    self.note(verb, name)
                    self.loaded[name] = verb == "load"
                    self.send("event", number, Counted(0))
                    self.status()
                case ("stop",):
                    return self.note("stop")

    def script(self, number: int, ask: Ask) -> None:
        for command in [*text_of(ask).split(";"), "end"]:
            if self.cancelled[number].is_set():
                return
            if self.do(number, command.strip(), ask.model):
                break
        self.status()

    def do(self, number: int, command: str, model: str) -> bool:
        """Carry out a command; returns whether it was the last one."""
        word, _, rest = command.partition(" ")
        events: dict[str, Event] = {
            "begin": Begun(model, dataclasses.replace(USAGE, strategy=rest or "translate")),
            "fallback": Begun(model, dataclasses.replace(USAGE, strategy="reread", fallback=rest)),
            "say": Piece(rest),
            "waiting": Waiting(3, 10),
            "fail": Failed(rest, f"planted failure: {rest}"),
        }
        if word in ("begin", "fallback"):
            self.usage[number] = events[word].usage  # type: ignore[union-attr] # both are Begun
        usage = self.usage.get(number, USAGE)
        events["end"] = Ended("stop", dataclasses.replace(usage, completion_tokens=5))
        if word in events:
            self.send("event", number, events[word])
        elif word == "wait":
            self.cancelled.setdefault(number, threading.Event()).wait(float(rest))
        elif word == "flood":
            for _ in range(int(rest)):
                self.send("event", number, Piece("x" * 1000))
        elif word == "signal":
            os.kill(os.getpid(), signal.Signals[rest])
            time.sleep(60)  # it may reach another thread first
        elif word == "exit":
            os._exit(int(rest))
        elif word == "close":
            # Not close(): that would wait while the other thread reads.
            with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
                end.shutdown(socket.SHUT_WR)
        elif word == "fatal":
            self.send("fatal", rest)
            os._exit(1)
        return word in ("end", "fail")


def text_of(ask: Ask) -> str:
    """The script: the prompt, or the newest message."""
    if isinstance(ask.prompt, str):
        return ask.prompt
    return str((ask.messages or ({"content": ""},))[-1].get("content"))


def main(pipe: Any, settings: Settings) -> None:
    """The worker's entry."""
    Scripted(pipe, settings).run()
