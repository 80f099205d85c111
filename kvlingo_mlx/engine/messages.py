"""Messages of a conversation: what a model wrote as one, and when two mean the same.

A message is a dictionary as chat templates take it: ``role``, ``content``, and where they belong
``reasoning_content``, ``tool_calls`` (their arguments as objects) and ``tool_call_id``.
"""

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.engine.answers import Parts, divided
from kvlingo_mlx.engine.calls import ToolCall
from kvlingo_mlx.models.prompts import Message, is_message
from kvlingo_mlx.tokenization.renderings import with_joined_parts
from kvlingo_mlx.tokenization.templates import with_object

REASONING = ("reasoning", "reasoning_content")  # where clients put a reasoning trace, if anywhere


def answer_message(
    tokenizer: Any,
    text: str,
    *,
    opened: bool = False,
    calls: Sequence[ToolCall] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Message:
    """The message that a model wrote as the whole ``text``, marks included.

    Args:
        tokenizer: The model's; it knows the marks of reasoning and calls.
        opened: Whether the prompt opened a reasoning trace.
        calls: Its first calls, as they were given out.
        tools: The tools that the prompt announced.
    """
    parts = divided(tokenizer, text, opened=opened, tools=tools)
    message: Message = {"role": "assistant", "content": parts.content}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.tool_calls:
        made = [*calls[: len(parts.tool_calls)], *parts.tool_calls[len(calls) :]]
        message["tool_calls"] = list(map(with_object, made))
    return message


def same_answer(
    tokenizer: Any, one: str, other: str, tools: Sequence[Mapping[str, Any]] | None = None
) -> bool:
    """Whether two texts of an answer have the same content, reasoning and calls.

    White space around them, and how a call's JSON is written, do not count. An empty reasoning
    trace does: templates drop it from earlier answers.
    """
    marks = [mark for mark in (tokenizer.think_start, tokenizer.think_end) if mark]
    if any((mark in one) != (mark in other) for mark in marks):
        return False
    parts = (divided(tokenizer, text, tools=tools) for text in (one, other))
    return operator.eq(*map(_compared, parts))


def _compared(parts: Parts) -> tuple[str, str, list[Any]]:
    return parts.content.strip(), parts.reasoning.strip(), list(map(_called, parts.tool_calls))


def meaning(message: Mapping[str, Any]) -> str:
    """A text that is equal for two messages that mean the same.

    Of an answer count its content, but for white space around it, and its calls, but for their
    ids: clients send answers back without their reasoning, and with calls of their own spelling.
    """
    given = {key: value for key, value in message.items() if value is not None}
    if given.get("role") == "assistant":
        given = {key: value for key, value in given.items() if key not in REASONING}
        given["content"] = content_of(given).strip()
        given["tool_calls"] = list(map(_called, given.get("tool_calls") or ()))
    return json.dumps(given, sort_keys=True, ensure_ascii=False, default=str)


def content_of(message: Mapping[str, Any]) -> str:
    """A message's content as text."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content) if content else ""


def _called(call: Any) -> Any:
    """A tool call's name and arguments, in whichever form the arguments are written."""
    function = with_object(call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return [function.get("name"), function.get("arguments")]


def recalled(given: Message, ours: Message) -> Message:
    """A message that a client sent back, with what we know of it; its calls keep their ids."""
    made = dict(ours)
    if thought := next((given[key] for key in REASONING if given.get(key)), None):
        made["reasoning_content"] = thought
    if given.get("tool_calls"):
        made["tool_calls"] = list(map(with_object, given["tool_calls"]))
    return made


def without_oldest_turn(messages: Sequence[Message]) -> list[Message] | None:
    """The messages without the first turn: a user's message and all up to the next one.

    System messages before it stay. Returns None if there is only one turn.
    """
    turns = [index for index, m in enumerate(messages) if m.get("role") == "user"]
    if len(turns) < 2:
        return None
    system = [m for m in messages[: turns[0]] if m.get("role") in ("system", "developer")]
    return [*system, *messages[turns[1] :]]


def messages_of(message: object) -> list[Message]:
    """The user's message as a list of messages; ValueError if it is neither text nor messages."""
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    listed: list[Any] = list(message) if isinstance(message, Sequence | Iterator) else []
    if not listed or not all(map(is_message, listed)):
        raise ValueError(
            f"the message is {message!r:.80}; give text, or a list of messages, each with a "
            '"role" and a "content"'
        )
    return with_joined_parts(listed)


def history_of(messages: object) -> list[Message]:
    """A whole conversation as a list of messages; ValueError if it is not one."""
    if isinstance(messages, str):
        raise ValueError(
            f"messages is {messages!r:.80}; give the whole conversation as a list of messages, or "
            "the new message alone as message"
        )
    return messages_of(messages)
