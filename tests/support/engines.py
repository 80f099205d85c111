"""A server's engine without HTTP: requests in, whole answers out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.serving import messages
from kvlingo_mlx.serving.messages import GenerationRequest
from kvlingo_mlx.serving.scheduler import Scheduler
from kvlingo_mlx.serving.settings import Settings

NAMES = {"large": "tiny-qwen3-l", "moe": "tiny-qwen3-moe", "small": "tiny-qwen3-s"}


@dataclass
class Told:
    """What a client was told."""

    events: list[messages.Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(event.content for event in self.events if isinstance(event, messages.Delta))

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, as clients keep it."""
        deltas = [event for event in self.events if isinstance(event, messages.Delta)]
        thought = "".join(delta.reasoning for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls]
        return {
            "role": "assistant",
            "content": self.text,
            **({"reasoning_content": thought} if thought else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], messages.Finished)

    @property
    def end(self) -> messages.Finished:
        assert isinstance(self.events[-1], messages.Finished), self.events[-1]
        return self.events[-1]

    @property
    def usage(self) -> messages.Usage:
        return self.end.usage

    @property
    def failed(self) -> messages.Failure:
        assert isinstance(self.events[-1], messages.Failure), self.events[-1]
        return self.events[-1]

    @property
    def begun(self) -> bool:
        return any(isinstance(event, messages.FirstToken) for event in self.events)


class Clients:
    """Sends requests to an engine, and works until they are answered."""

    def __init__(self, engine: Scheduler) -> None:
        self.engine, self._sent = engine, 0

    def send(self, ask: GenerationRequest) -> tuple[int, Told]:
        told, self._sent = Told(), self._sent + 1
        self.engine.ask(self._sent, ask, told.events.append)
        return self._sent, told

    def together(self, asks: Sequence[GenerationRequest]) -> list[Told]:
        """The answers to requests that come at once."""
        sent = [self.send(ask)[1] for ask in asks]
        self.work()
        return sent

    def one(self, model: str, messages: Sequence[dict[str, Any]], **facts: Any) -> Told:
        return self.together([asked(model, messages, **facts)])[0]

    def work(self) -> None:
        while self.engine.busy:
            self.engine.work()


def zoo_clients(folder: Path, names: Collection[str] = tuple(NAMES), **facts: Any) -> Clients:
    """Clients of an engine with models of the zoo, which keeps conversations below a folder."""
    models = {name: str(zoo(NAMES[name])) for name in names}
    given = {"models": models, "conversations": str(folder / "kept"), **facts}
    return Clients(Scheduler(Settings(**given)))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(model: str, messages: Sequence[dict[str, Any]], **facts: Any) -> GenerationRequest:
    facts = {"max_tokens": 12, "template": {"enable_thinking": False}, **facts}
    return GenerationRequest(model=model, messages=tuple(messages), **facts)


class Seen(Scheduler):
    """A server's engine that a test looks at: the one that was made last, and what it is asked."""

    now: ClassVar[Scheduler]
    asks: ClassVar[list[GenerationRequest]] = []

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        Seen.now = self

    def ask(self, number: int, ask: GenerationRequest, tell: Any) -> None:
        self.asks.append(ask)
        super().ask(number, ask, tell)


SEEN = f"{__name__}:Seen"
