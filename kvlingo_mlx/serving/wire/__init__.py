"""The APIs that clients speak: a request is read, events become its answer.

Each API has a file with an object ``API``; what they share stands in ``requests`` and ``answers``,
and what clients send beside it in ``oddities``. Nothing here waits or sends.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.messages import Failure


class Refused(Exception):
    """A request that gets no answer: why, further headers, and a status if not the kind's own."""

    def __init__(
        self, failed: Failure, headers: Mapping[str, str] | None = None, status: int | None = None
    ) -> None:
        super().__init__(failed.message)
        self.failed, self.headers, self.status = failed, headers or {}, status


class BadRequest(Refused):
    """One that no answer can be given to: why, in one line, and the path of the field."""

    def __init__(self, message: str, param: str = "", **more: Any) -> None:
        super().__init__(Failure("invalid", printable(message), printable(param) or None), **more)


class FailureKind(NamedTuple):
    """A kind of failure in HTTP and in the words of both vendors' APIs."""

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


def shown(value: Any) -> str:
    """A value in a message: itself if it is short, else what kind of value it is."""
    if isinstance(value, str | bool | int | float) and len(text := json.dumps(value)) <= 40:
        return text
    kinds = {str: "a long text", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a long number")
