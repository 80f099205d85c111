"""What was said before, whoever wrote it down, in the one form of OpenAI's chat.

Requests and chat logs hold messages of OpenAI's and Anthropic's APIs, a response's items, parts as
Mistral's, OpenRouter's and other vendors write them, turns of ShareGPT. One reader takes them all,
mixed, and refuses nothing: whoever sends a past cannot mend it. What a model can be given is kept;
in the place of the rest stands a note.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Message = dict[str, Any]


def _by_name(rows: Mapping[str, str]) -> dict[str, str]:
    return {name: row for row, names in rows.items() for name in names.split()}


ROLES = _by_name({
    "system": "system developer platform root",
    "user": "user human message text input_text",
    "assistant": "assistant gpt chatgpt model ai bot output_text",
    "tool": "tool function ipython observation tool_response",
})  # fmt: skip
KEPT_ROLES = ("latest_reminder", "critic", "context", "document")  # which some templates know
NOTES = _by_name({
    "an image, which this model cannot see": (
        "image image_url input_image image_file computer_screenshot image_generation_call"
    ),
    "a recording, which this model cannot hear": "input_audio audio output_audio",
    "a video, which this model cannot see": "video video_url input_video",
    "a file, which this model cannot read": (
        "file input_file document document_url container_upload"
    ),
    "an earlier item, which was not sent": "item_reference",
})  # fmt: skip
SEEN = ("an image", "a video")  # begin the notes of what holds no text at all
# Where texts, reasoning and arguments stand; the first of them that is given counts.
CONTENTS = ("content", "value", "output", "outputs", "result", "results", "parts", "text")
TEXTS = ("text", "refusal", "transcript", "content", "output", "value", "stdout", "stderr")
OPAQUE = ("encrypted", "signature", "cache_control")  # begin names of what nobody can read
LONGEST = 2000  # characters without a space that are data of a part, and no text
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
THOUGHTS = ("thinking", "text", "content", "summary")
ARGUMENTS = ("arguments", "input", "action", "operation", "code", "queries")
IDENTITIES = ("tool_call_id", "tool_use_id", "call_id", "id")

HALF = "[\ud800-\udfff]"  # of a surrogate pair
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rf"|(\\u[dD][89a-fA-F][0-9a-fA-F]{{2}}|{HALF})|\\.",
    re.DOTALL,
)
DEEPEST = 100  # levels of a call's arguments; deeper ones are told as text


def repaired(text: str) -> str:
    """JSON text, or what was cut off of one, with U+FFFD for each half of a surrogate pair."""
    if "\\ud" not in text and "\\uD" not in text and not re.search(HALF, text):
        return text
    return _ESCAPE.sub(lambda found: "\ufffd" if found[1] else found[0], text)


# ---- parts --------------------------------------------------------------------------------------


def kind_of(item: Any) -> str:
    """An item's ``type`` without the date that ends some; "" if it has none."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return re.sub(r"_2\d{7}$", "", kind) if isinstance(kind, str) else ""


def is_call(item: Any) -> bool:
    """Whether an item or a part is a call, of whatever tool."""
    return kind_of(item).endswith(("_call", "tool_use")) and kind_of(item) not in NOTES


def is_result(item: Any) -> bool:
    """Whether an item or a part is the result of a call."""
    return kind_of(item).endswith(("_output", "tool_result"))


def _given(item: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The first of some fields that is there, and not null."""
    return next((item[name] for name in names if item.get(name) is not None), None)


def words(part: Any) -> str | None:
    """The text of a part of any kind; None if it has none."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        found = [text for each in part if (text := words(each)) is not None]
        return "".join(found) if found else None
    if not isinstance(part, Mapping) or NOTES.get(kind_of(part), "").startswith(SEEN):
        return None
    texts = [text for name in TEXTS if (text := words(part.get(name))) is not None]
    if texts:
        return next(filter(None, texts), "")
    source = part.get("source")
    if isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        return words(_given(source, ("data", "content")))
    return None


def told(part: Any) -> str:
    """What a model is told of a part: its text, else a short note in its place."""
    typed = bool(kind_of(part))
    plain = not isinstance(part, Mapping) or typed or part.keys() == {"text"}
    if plain and (text := words(part)) is not None:
        return text
    if not typed:
        return "" if part in (None, [], {}) else json.dumps(part, ensure_ascii=False, default=str)
    if what := NOTES.get(kind_of(part)):
        name = _given(part, ("filename", "title"))
        return f"[{what}: {name:.300}]" if isinstance(name, str) else f"[{what}]"
    kept = {
        name: value
        for name, value in part.items()
        if not str(name).startswith(OPAQUE) and not _is_data(value)
    }
    text = json.dumps(kept, ensure_ascii=False, default=str)
    return text if len(kept) > 1 else f"[{kind_of(part)}]"


def _is_data(value: Any) -> bool:
    return isinstance(value, str) and len(value) > LONGEST and " " not in value[:LONGEST]


def unreadable(content: Any) -> int | None:
    """The first part of a new message that is not text; None if all are.

    None also in a content of several texts, or with results of tools: a client may have joined
    earlier messages with a new one.
    """
    parts = content if isinstance(content, list) else []
    texts = [words(part) for part in parts]
    joined = any(map(is_result, parts)) or len(texts) - texts.count(None) > 1
    return None if joined or None not in texts else texts.index(None)


def content_text(content: Any, between: str = "") -> str:
    """The text of a message's content: a text, a list of parts, or anything else.

    A note in the place of a part is a line of its own.
    """
    parts = content if isinstance(content, list) else [content]
    noted = any(kind_of(part) and words(part) is None for part in parts)
    return (between or "\n" * noted).join(map(told, parts))


def _thoughts(found: Any) -> str:
    """The text of a reasoning in any form; encrypted ones have none."""
    if isinstance(found, list):
        return "".join(map(_thoughts, found))
    if isinstance(found, Mapping):
        return next(filter(None, (_thoughts(found.get(name)) for name in THOUGHTS)), "")
    return found if isinstance(found, str) else ""


# ---- calls --------------------------------------------------------------------------------------


def arguments_of(found: Any) -> str:
    """A call's arguments as the JSON text of an object, if they can be read as one, else as text.

    Some models write such a text as JSON again; others are cut within it.
    """
    if not isinstance(found, str):
        found = json.dumps({} if found is None else found, ensure_ascii=False, default=str)
    text = repaired(found)
    value = _parsed(text)
    if isinstance(value, str) and isinstance(inner := _parsed(value), dict):
        text, value = repaired(value), inner
    if not _shallow(value, DEEPEST):
        return f"(nested too deeply) {text}"
    return text if text.strip() else "{}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shallow(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_shallow(each, levels - 1) for each in inner)


def joined(namespace: Any, name: str) -> str:
    """The one name of a function in a namespace; "functions" is that of all which have no other."""
    if not isinstance(namespace, str) or namespace in ("", "functions"):
        return name
    return re.sub(r"[^\w-]", "_", f"{namespace.rstrip('_')}__{name}")


def _identity(item: Mapping[str, Any], names: Iterable[str] = IDENTITIES) -> str:
    found = _given(item, names)
    return str(found) if isinstance(found, str | int) else ""


# ---- messages -----------------------------------------------------------------------------------


def conversation(items: Iterable[Any], between: str = "", apart: bool = False) -> list[Message]:
    """All messages: ``role`` and ``content``, and where they belong ``reasoning_content``,
    ``tool_calls`` (their arguments as text), ``tool_call_id`` and ``name``.

    Args:
        items: Messages of any form, or a response's items.
        between: What joins the blocks of a user's message, or of a result.
        apart: Whether reasoning, text and calls of one answer come as items of their own.

    Raises:
        RecursionError: They are nested too deeply.
    """
    reader = _Reader(between, apart)
    for item in items:
        reader.take(item)
    return reader.finish()


def role_of(item: Mapping[str, Any]) -> str:
    """The role of who said it: an unknown one, or that of an unknown item, is the system's."""
    named = item.get("role") or item.get("from") or kind_of(item) or "user"
    named = named if isinstance(named, str) else ""
    return named if named in KEPT_ROLES else ROLES.get(named.lower(), "system")


class _Reader:
    """Messages gathered from items."""

    def __init__(self, between: str, apart: bool) -> None:
        self._between, self._apart = between, apart
        self._messages = list[Message]()
        self._answer: Message | None = None  # an answer of which more items may come

    def finish(self) -> list[Message]:
        """All messages; the answer that is being gathered is complete."""
        if self._answer is not None:
            self._messages.append(self._answer | {"content": self._answer["content"] or ""})
            self._answer = None
        return self._messages

    def take(self, item: Any) -> None:
        """Add one item."""
        if not isinstance(item, Mapping):
            if item is not None:
                self._asked({"content": item}, "user")
        elif kind_of(item) == "reasoning":
            answer = self._answer or {}
            if answer.get("content") is not None or "tool_calls" in answer:
                self.finish()
            self._think(_thoughts(item.get("content") or item.get("summary")))
        elif is_call(item):
            self._call(item)
        elif is_result(item) or (role := role_of(item)) == "tool":
            self._result(item)
        elif role == "assistant":
            self._said(item)
        elif item.get("from") in ("function_call", "tool_call"):
            self._called_in_text(item)
        else:
            self._asked(item, role)

    def _asked(self, item: Mapping[str, Any], role: str) -> None:
        """A user's message, or instructions; tool results within it are messages of their own."""
        content, before = _given(item, CONTENTS), len(self.finish())
        unsaid = content is None and not isinstance(item.get("role") or item.get("from"), str)
        if unsaid or kind_of(item) in NOTES:
            content = [item]
        parts = content if isinstance(content, list) else [content]
        for results, group in itertools.groupby(parts, is_result):
            if results:
                for part in group:
                    self._result(part)
            else:
                text = content_text(list(group), self._between)
                self._messages.append({"role": role, "content": text, **_name(item)})
        if len(self._messages) == before:
            self._messages.append({"role": role, "content": "", **_name(item)})

    def _result(self, item: Mapping[str, Any]) -> None:
        text = content_text(_given(item, CONTENTS), self._between)
        failed = item.get("is_error") or item.get("status") in ("error", "failed")
        message = {"role": "tool", "tool_call_id": _identity(item)}
        message["content"] = f"Error: {text}" if failed else text
        self.finish().append({**message, **_name(item)})

    def _said(self, item: Mapping[str, Any]) -> None:
        """A model's message; before a response's item its reasoning may have come."""
        if not self._apart or (self._answer or {}).get("content") is not None:
            self.finish()
        self._open().update(_name(item))
        self._think(next(filter(None, (_thoughts(item.get(name)) for name in REASONING)), ""))
        if isinstance(item.get("refusal"), str):
            self._say(item["refusal"])
        content = _given(item, CONTENTS)
        for part in content if isinstance(content, list) else [content]:
            self._part(part)
        if not content and isinstance(item.get("audio"), Mapping):
            self._say(told({**item["audio"], "type": "audio"}))
        for name in ("tool_calls", "function_call"):
            calls = item.get(name) or ()
            for call in calls if isinstance(calls, list | tuple) else [calls]:
                self._call(call)
        if not self._apart:
            self.finish()

    def _part(self, part: Any) -> None:
        """A part of a model's message; tools that a vendor runs have their results in it, too."""
        kind = kind_of(part)
        if kind in ("thinking", "reasoning"):
            self._think(_thoughts(part))
        elif is_call(part):
            self._call(part)
        elif is_result(part):
            self._result(part)
        elif kind != "redacted_thinking":  # only the model that wrote it can read it
            self._say(told(part))

    def _open(self) -> Message:
        """The answer that is being gathered, perhaps a new one."""
        if self._answer is None:
            self._answer = {"role": "assistant", "content": None}
        return self._answer

    def _think(self, text: str) -> None:
        if text:
            answer = self._open()
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _say(self, text: str) -> None:
        answer = self._open()
        answer["content"] = (answer["content"] or "") + text

    def _call(self, call: Any) -> None:
        """A call, and its result where the call holds it."""
        if not isinstance(call, Mapping):
            return self._say(told(call))
        inner = _given(call, ("function", "custom"))
        given = inner if isinstance(inner, Mapping) else call
        identity = _identity(call, IDENTITIES[::-1] if given is inner else IDENTITIES)
        kind = kind_of(call).removesuffix("_call") if given is call else ""
        found = _given(given, ARGUMENTS)
        if isinstance(found, str) and kind_of(call).startswith("custom"):
            found = {"input": found}  # the text of a tool that takes no JSON
        if given.get("action") is found and isinstance(found, Mapping):
            found = {n: v for n, v in found.items() if v not in (None, {}, "exec")}
        name = joined(given.get("namespace"), str(given.get("name") or kind or "unknown"))
        function = {"name": name, "arguments": arguments_of(found)}
        calls = self._open().setdefault("tool_calls", [])
        if identity and any(each["id"] == identity for each in calls):
            return None  # it is told in two forms
        calls.append({"id": identity, "type": "function", "function": function})
        if given is call and (found := _given(call, CONTENTS)) is not None:
            self._result({"id": identity, "output": found})

    def _called_in_text(self, item: Mapping[str, Any]) -> None:
        """ShareGPT's turn of calls: JSON of one or several of them."""
        content = _given(item, CONTENTS)
        found = _parsed(content) if isinstance(content, str) else content
        calls = found if isinstance(found, list) else [found]
        if all(isinstance(call, Mapping) for call in calls):
            self._said({"tool_calls": [{"function": call} for call in calls]})
        else:
            self._said({"content": content})


def _name(item: Mapping[str, Any]) -> dict[str, str]:
    """The name of who said it, or its role if that is unknown."""
    role = item.get("role") or item.get("from")
    foreign = isinstance(role, str) and role.lower() not in ROLES and role not in KEPT_ROLES
    name = item.get("name") or (role if foreign else None)
    return {"name": name} if name and isinstance(name, str) else {}


# ---- records ------------------------------------------------------------------------------------


def checked_record(record: Any, where: str) -> dict[str, Any]:
    """A chat log's record with its messages in this form, or a text; other fields stay.

    A record is ``{"messages": [...]}`` or ShareGPT's ``{"conversations": [...]}``, perhaps with
    Anthropic's ``system`` beside it, a bare list of messages, or ``{"text": ...}``.

    Raises:
        ValueError: It is nothing of that, or has no message; the message starts with ``where``.
    """
    fields: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    fields = {"messages": record} if isinstance(record, list) else fields
    turns = _given(fields, ("messages", "conversations"))
    if turns is None and isinstance(fields.get("text"), str):
        return {**fields, "text": re.sub(HALF, "\ufffd", fields["text"])}
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'{where}: expected {{"messages": [...]}} or {{"text": ...}}')
    system = fields.get("system")
    before = [{"role": "system", "content": system}] if isinstance(system, str | list) else []
    try:
        messages = conversation([*(before if system else []), *turns])
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    if not messages:
        raise ValueError(f"{where}: no message that a model can be given")
    for message in messages:
        for name in ("content", "reasoning_content"):
            if name in message:
                message[name] = re.sub(HALF, "\ufffd", message[name])
    kept = {name: value for name, value in fields.items() if name != "conversations"}
    return {**kept, "messages": messages}
