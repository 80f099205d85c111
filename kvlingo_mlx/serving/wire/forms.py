"""What clients write alike in several forms: messages, and schemas.

Every form is taken in every API. What was said before is never refused
(:mod:`~kvlingo_mlx.tokenization.chat_messages`); what asks something of the server now is read
strictly: the last message, if a user or the system wrote it, and formats.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.serving.messages import Message
from kvlingo_mlx.serving.wire import BadRequest, shown
from kvlingo_mlx.serving.wire.oddities import UNSUPPORTED
from kvlingo_mlx.tokenization import chat_messages
from kvlingo_mlx.tokenization.chat_messages import (
    ROLES,
    is_call,
    is_result,
    json_object,
    kind_of,
    unreadable,
)


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
        return BadRequest(message, f"{path}.type")
    given = found if isinstance(found, dict) else {}
    what = f"{shown(found)} with {', '.join(map(shown, given)):.200}" if given else shown(found)
    return BadRequest(f"{path} is {what}, expected {expected}", path)


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
        if items:
            _check_last(items[last], f"{path}.{last}")
        found = chat_messages.conversation(items, between, apart)
    except RecursionError:
        raise BadRequest(f"{path} is nested too deeply; send it flatter", path) from None
    if not found:
        raise BadRequest(f"{path} has nothing that a model can read; add a message", path)
    return tuple(found)


def _check_last(item: Any, path: str) -> None:
    # Codex tells so what another agent says; it has no role.
    if is_call(item) or is_result(item) or kind_of(item) in ("reasoning", "agent_message"):
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


# ---- formats ------------------------------------------------------------------------------------


def schema_of(found: Any, path: str) -> dict[str, Any] | None:
    """The JSON schema that the answer must fit: {} is any object, None any text."""
    if isinstance(found, str):
        found = {"type": found}
    kind = found.get("type") if isinstance(found, dict) else None
    if found in (None, {}) or kind == "text":
        return None
    inner = found.get("json_schema") if kind == "json_schema" else None
    schema = (inner if isinstance(inner, dict) else found).get("schema") if kind else None
    if kind == "json_object" and schema is None:
        return {}
    if kind in ("json_schema", "json_object") and (made := json_object(schema)) is not None:
        return made
    raise unread(found, path, "text, json_object, or json_schema with its schema")
