"""Anthropic's messages: what answers say."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.serving.messages import Delta, Failure, Finished, GenerationRequest, Usage
from kvlingo_mlx.serving.wire import anthropic_error, arguments, extension, frame
from kvlingo_mlx.serving.wire.answers import Gathered

# Thinking is not signed, and comes back unchecked; some clients drop what has no signature.
SIGNATURE = "kvlingo-mlx"


class AnthropicAnswer(Gathered):
    """An answer in blocks: thinking, text, tool calls, in the order in which they come.

    Args:
        ask: What was asked.
        hidden: Whether thinking is left out of its blocks.
    """

    def __init__(self, ask: GenerationRequest, hidden: bool = False) -> None:
        super().__init__(ask, "msg_")
        self.hidden = hidden
        self.blocks: list[dict[str, Any]] = []
        self.open = False

    def begin(self) -> list[str]:
        message = self._message() | {"stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message=message | {"usage": _usage(self.usage)})]

    def piece(self, piece: Delta) -> list[str]:
        frames: list[str] = []
        if piece.reasoning:
            frames += self._grow("thinking", "" if self.hidden else piece.reasoning)
        if piece.content:
            frames += self._grow("text", piece.content)
        for call in piece.tool_calls:
            frames += self._call(dict(call))
        return frames

    def end(self, ended: Finished) -> list[str]:
        reason, text = self._reason(ended)
        return [
            *self._close(),
            _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": text},
                usage=_usage(self.usage),
            ),
            _event("message_stop"),
        ]

    def fail(self, failed: Failure) -> list[str]:
        return [frame(anthropic_error(failed)[1], "error")]

    def keep_alive(self) -> str:
        """A ping: Anthropic's clients do not count comments."""
        return _event("ping")

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        reason, text = self._reason(self.ended or Finished("stop", self.usage))
        message = self._message() | {"content": self.blocks, "stop_reason": reason}
        return message | {"stop_sequence": text, "usage": _usage(self.usage)}

    def _message(self) -> dict[str, Any]:
        kind = {"type": "message", "role": "assistant"}
        return {"id": self.id, **kind, "model": self.model, "content": []}

    def _reason(self, ended: Finished) -> tuple[str, str | None]:
        if ended.stop_text is not None and ended.reason == "stop":
            return "stop_sequence", ended.stop_text
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        return reasons.get(ended.reason, "end_turn"), None

    def _grow(self, kind: str, text: str) -> list[str]:
        """More thinking or text, in the open block if that is of its kind."""
        frames: list[str] = []
        if not self.open or self.blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            frames += self._start({"type": kind, kind: "", **signed})
        self.blocks[-1][kind] += text
        return [*frames, *([self._delta(f"{kind}_delta", kind, text)] if text else [])]

    def _call(self, call: dict[str, Any]) -> list[str]:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
        frames = self._start(block)
        self.blocks[-1]["input"] = arguments(call)
        return [*frames, self._delta("input_json_delta", "partial_json", function["arguments"])]

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
