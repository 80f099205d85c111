"""What all answers have in common: the events of a request, gathered."""

from __future__ import annotations

import json
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
from kvlingo_mlx.version import __version__

FINGERPRINT = f"kvlingo-mlx-{__version__}"


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"


def _sendable(call: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a call in what UTF-8 can hold; a model may write half of a surrogate pair."""
    whole: dict[str, Any] = json.loads(
        json.dumps(call, ensure_ascii=False).encode(errors="replace")
    )
    return whole


class Gathered:
    """An answer so far; an API's own adds what becomes of each event."""

    def __init__(self, ask: GenerationRequest, prefix: str) -> None:
        self.id = new_id(prefix)
        self.created = int(time.time())
        self.model = ask.model
        self.begun = False
        self.waiting = Progress()
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.wants_logprobs = ask.logprobs is not None
        self.usage = Usage()
        self.ended: Finished | None = None
        self.over = False

    def take(self, event: Event) -> list[str]:
        """The frames of this event; none after the last one."""
        if self.over:
            return []
        if isinstance(event, Failure):
            self.over = True
            return self.fail(event)
        if isinstance(event, Progress):
            self.waiting = event
            return []
        if not isinstance(event, FirstToken | Delta | Finished):
            return []
        frames = [] if self.begun else self._begin(event)
        if isinstance(event, Delta):
            calls = tuple(_sendable(call) for call in event.tool_calls)
            event = replace(event, tool_calls=calls)
            self._gather(event)
            frames += self.piece(event)
        if isinstance(event, Finished):
            self.ended, self.usage, self.over = event, event.usage, True
            frames += self.end(event)
        return frames

    def _begin(self, event: Event) -> list[str]:
        self.begun = True
        if isinstance(event, FirstToken):
            self.model, self.usage = event.model, event.usage
        return self.begin()

    def _gather(self, piece: Delta) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        self.calls += [dict(call) for call in piece.tool_calls]
        self.logprobs += piece.logprobs

    @property
    def reason(self) -> str:
        """Why the answer ended."""
        return self.ended.reason if self.ended else "stop"

    def begin(self) -> list[str]:
        """The frames before the first piece."""
        raise NotImplementedError

    def piece(self, piece: Delta) -> list[str]:
        """The frames of a piece, which has been gathered."""
        raise NotImplementedError

    def end(self, ended: Finished) -> list[str]:
        """The last frames."""
        raise NotImplementedError

    def fail(self, failed: Failure) -> list[str]:
        """The frames that break a stream off."""
        raise NotImplementedError

    def keep_alive(self) -> str:
        """A comment, as mlx-lm's server sends them, with how far the prompt has been read."""
        return f": keepalive {self.waiting.done}/{self.waiting.total}\n\n"
