"""What clients write alike in several forms: messages, tools, choices of tools, schemas.

Every form is taken in every API. What was said before is never refused
(:mod:`~kvlingo_mlx.tokenization.chat_messages`); what asks something of the server now is read
strictly: the last message, if a user or the system wrote it, tools, and formats.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.messages import Message, Tool
from kvlingo_mlx.serving.wire import BadRequest, shown
from kvlingo_mlx.serving.wire.oddities import OPTIONAL, TOOL, UNSUPPORTED
from kvlingo_mlx.tokenization import chat_messages
from kvlingo_mlx.tokenization.chat_messages import ROLES, is_call, is_result, kind_of, unreadable

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
    if (name := kind_of(found)) in UNSUPPORTED:
        message = f"{path}.type is {shown(found['type'])}; {UNSUPPORTED[name]}"
        return BadRequest(printable(message), f"{path}.type")
    given = found if isinstance(found, dict) else {}
    what = f"{shown(found)} with {', '.join(map(shown, given)):.200}" if given else shown(found)
    return BadRequest(printable(f"{path} is {what}, expected {expected}"), path)


# ---- messages -----------------------------------------------------------------------------------


def conversation(
    items: Sequence[Any], path: str, between: str = "", apart: bool = False
) -> tuple[Message, ...]:
    """All messages in the form of OpenAI's chat, as :func:`chat_messages.conversation` reads them.

    ``path`` is where they stand in the request.

    Raises:
        BadRequest: The last one asks for what no model here can do, or is of no known form.
    """
    last = len(items) - 1
    try:
        _check_last(items[last], f"{path}.{last}")
        found = chat_messages.conversation(items, between, apart)
    except RecursionError:
        raise BadRequest(f"{path} is nested too deeply; send it flatter", path) from None
    if not found:
        raise BadRequest(f"{path} has nothing that a model can read; add a message", path)
    return tuple(found)


def _check_last(item: Any, path: str) -> None:
    if is_call(item) or is_result(item) or kind_of(item) == "reasoning":
        return
    role = item.get("role") if isinstance(item, Mapping) else None
    if not isinstance(role, str):
        raise unread(item, path, "a message with role user, assistant, system or tool")
    if ROLES.get(role.lower()) not in ("assistant", "tool"):
        check_text(item.get("content"), f"{path}.content")


def check_text(content: Any, path: str) -> None:
    """Refuse a content with what no model here can read."""
    if not isinstance(content, str | list | None):
        raise unread(content, path, "a text or a list of parts")
    if content and (number := unreadable(content)) is not None:
        expected = 'a part such as {"type": "text", "text": "..."}'
        raise unread(content[number], f"{path}.{number}", expected)


# ---- tools and formats --------------------------------------------------------------------------


def tools_of(found: list[Any]) -> tuple[Tool, ...]:
    """Tools in the form of OpenAI's chat; ``strict`` only where it is true.

    Raises:
        BadRequest: One is not a function, or two have one name.
    """
    own = [(n, tool) for n, tool in enumerate(found) if kind_of(tool) not in OPTIONAL]
    tools = [_tool(tool, f"tools.{number}") for number, tool in own]
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
    function["parameters"] = {"type": "object", "properties": {}, **(parameters or {})}
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
        case {"type": "json_object", "schema": dict(schema)}:
            return schema
        case {"type": "json_object"}:
            return {}
        case None | {"type": "text"}:
            return None
    raise unread(found, path, "text, json_object, or json_schema with its schema")
