"""Divide an answer's text into content, reasoning and tool calls, and end it at a stop text.

The marks are those that mlx-lm knows for a tokenizer. mlx-lm's own state machine finds them, as in
its server, and mlx-lm's own parsers read the tool calls.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import TextStateMachine, make_text_state_machine

ToolCall = dict[str, Any]
Response = TypeVar("Response")
# The errors that mlx-lm's parsers raise when a tool call is cut short or is not a call.
NO_CALL = (ValueError, KeyError, TypeError, AttributeError, IndexError, SyntaxError)


@dataclass(frozen=True)
class Parts:
    """The parts of a text.

    Attributes:
        content: The text for the user.
        reasoning: The text between the tokenizer's think marks.
        tool_calls: The calls in OpenAI's form: ``{"id", "type": "function", "function":
            {"name", "arguments"}}``. The arguments are JSON text.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """The start of the stop text that is complete first; the longest if several end there."""
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return min(found)[1] if found else None


class AnswerReader:
    """Reads an answer as it comes, and holds back text that may belong to a stop text or a mark.

    Args:
        tokenizer: The tokenizer of the model that writes the answer.
        prompt: The tokens before the answer. If they open a reasoning trace, the answer begins
            inside it.
        stop: Texts before which the answer ends.
        tools: The tools that the prompt announces; some parsers read argument types from them.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._stop, self._tools = tuple(stop), tools
        self._held, self._call, self._calling = "", "", False
        self._tokenizer: Any = None
        self._begin(tokenizer, _first_state(tokenizer, prompt))

    def _begin(self, tokenizer: Any, state: str | None) -> None:
        self._tokenizer = tokenizer
        self._state = make_text_state_machine(tokenizer).make_state(state)

    def written_by(self, tokenizer: Any) -> None:
        """Go on with the marks of another model's tokenizer."""
        if tokenizer is not self._tokenizer:
            self._begin(tokenizer, self._state[0])

    def take(self, response: Response) -> Response:
        """The next response, cut at a stop text, with its text divided into parts."""
        last: Any = response
        text, stopped = self._before_stop(last.text, last.finish_reason is not None)
        reason = "stop" if stopped is not None else last.finish_reason
        parts = self._divided(text, ended=reason is not None)
        return replace(last, text=text, finish_reason=reason, stop_text=stopped, **vars(parts))

    def _before_stop(self, text: str, ended: bool) -> tuple[str, str | None]:
        """The text that can be given out now, and the stop text that has come, or None."""
        text, self._held = self._held + text, ""
        if (found := first_stop(text, self._stop)) is not None:
            return text[:found], max(s for s in self._stop if text.startswith(s, found))
        most = 0 if ended else min(len(text), max(map(len, self._stop), default=1) - 1)
        held = next(
            (n for n in range(most, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def _divided(self, text: str, ended: bool) -> Parts:
        """The parts of the next piece of text."""
        segments: list[tuple[str | None, str]] = []
        if self._state[0] is not None:  # None: the format has ended the answer
            self._state, segments = TextStateMachine.split(self._state, text)
        if ended:
            self._state, rest, name = TextStateMachine.flush(self._state)
            segments = [*segments, (name, rest)]
        content, reasoning, calls = "", "", list[ToolCall]()
        for name, piece in segments:
            if self._calling and name != "tool":
                content += self._called(calls, complete=True)
            self._calling = name == "tool"
            self._call += piece if self._calling else ""
            content += piece if name == "normal" else ""
            reasoning += piece if name == "reasoning" else ""
        if ended and self._calling:
            content += self._called(calls, complete=False)
        return Parts(content, reasoning, tuple(calls))

    def _called(self, calls: list[ToolCall], *, complete: bool) -> str:
        """Add the finished call to ``calls``; return it as text if it cannot be parsed."""
        text, self._call, self._calling = self._call, "", False
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
            found = list(map(_formatted, parsed if isinstance(parsed, list) else [parsed]))
        except NO_CALL:
            end = self._tokenizer.tool_call_end if complete else ""
            return f"{self._tokenizer.tool_call_start}{text}{end}"
        calls += found
        return ""


def divided(tokenizer: Any, text: str) -> Parts:
    """The parts of a whole answer whose prompt opened no reasoning trace."""
    reader = AnswerReader(tokenizer, ())
    return reader._divided(text, ended=True)


def _first_state(tokenizer: Any, prompt: Sequence[int]) -> str:
    """The part in which an answer begins; a chat template may open the reasoning trace itself."""
    if tokenizer.response_initial_state:
        return str(tokenizer.response_initial_state)
    opened = tokenizer.has_thinking and tokenizer.rfind_think_start(
        prompt
    ) > tokenizer.rfind_think_end(prompt)
    return "reasoning" if opened else "normal"


def begins_in_reasoning(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether an answer to a prompt begins inside a reasoning trace."""
    return _first_state(tokenizer, prompt) == "reasoning"


def _formatted(call: Mapping[str, Any]) -> ToolCall:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {
        "id": call.get("id") or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": str(call["name"]), "arguments": arguments},
    }
