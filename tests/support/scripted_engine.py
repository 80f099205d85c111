"""A server's engine that runs scripts instead of models.

A request's prompt is a script of commands, separated by semicolons, so that a test decides when
tokens come, what fails, and how the process dies.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlingo_mlx.group import ALONE
from kvlingo_mlx.serving import messages
from kvlingo_mlx.serving.messages import GenerationRequest
from kvlingo_mlx.serving.settings import Settings

ENGINE = "tests.support.scripted_engine:Scripted"
TOLD = "told.jsonl"  # what the engine was told, in the folder of conversations
USAGE = messages.Usage(
    prompt_tokens=100, cached_tokens=60, translated_tokens=30, read_tokens=10,
    strategy="translate", ttft_s=0.25, reread_s=4.0,
)  # fmt: skip
Tell = Callable[[messages.Event], None]


class Scripted:
    """A command of each request a round; a file ``first`` says how the engine begins."""

    group = ALONE

    def __init__(self, settings: Settings) -> None:
        self.settings, self.pool = settings, SimpleNamespace()
        self.loaded = dict.fromkeys(settings.models, True)
        self.scripts: dict[int, Iterator[float]] = {}
        self.due: dict[int, float] = {}
        self.folder = Path(settings.conversations or "/nonexistent")
        if (first := self.folder / "first").exists():
            word, _, rest = first.read_text().partition(" ")
            if word == "fatal":
                raise ValueError(rest)
            for seconds in self.commands(
                GenerationRequest("", prompt=first.read_text()), lambda event: None
            ):
                time.sleep(seconds)

    def note(self, *told: Any) -> None:
        if self.folder.exists():
            with (self.folder / TOLD).open("a") as file:
                file.write(json.dumps(told) + "\n")

    def status(self) -> messages.Status:
        models = tuple(
            messages.ModelInfo(name, path, 4096, self.loaded[name], 1_000_000, "qwen3")
            for name, path in self.settings.models.items()
        )
        pairs = (("small", "large", "translate", "receipt 0.95"),)
        routes = bool(self.settings.routes)
        return messages.Status(models, routes, (2, 1), 5_000, 700, 9_000_000, 0, 0, pairs)

    def ask(self, number: int, ask: GenerationRequest, tell: Tell) -> None:
        if ask.count:
            self.note("count", ask.model)
            return tell(messages.TokenCount(len(text_of(ask))))
        self.note("ask", ask.model)
        self.scripts[number], self.due[number] = self.commands(ask, tell), 0.0

    def cancel(self, number: int) -> None:
        self.note("cancel")
        self.scripts.pop(number, None)

    def load(self, name: str) -> None:
        self.loaded[name] = True

    def unload(self, name: str) -> None:
        self.loaded[name] = False

    def close(self) -> None:
        self.note("stop")

    @property
    def busy(self) -> bool:
        return bool(self.scripts)

    def use_idle_time(self) -> bool:
        return False

    def work(self) -> None:
        time.sleep(0.002)
        for number, script in list(self.scripts.items()):
            if time.monotonic() >= self.due[number]:
                seconds = next(script, None)
                self.due[number] = time.monotonic() + (seconds or 0.0)
                if seconds is None:
                    del self.scripts[number]

    def commands(self, ask: GenerationRequest, tell: Tell) -> Iterator[float]:
        """Carry out the commands; after each come the seconds until the next."""
        usage = USAGE
        for command in [*text_of(ask).split(";"), "end"]:
            word, _, rest = command.strip().partition(" ")
            if word in ("begin", "fallback"):
                usage = replace(USAGE, strategy=rest or "translate")
                if word == "fallback":
                    usage = replace(USAGE, strategy="reread", fallback=rest)
            events: dict[str, messages.Event] = {
                "begin": messages.FirstToken(ask.model, usage),
                "fallback": messages.FirstToken(ask.model, usage),
                "say": messages.Delta(rest),
                "waiting": messages.Progress(3, 10),
                "fail": messages.Failure(rest, f"planted failure: {rest}"),
                "end": messages.Finished("stop", replace(usage, completion_tokens=5)),
            }
            if word in events:
                tell(events[word])
            for _ in range(int(rest) if word == "flood" else 0):
                tell(messages.Delta("x" * 500_000))
            if word == "raise":
                raise LookupError("SECRET")
            if word == "hang":
                time.sleep(1e6)
            if word == "signal":
                os.kill(os.getpid(), signal.Signals[rest])
                time.sleep(60)  # it may reach another thread first
            if word == "exit":
                os._exit(int(rest))
            if word == "fail":
                return
            yield float(rest) if word == "wait" else 0.0


def text_of(ask: GenerationRequest) -> str:
    """The script: the prompt, or the newest message."""
    if isinstance(ask.prompt, str):
        return ask.prompt
    return str((ask.messages or ({"content": ""},))[-1].get("content"))
