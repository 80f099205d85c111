"""The APIs that clients speak: a request is read, events become its answer.

Each API has a file with one object ``API``. Nothing here waits or sends.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvlingo_mlx.serving.messages import Event, Failure, GenerationRequest, TokenLogprob, Usage


class BadRequest(Exception):
    """A request that no answer can be given to: why, in one line, and the path of the field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status


class Answer(Protocol):
    """What a client gets for one request; it is told every event in order."""

    def take(self, event: Event) -> list[str]:
        """The frames of a stream that this event makes; none for most while a prompt is read.

        Call it for every event, also if the client does not stream.
        """

    def keep_alive(self) -> str:
        """A frame that says no more than that the stream is open."""

    def body(self) -> dict[str, Any]:
        """The whole answer, for a client that does not stream; after the last event."""


@dataclass(frozen=True)
class Incoming:
    """One request, understood."""

    ask: GenerationRequest
    stream: bool
    answer: Answer


# ---- failures -----------------------------------------------------------------------------------


class FailureKind(NamedTuple):
    """A kind of failure in HTTP and in the words of both APIs."""

    status: int
    openai: str
    code: str | None
    anthropic: str


_INVALID = "invalid_request_error"
KINDS = {  # of Failure.kind
    "invalid": FailureKind(400, _INVALID, None, _INVALID),
    "too_long": FailureKind(400, _INVALID, "context_length_exceeded", _INVALID),
    "unauthorized": FailureKind(401, _INVALID, "invalid_api_key", "authentication_error"),
    "forbidden": FailureKind(403, _INVALID, "forbidden", "permission_error"),
    "not_found": FailureKind(404, _INVALID, "model_not_found", "not_found_error"),
    "timeout": FailureKind(408, _INVALID, "timeout", _INVALID),
    "too_large": FailureKind(413, _INVALID, "request_too_large", "request_too_large"),
    "busy": FailureKind(429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    "unready": FailureKind(503, "server_error", "server_unready", "overloaded_error"),
    "memory": FailureKind(503, "server_error", "out_of_memory", "overloaded_error"),
    "crashed": FailureKind(503, "server_error", "worker_crashed", "api_error"),
    "internal": FailureKind(500, "server_error", None, "api_error"),
}


def openai_error(failed: Failure) -> tuple[int, dict[str, Any]]:
    """A failure in the form of OpenAI's APIs: status and body."""
    kind = KINDS.get(failed.kind, KINDS["internal"])
    error = {"message": failed.message, "type": kind.openai, "param": failed.param}
    return kind.status, {"error": {**error, "code": kind.code}}


def anthropic_error(failed: Failure) -> tuple[int, dict[str, Any]]:
    """A failure in the form of Anthropic's API: status and body."""
    kind = KINDS.get(failed.kind, KINDS["internal"])
    error = {"type": kind.anthropic, "message": failed.message}
    return kind.status, {"type": "error", "error": error}


# ---- parts of answers ---------------------------------------------------------------------------


def frame(data: dict[str, Any] | str, event: str | None = None) -> str:
    """One server-sent event, with its blank line."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"


def extension(usage: Usage) -> dict[str, Any]:
    """What ``usage.kvlingo`` tells: where the prompt's tokens came from, and the times."""
    counted = {"prompt_tokens", "completion_tokens", "reasoning_tokens"}
    return {name: value for name, value in vars(usage).items() if name not in counted}


def openai_usage(usage: Usage) -> dict[str, Any]:
    """``usage`` as chat completions and completions have it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "kvlingo": extension(usage),
    }


def finite(logprob: float) -> float:
    """A log probability that JSON can hold; OpenAI writes -9999 for what never happens."""
    return logprob if math.isfinite(logprob) else -9999.0


def openai_logprobs(tokens: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens' log probabilities as OpenAI has them, with the ids that mlx-lm's server adds."""

    def entry(text: str, token: int, logprob: float) -> dict[str, Any]:
        spelt = list(text.encode("utf-8", "replace"))
        return {"token": text, "id": token, "logprob": finite(logprob), "bytes": spelt}

    return [
        {**entry(t.text, t.token, t.logprob), "top_logprobs": [entry(*top) for top in t.top]}
        for t in tokens
    ]


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments as an object that JSON can hold."""
    try:
        found = json.loads(call["function"]["arguments"], parse_constant=str)
    except (ValueError, RecursionError):
        return {}
    # A text may spell half of a character that UTF-8 cannot.
    whole = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
    return found if isinstance(found := json.loads(whole), dict) else {}
