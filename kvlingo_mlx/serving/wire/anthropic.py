"""Anthropic's messages, and the counting of their tokens."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from kvlingo_mlx.serving.messages import (
    Delta,
    Event,
    Failure,
    GenerationRequest,
    Message,
    TokenCount,
    Usage,
)
from kvlingo_mlx.serving.wire import anthropic_error, oddities
from kvlingo_mlx.serving.wire.answers import Gathered, extension, frame
from kvlingo_mlx.serving.wire.forms import check_text, conversation
from kvlingo_mlx.serving.wire.requests import Api, Body, Conversing, Effort, Positive, Stop
from kvlingo_mlx.tokenization.chat_messages import content_text, json_object

# Thinking is not signed, and comes back unchecked; some clients drop what has no signature.
SIGNATURE = "kvlingo-mlx"

# ---- settings -----------------------------------------------------------------------------------


class _Output(Body):
    rules = oddities.OUTPUT_SETTING
    effort: Effort | None = None
    format: Any = None


# ---- requests -----------------------------------------------------------------------------------


class CountRequest(Conversing):
    """A request for the number of a prompt's tokens."""

    rules = oddities.COUNT
    messages: Annotated[list[Any], Field(min_length=1)]
    system: Any = None
    output_config: _Output | None = None
    output_format: Any = None

    @property
    def effort(self) -> str | None:
        own = self.output_config.effort if self.output_config else None
        return own or super().effort

    def conversation(self) -> tuple[Message, ...]:
        check_text(self.system, "system")
        system = content_text(self.system, "\n")
        before = [{"role": "system", "content": system}] if system else []
        return (*before, *conversation(self.messages, "messages", "\n"))

    def goes_on(self, messages: tuple[Message, ...]) -> bool:
        last = messages[-1]
        return last["role"] == "assistant" and "tool_calls" not in last

    def ask(self) -> GenerationRequest:
        output = self.output_config or _Output()
        choice = self.tool_choice if isinstance(self.tool_choice, dict) else {}
        return self.converse(
            ("output_format", output.format or self.output_format),
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            count=True,
        )


class MessagesRequest(CountRequest):
    rules = oddities.MESSAGES
    max_tokens: Positive
    stop_sequences: Stop | None = None

    def ask(self) -> GenerationRequest:
        stop = tuple(self.stop_sequences or ())
        return replace(super().ask(), count=False, max_tokens=self.max_tokens, stop=stop)


# ---- answers ------------------------------------------------------------------------------------


class Count(Gathered):
    """The number of a prompt's tokens, which is all that comes."""

    tokens = 0

    def take(self, event: Event) -> list[str]:
        self.tokens = event.tokens if isinstance(event, TokenCount) else 0
        return []

    def body(self) -> dict[str, Any]:
        return {"input_tokens": self.tokens}


class MessagesAnswer(Gathered):
    """An answer in blocks: thinking, text, tool calls, in the order in which they come."""

    prefix = "msg_"

    def __init__(self, request: MessagesRequest) -> None:
        super().__init__(request)
        self.blocks: list[dict[str, Any]] = []
        self.open = False

    def begin(self) -> list[str]:
        message = self._message() | {"content": [], "stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message=message)]

    def piece(self, piece: Delta) -> list[str]:
        frames: list[str] = []
        if piece.reasoning:
            thinking = self.request.thinking
            hidden = thinking is not None and thinking.display == "omitted"
            frames += self._grow("thinking", "" if hidden else piece.reasoning)
        if piece.content:
            frames += self._grow("text", piece.content)
        for each in piece.tool_calls:
            frames += self._call(each["id"], **each["function"])
        return frames

    def end(self) -> list[str]:
        delta = self._stopped()
        return [
            *self._close(),
            _event("message_delta", delta=delta, usage=_usage(self.usage)),
            _event("message_stop"),
        ]

    def fail(self, failed: Failure) -> list[str]:
        return [frame(anthropic_error(failed)[1], "error")]

    def keep_alive(self) -> str:
        """A ping: Anthropic's clients do not count comments."""
        return _event("ping")

    def body(self) -> dict[str, Any]:
        return self._message() | {"content": self.blocks} | self._stopped()

    def _message(self) -> dict[str, Any]:
        kind = {"type": "message", "role": "assistant"}
        return {"id": self.id, **kind, "model": self.model, "usage": _usage(self.usage)}

    def _stopped(self) -> dict[str, Any]:
        if self.stop_text is not None and self.reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_text}
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(self.reason, "end_turn"), "stop_sequence": None}

    def _grow(self, kind: str, text: str) -> list[str]:
        """More thinking or text, in the open block if that is of its kind."""
        frames: list[str] = []
        if not self.open or self.blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            frames += self._start({"type": kind, kind: "", **signed})
        self.blocks[-1][kind] += text
        return [*frames, *([self._delta(f"{kind}_delta", kind, text)] if text else [])]

    def _call(self, identity: str, name: str, arguments: str) -> list[str]:
        frames = self._start({"type": "tool_use", "id": identity, "name": name, "input": {}})
        self.blocks[-1]["input"] = json_object(arguments) or {}
        return [*frames, self._delta("input_json_delta", "partial_json", arguments)]

    def _start(self, block: dict[str, Any]) -> list[str]:
        frames = self._close()
        self.blocks.append(block)
        self.open = True
        start = _event("content_block_start", index=len(self.blocks) - 1, content_block=block)
        return [*frames, start]

    def _delta(self, kind: str, name: str, text: str) -> str:
        delta = {"type": kind, name: text}
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _close(self) -> list[str]:
        if not self.open:
            return []
        self.open = False
        frames: list[str] = []
        if self.blocks[-1]["type"] == "thinking":
            self.blocks[-1]["signature"] = SIGNATURE
            frames.append(self._delta("signature_delta", "signature", SIGNATURE))
        return [*frames, _event("content_block_stop", index=len(self.blocks) - 1)]


def _event(kind: str, **data: Any) -> str:
    return frame({"type": kind, **data}, kind)


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts as this API has them: what was cached is no part of ``input_tokens``."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "kvlingo": extension(usage),
    }


API = Api(("/v1/messages",), MessagesRequest, MessagesAnswer, anthropic_error)
COUNT = Api(("/v1/messages/count_tokens",), CountRequest, Count, anthropic_error)
