"""What answers of all APIs have in common: events gathered, frames, counts, log probabilities."""

import json
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvlingo_mlx.serving.messages import (
    Delta,
    Event,
    Failure,
    Finished,
    FirstToken,
    GenerationRequest,
    Progress,
    TokenLogprob,
    Usage,
)
from kvlingo_mlx.serving.wire.tools import Toolbox


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"


def frame(data: dict[str, Any] | str, event: str | None = None) -> str:
    """One server-sent event, with its blank line."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"


def extension(usage: Usage) -> dict[str, Any]:
    """What ``usage.kvlingo`` tells: where the prompt's tokens came from, and the times."""
    counted = {"prompt_tokens", "completion_tokens", "reasoning_tokens"}
    return {name: value for name, value in vars(usage).items() if name not in counted}


def finite(logprob: float) -> float:
    """A log probability that JSON can hold; OpenAI writes -9999 for what never happens."""
    return logprob if math.isfinite(logprob) else -9999.0


def logprobs_of(tokens: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens' log probabilities as OpenAI has them, with the ids that mlx-lm's server adds."""

    def entry(text: bytes, token: int, logprob: float) -> dict[str, Any]:
        shown = text.decode(errors="replace")
        return {"token": shown, "id": token, "logprob": finite(logprob), "bytes": [*text]}

    return [
        {**entry(t.text, t.token, t.logprob), "top_logprobs": [entry(*top) for top in t.top]}
        for t in tokens
    ]


class Gathered:
    """What a client gets for one request, so far; an API's own adds what becomes of each event.

    Args:
        request: The request, as its API has read it.

    Attributes:
        ask: What is asked of the engine.
        toolbox: What may be called.
        stream: Whether the answer is sent as it is written.
    """

    prefix = ""  # of its id

    def __init__(self, request: Any) -> None:
        self.request = request
        self.ask: GenerationRequest = request.ask()
        self.toolbox: Toolbox = request.toolbox
        self.stream = bool(request.stream) and not self.ask.count
        self.id = new_id(self.prefix)
        self.created = int(time.time())
        self.model = self.ask.model
        self.wants_logprobs = self.ask.logprobs is not None
        self.begun = self.over = False
        self.waiting = Progress()
        self.content = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.usage = Usage()
        self.reason = "stop"  # why it ended
        self.stop_text: str | None = None

    def take(self, event: Event) -> list[str]:
        """The frames of a stream that an event makes; none for most while a prompt is read.

        Call it for every event in order, also if the client does not stream.
        """
        if self.over:
            return []
        if isinstance(event, Failure):
            self.over = True
            return self.fail(event)
        if isinstance(event, Progress):
            self.waiting = event
        if not isinstance(event, FirstToken | Delta | Finished):
            return []
        frames = []
        if not self.begun:
            self.begun = True
            if isinstance(event, FirstToken):
                self.model, self.usage = event.model, event.usage
            frames = self.begin()
        if isinstance(event, Delta):
            calls = tuple(map(self.call, event.tool_calls))
            event = replace(event, tool_calls=calls)
            self.content += event.content
            self.reasoning += event.reasoning
            self.calls += calls
            self.logprobs += event.logprobs
            frames += self.piece(event)
        if isinstance(event, Finished):
            self.over, self.usage = True, event.usage
            self.reason, self.stop_text = event.reason, event.stop_text
            frames += self.end()
        return frames

    def call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a call in what UTF-8 can hold; a model may write half of a surrogate pair."""
        text = json.dumps(call, ensure_ascii=False).encode(errors="replace")
        copy: dict[str, Any] = json.loads(text)
        return copy

    def begin(self) -> list[str]:
        """The frames before the first piece."""
        return []

    def piece(self, piece: Delta) -> list[str]:
        """The frames of a piece, which has been gathered."""
        raise NotImplementedError

    def end(self) -> list[str]:
        """The last frames."""
        raise NotImplementedError

    def fail(self, failed: Failure) -> list[str]:
        """The frames that break a stream off."""
        raise NotImplementedError

    def keep_alive(self) -> str:
        """A comment, as mlx-lm's server sends them, with how far the prompt has been read."""
        return f": keepalive {self.waiting.done}/{self.waiting.total}\n\n"

    def body(self) -> dict[str, Any]:
        """The whole answer, for a client that does not stream; after the last event."""
        raise NotImplementedError
