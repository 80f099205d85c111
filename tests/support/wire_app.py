"""An engine that answers requests of all APIs with planted events."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from kvlingo_mlx.serving.messages import (
    Delta,
    Event,
    Failure,
    Finished,
    FirstToken,
    GenerationRequest,
    Progress,
    TokenCount,
    TokenLogprob,
    Usage,
)
from tests.support.scripted_engine import Scripted, Tell
from tests.support.serving import Running, frames_of, running

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
    TokenLogprob(b"Hej", 5, -0.5, ((b"Hej", 5, -0.5), ("Hallå".encode(), 6, float("-inf")))),
    TokenLogprob(" då".encode(), 9, -1.0, ()),
)


def events(*pieces: Delta, reason: str = "stop", stop_text: str | None = None) -> list[Event]:
    """All events of an answer of these pieces."""
    begun = FirstToken("large", replace(USAGE, completion_tokens=0, reasoning_tokens=0))
    return [Progress(0, 0), Progress(64, 120), begun, *pieces, Finished(reason, USAGE, stop_text)]


# What is answered, by the model that is asked for; the answering one is always "large".
PLANTED: dict[str, list[Event]] = {
    "plain": events(Delta("Grüß "), Delta("Gott,\n\n"), Delta(""), Delta("data: 世界 \u2028🌍.")),
    "thinks": events(Delta(reasoning="Let me "), Delta(reasoning="see."), Delta("Four")),
    "calls": events(
        Delta(reasoning="Ask."),
        Delta("One moment."),
        Delta(tool_calls=(CALL,)),
        Delta(tool_calls=(CALL_2,)),
        reason="tool_calls",
    ),
    "cut": events(Delta("Once upon a"), reason="length"),
    "stopped": events(Delta("one, two"), stop_text="three"),
    "empty": events(),
    "json": events(Delta('{"city": '), Delta('"Malmö"}')),
    "logprobs": events(Delta("Hej då", logprobs=LOGPROBS)),
    "breaks": [*events(Delta("Well"))[:-1], Failure("crashed", "the worker stopped; ask again")],
    "long": [Failure("too_long", "the prompt has 9 tokens, expected at most 8; shorten it")],
}


class Planted(Scripted):
    """An engine whose answers are planted by the model's name; other models run scripts."""

    asks: ClassVar[list[GenerationRequest]] = []

    def ask(self, number: int, ask: GenerationRequest, tell: Tell) -> None:
        self.asks.append(ask)
        if ask.count:
            return tell(TokenCount(321))
        super().ask(number, ask, tell)

    def commands(self, ask: GenerationRequest, tell: Tell) -> Iterator[float]:
        if ask.model not in PLANTED:
            yield from super().commands(ask, tell)
        for event in PLANTED.get(ask.model, ()):
            tell(event)
            yield 0.0


@contextmanager
def planted_server(folder: Path, **more: Any) -> Iterator[Running]:
    """A server whose engine answers so."""
    models = dict.fromkeys(["small", "large", *PLANTED], "x")
    engine = "tests.support.wire_app:Planted"
    with running(folder, engine, models=models, **more) as found:
        yield found


def stream(api: Any, body: dict[str, Any], planted: Iterable[Event]) -> list[Any]:
    """The data of all frames of an answer."""
    answer = api.read(body)
    frames = [frame for event in planted for frame in answer.take(event)]
    assert all(frame.endswith("\n\n") for frame in frames)
    named = frames_of("".join(frames))
    assert all(name is None or name == data["type"] for name, data in named)
    return [data for _, data in named]


def whole(api: Any, body: dict[str, Any], planted: Iterable[Event]) -> dict[str, Any]:
    answer = api.read(body)
    for event in planted:
        answer.take(event)
    return answer.body()
