"""What clients write alike in several forms: messages, tools, choices of tools, schemas.

Every form is taken in every API. Of what was said before, only what a model can be given is read,
and other fields are left alone; what asks something of the server now is read strictly.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.messages import Message, Tool
from kvlingo_mlx.serving.wire import BadRequest, shown
from kvlingo_mlx.serving.wire.oddities import OLD_ROLES, TOOL, UNSUPPORTED

WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def sendable(value: Any) -> bool:
    """Whether JSON in UTF-8 can hold a value: no NaN, no half of a surrogate pair, not too deep."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def unread(found: Any, path: str, expected: str) -> BadRequest:
    """The refusal of a value in no known form, by its kind where that is known."""
    given = found if isinstance(found, dict) else {}
    for field, reasons in (("type", UNSUPPORTED), ("role", OLD_ROLES)):
        kind = given.get(field)
        name = re.sub(r"_2\d{7}$", "", kind) if isinstance(kind, str) else ""
        if name in reasons:
            message = f"{path}.{field} is {shown(kind)}; {reasons[name]}"
            return BadRequest(printable(message), f"{path}.{field}")
    what = f"{shown(found)} with {', '.join(map(shown, given)):.200}" if given else shown(found)
    return BadRequest(printable(f"{path} is {what}, expected {expected}"), path)


# ---- messages -----------------------------------------------------------------------------------


def conversation(
    items: Iterable[Any], path: str, between: str = "", apart: bool = False
) -> tuple[Message, ...]:
    """All messages in the form of OpenAI's chat.

    Args:
        items: Messages of OpenAI's or Anthropic's form, or a response's items.
        path: Where they stand in the request.
        between: What joins the blocks of a user's message.
        apart: Whether reasoning, text and calls of one answer come as items of their own.

    Raises:
        BadRequest: One is not text, or not of a form that is known.
    """
    reader = _Reader(between, apart)
    for number, item in enumerate(items):
        reader.take(item, f"{path}.{number}")
    return tuple(reader.finish())


def _parts(content: Any, path: str) -> Iterator[tuple[Any, str]]:
    """A content's parts, each with its path; a text is one part, null is none."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, path
    elif isinstance(content, list):
        yield from ((part, f"{path}.{number}") for number, part in enumerate(content))
    elif content is not None:
        raise unread(content, path, "a text or a list of parts")


def _text(part: Any, path: str) -> str:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind), "text": str(text)} if kind not in UNSUPPORTED:
            return text
    raise unread(part, path, 'a part such as {"type": "text", "text": "..."}')


def text_of(content: Any, path: str, between: str = "") -> str:
    """The text of a content of parts, each of which must be one."""
    return between.join(_text(part, place) for part, place in _parts(content, path))


class _Reader:
    """Messages gathered from items."""

    def __init__(self, between: str, apart: bool) -> None:
        self._between, self._apart = between, apart
        self._messages = list[Message]()
        self._answer: dict[str, Any] | None = None  # an answer of which more items may come

    def finish(self) -> list[Message]:
        """All messages; the answer that is being gathered is complete."""
        if self._answer is not None:
            self._messages.append(self._answer | {"content": self._answer["content"] or ""})
            self._answer = None
        return self._messages

    def take(self, item: Any, path: str) -> None:
        """Add one item."""
        match item:
            case {"role": "assistant"}:
                self._said(item, path)
            case {"role": "tool", **more}:
                self._result(str(more.get("tool_call_id") or ""), item, "content", path)
            case {"role": "user" | "system" | "developer"}:
                self._asked(item, path)
            case {"type": "reasoning"}:
                answer = self._answer or {}
                if answer.get("content") is not None or "tool_calls" in answer:
                    self.finish()
                name = "content" if item.get("content") else "summary"
                self._think(text_of(item.get(name), f"{path}.{name}"))
            case {"type": "function_call", "call_id": str(identity), "name": str()}:
                self._call(identity, item, "arguments", path)
            case {"type": "function_call_output", "call_id": str(identity)}:
                self._result(identity, item, "output", path)
            case _:
                raise unread(item, path, "a message with role user, assistant, system or tool")

    def _asked(self, item: dict[str, Any], path: str) -> None:
        """A user's message, or instructions; tool results within it are messages of their own."""
        role = "system" if item["role"] == "developer" else item["role"]
        texts, before = list[str](), len(self.finish())

        def flush() -> None:
            content = self._between.join(texts)
            self._messages.append({"role": role, "content": content, **_name(item)})
            texts.clear()

        for part, place in _parts(item.get("content"), f"{path}.content"):
            match part:
                case {"type": "tool_result", "tool_use_id": str(identity)}:
                    if texts:
                        flush()
                    self._result(identity, part, "content", place)
                case _:
                    texts.append(_text(part, place))
        if texts or len(self._messages) == before:
            flush()

    def _result(self, identity: str, item: dict[str, Any], name: str, path: str) -> None:
        text = text_of(item.get(name), f"{path}.{name}", self._between)
        content = f"Error: {text}" if item.get("is_error") else text
        message = {"role": "tool", "tool_call_id": identity, "content": content}
        self.finish().append({**message, **_name(item)})

    def _said(self, item: dict[str, Any], path: str) -> None:
        """A model's message; before a response's item its reasoning may have come."""
        if not self._apart or (self._answer or {}).get("content") is not None:
            self.finish()
        if isinstance(thought := item.get("reasoning_content") or item.get("reasoning"), str):
            self._think(thought)
        if item.get("function_call"):
            raise BadRequest(f"{path}.function_call: {OLD_ROLES['function']}", path)
        texts = [item["refusal"]] if isinstance(item.get("refusal"), str) else []
        for part, place in _parts(item.get("content"), f"{path}.content"):
            match part:
                case {"type": "thinking", "thinking": str(thought)}:
                    self._think(thought)
                case {"type": "redacted_thinking"}:
                    pass  # only the model that wrote it can read it
                case {"type": "tool_use", "id": str(identity), "name": str()}:
                    self._call(identity, part, "input", place)
                case _:
                    texts.append(_text(part, place))
        for call, place in _parts(item.get("tool_calls"), f"{path}.tool_calls"):
            match call:
                case {"function": {"name": str()}}:
                    identity = str(call.get("id") or "")
                    self._call(identity, call["function"], "arguments", f"{place}.function")
                case _:
                    raise unread(call, place, "a call of a function with its name")
        answer = self._open()
        answer["content"] = "".join(texts)
        answer |= _name(item)
        if not self._apart:
            self.finish()

    def _open(self) -> dict[str, Any]:
        """The answer that is being gathered, perhaps a new one."""
        if self._answer is None:
            self._answer = {"role": "assistant", "content": None}
        return self._answer

    def _think(self, text: str) -> None:
        if text:
            answer = self._open()
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _call(self, identity: str, item: dict[str, Any], name: str, path: str) -> None:
        text = _arguments(item.get(name), f"{path}.{name}")
        function = {"name": item["name"], "arguments": text}
        calls = self._open().setdefault("tool_calls", [])
        calls.append({"id": identity, "type": "function", "function": function})


def _name(item: dict[str, Any]) -> dict[str, str]:
    """The name of who said it, where there is one."""
    return {"name": name} if (name := item.get("name")) and isinstance(name, str) else {}


def _arguments(found: Any, path: str) -> str:
    """A call's arguments as the JSON text that they came as, once that is one of an object."""
    text = json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else found or "{}"
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not sendable(value):
        raise unread(found, path, "the JSON text of an object")
    return text


# ---- tools and formats --------------------------------------------------------------------------


def tools_of(found: list[Any]) -> tuple[Tool, ...]:
    """Tools in the form of OpenAI's chat; ``strict`` only where it is true.

    Raises:
        BadRequest: One is not a function, or two have one name.
    """
    tools = [_tool(tool, f"tools.{number}") for number, tool in enumerate(found)]
    names = Counter(tool["function"]["name"] for tool in tools)
    name, count = names.most_common(1)[0] if names else ("", 0)
    if count > 1:
        message = f"{count} tools are called {shown(name)}, expected one; rename them"
        raise BadRequest(printable(message), "tools")
    return tuple(tools)


def _tool(found: Any, path: str) -> Tool:
    given: dict[str, Any] = {}
    match found:
        case {"type": "function", "function": dict()}:
            path, given = f"{path}.function", found["function"]
        case {"type": "function"}:
            given = found
        case {"input_schema": dict()} if found.get("type") in (None, "custom"):
            given = {**found, "parameters": found["input_schema"]}
        case _:
            raise unread(found, path, "a function with its name and parameters")
    for field, rule in TOOL.items():
        if rule and given.get(field) is not None and (why := rule.refusal(given[field])):
            raise BadRequest(printable(f"{path}.{field} {why}"), f"{path}.{field}")
    name, parameters = given.get("name"), given.get("parameters")
    if not (isinstance(name, str) and name and isinstance(parameters, dict | None)):
        raise unread(given, path, "a function with its name and parameters")
    function: dict[str, Any] = {"name": name}
    if isinstance(given.get("description"), str) and given["description"]:
        function["description"] = given["description"]
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    if given.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def choice_of(found: Any, tools: tuple[Tool, ...]) -> str:
    """``GenerationRequest.tool_choice``: "auto", "none", "required", or the name of a tool.

    Raises:
        BadRequest: A call is demanded of a tool that is not there.
    """
    named: Any = None
    word = "auto"
    match found:
        case {"type": "function", "function": {"name": str(named)}}:
            pass
        case {"type": "function" | "tool", "name": str(named)}:
            pass
        case str(kind) | {"type": str(kind)} if kind in WORDS:
            word = WORDS[kind]
        case None:
            pass
        case _:
            raise unread(found, "tool_choice", "auto, none, required, or the name of a tool")
    message = ""
    if named in WORDS:
        message = f"tool_choice names {shown(named)}, which is also a choice; rename the tool"
    elif named is not None and all(named != tool["function"]["name"] for tool in tools):
        message = f"tool_choice names {shown(named)}, which is not in tools; add it there"
    elif word == "required" and not tools:
        message = "tool_choice demands a call, but there are no tools; add one"
    if message:
        raise BadRequest(printable(message), "tool_choice")
    return named or word


def schema_of(found: Any, path: str) -> dict[str, Any] | None:
    """The JSON schema that the answer must fit: {} is any object, None any text."""
    match found:
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
        case {"type": "json_object"}:
            return {}
        case None | {"type": "text"}:
            return None
    raise unread(found, path, "text, json_object, or json_schema with its schema")
