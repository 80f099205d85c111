"""Fit a history to a model's chat template.

A conversation keeps structured messages; its models' templates take them in different forms. Every
rendering goes through :func:`fit_to_template`, so this is the one place where a history changes its
form. What a template takes is found by trying it, not by its family's name.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.renderings import with_joined_parts

Message = dict[str, Any]
TRIED = "kvlingo_tries_this"
# By tokenizer, what its template has been found to take.
_found: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()


def fit_to_template(model: LanguageModel, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages in the form that a model's chat template takes.

    Contents of several text parts are joined, and arguments of calls are objects. A template that
    ignores calls gets them as text. One that ignores reasoning, and leaves the content of earlier
    answers as it is, gets it there, between the tokenizer's marks.

    Raises:
        ValueError: A part of a content is not text.
    """
    return [
        _with_calls(model, _with_reasoning(model, message))
        for message in with_joined_parts(messages)
    ]


def _with_reasoning(model: LanguageModel, message: Message) -> Message:
    reasoning, tokenizer = message.get("reasoning_content"), model.tokenizer
    if not isinstance(reasoning, str) or not reasoning or not tokenizer.has_thinking:
        return message
    marks = tokenizer.think_start, tokenizer.think_end
    if _takes(model, "reasoning_content", TRIED) or not _takes(
        model, "content", f"{marks[0]}\n{TRIED}\n{marks[1]}\n\nyes"
    ):
        return message
    told = f"{marks[0]}\n{reasoning.strip()}\n{marks[1]}\n\n{message.get('content') or ''}"
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": told}


def _with_calls(model: LanguageModel, message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = list(map(with_object, message["tool_calls"]))
    content = message.get("content") or ""
    tried = {"type": "function", "function": {"name": TRIED, "arguments": {}}, "id": "a" * 9}
    if _takes(model, "tool_calls", [tried]):
        return {**message, "content": content, "tool_calls": calls}
    told = "\n".join([content, *(_as_text(model.tokenizer, call) for call in calls)])
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": told.lstrip("\n")}


def with_object(call: Any) -> Any:
    """A tool call whose arguments are an object, if they are the JSON text of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _takes(model: LanguageModel, key: str, value: Any) -> bool:
    """Whether a model's template renders what an earlier answer has under a key."""
    known = _found.setdefault(model.tokenizer, {})
    if key not in known:
        tried: list[Message] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "yes", key: value},
        ]
        if key == "content":
            tried.append({"role": "user", "content": "."})
        try:
            text = str(model.tokenizer.apply_chat_template(tried, tokenize=False))
        except (TemplateError, TypeError):  # it looks at this, and wants it otherwise
            text = TRIED
        known[key] = TRIED in text
    return known[key]


def _as_text(tokenizer: Any, call: Any) -> str:
    """A call as a model without a form of its own reads it: JSON between its marks, if any."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    text = json.dumps(function, ensure_ascii=False)
    start = getattr(tokenizer, "tool_call_start", None)
    return f"{start}\n{text}\n{tokenizer.tool_call_end or ''}" if start else text
