"""Divide an answer's text into content, reasoning and tool calls, and end it at a stop text.

The marks are those that mlx-lm knows for a tokenizer. mlx-lm's own state machine finds them, as in
its server, and mlx-lm's own parsers read the tool calls. A stop text within the reasoning, which is
not part of the answer, ends nothing.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import TextStateMachine, make_text_state_machine

ID = 9  # letters and digits of a call's id; Mistral's templates take no other number
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


def _first_stop(text: str, stop: Sequence[str], thought: Sequence[bool]) -> int | None:
    """The start of the stop text that is complete first; the longest if several end there.

    ``thought`` says of each place between two characters whether it is within the reasoning.
    """
    found = [
        (match.start() + len(s), match.start())
        for s in stop
        for match in re.finditer(f"(?={re.escape(s)})", text)
        if not (thought[match.start()] and thought[match.start() + len(s)])
    ]
    return min(found)[1] if found else None


def _thoughts(state: Any, text: str) -> tuple[Any, list[bool]]:
    """The state after a text, and after each of its characters whether that is reasoning."""
    thought = []
    for letter in text:
        if state[0] is not None:
            state, _ = TextStateMachine.split(state, letter)
        thought.append(state[0] == "reasoning")
    return state, thought


class AnswerReader:
    """Reads an answer as it comes, and holds back text that may belong to a stop text or a mark.

    Attributes:
        calls: The tool calls that have been given out.

    Args:
        tokenizer: The tokenizer of the model that writes the answer.
        prompt: The tokens before the answer. If they open a reasoning trace, the answer begins
            inside it.
        stop: Texts before which the answer ends; within the reasoning they count for nothing.
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
        self.calls: list[ToolCall] = []
        self._tokenizer: Any = None
        self._first = _first_state(tokenizer, prompt)
        self._thought, self._reasoned, self._answered = [self._first == "reasoning"], False, False
        self._begin(tokenizer, self._first)

    def _begin(self, tokenizer: Any, state: str | None) -> None:
        self._tokenizer = tokenizer
        # The second one is ahead by the text that is held back.
        self._state = self._ahead = make_text_state_machine(tokenizer).make_state(state)

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

    def stopped_at(self, text: str) -> int | None:
        """The number of characters of a whole answer before the stop text that ends it."""
        state = make_text_state_machine(self._tokenizer).make_state(self._first)
        return _first_stop(
            text, self._stop, [self._first == "reasoning", *_thoughts(state, text)[1]]
        )

    def _before_stop(self, text: str, ended: bool) -> tuple[str, str | None]:
        """The text that can be given out now, and the stop text that has come, or None."""
        if not self._stop:
            return text, None
        self._ahead, more = _thoughts(self._ahead, text)
        thought, text, self._held = self._thought + more, self._held + text, ""
        if (found := _first_stop(text, self._stop, thought)) is not None:
            return text[:found], max(s for s in self._stop if text.startswith(s, found))
        most = 0 if ended else min(len(text), max(map(len, self._stop)) - 1)
        held = next(
            (n for n in range(most, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
        self._held, self._thought = text[len(text) - held :], thought[len(text) - held :]
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
            self._reasoned |= name == "reasoning"
        if ended and self._calling:
            content += self._called(calls, complete=False)
        if self._reasoned and not self._answered:
            content = content.lstrip()  # the empty lines that end the reasoning
        self._answered |= bool(content)
        self.calls += calls
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


def divided(tokenizer: Any, text: str, *, opened: bool = False) -> Parts:
    """The parts of a whole answer; ``opened`` says whether its prompt opened a reasoning trace."""
    reader = AnswerReader(tokenizer, ())
    if opened:
        reader._begin(tokenizer, "reasoning")
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
    arguments = call["arguments"]  # some models write a text that is the JSON of them
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or uuid.uuid4().hex[:ID],
        "type": "function",
        "function": {"name": str(call["name"]), "arguments": arguments},
    }
