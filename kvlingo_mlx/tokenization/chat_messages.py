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
ALONE = ("text", "input_text", "output_text", "summary_text", "refusal")  # text is all of these
EMPTY: tuple[Any, ...] = (None, "", [], {})
# What nobody reads: base64; codes (texts without spaces) under names that begin so; ids that a
# provider gave, or that join a result to its call; bytes of media. Other ids are a tool's facts.
BASE64 = re.compile(
    r"data:[^,\s]+;base64,\S*|(?=[^\0]{2000})([\w+/=-]{60,}\s{1,2})*[\w+/=-]*\s*", re.ASCII
)
CODE = re.compile(r"[\w+/=.:-]*")
OPAQUE = ("encrypted", "redacted", "signature", "thought_signature")
GIVEN_ID = re.compile(r"(msg|resp|rs|fc|call|(srv|mcp)?toolu|file|cntr|chatcmpl)[_-]\w{10,}")
UNREAD = ("cache_control", "tool_call_id", "tool_use_id")
BYTES = ("data", "bytes", "blob", "file_data", "b64_json", "base64", "result")
MEDIA_TYPES = ("media_type", "mime_type")
BINARY = re.compile(r"(?!text/|application/json)\w+/")
ABOUT_MEDIA = (*MEDIA_TYPES, *"type format detail status quality size background".split())
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "tool_plan")
THOUGHTS = ("thinking", "text", "content", "summary")
ARGUMENTS = ("arguments", "input", "action", "operation", "code", "queries")
IDENTITIES = ("tool_call_id", "tool_use_id", "call_id", "toolCallId", "id")
NAMES = ("name", "toolName")
# What a call or a result says about itself, and not to the model.
ENVELOPE = (*"type role from namespace status is_error execution".split(), *NAMES, *IDENTITIES)
# Where a record has what was asked and answered, if not as messages.
RECORD = _by_name({"user": "instruction prompt input", "assistant": "completion chosen output"})

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


def _snake(name: Any) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", str(name)).lower()


def kind_of(item: Any) -> str:
    """An item's ``type`` in snake_case, without the date that ends some; "" if it has none."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return re.sub(r"_2\d{7}$", "", _snake(kind)) if isinstance(kind, str) else ""


def is_call(item: Any) -> bool:
    """Whether an item or a part is a call, of whatever tool."""
    return kind_of(item).endswith(("_call", "tool_use")) and kind_of(item) not in NOTES


def is_result(item: Any) -> bool:
    """Whether an item or a part is the result of a call."""
    return kind_of(item).endswith(("_output", "tool_result"))


def _given(item: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The first of some fields that says something, else the first that is there; or None."""
    found = [item[name] for name in names if item.get(name) is not None]
    return next((value for value in found if value not in EMPTY), found[0] if found else None)


def words(part: Any) -> str | None:
    """The text of a part of any kind; None if it has none."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        found = [text for each in part if (text := words(each)) is not None]
        return "".join(found) if found else None
    if not isinstance(part, Mapping) or NOTES.get(kind_of(part), "").startswith(SEEN):
        return None
    names = (*TEXTS, "data") if kind_of(part) in ("text", "content") else TEXTS
    texts = [text for name in names if (text := words(part.get(name))) is not None]
    if texts:
        return next(filter(None, texts), "")
    source = part.get("source")  # of a document
    return words(source) if isinstance(source, Mapping) else None


def told(part: Any) -> str:
    """What a model is told of a part: its text, then its other fields; a note in media's place."""
    if not isinstance(part, Mapping):
        return content_text(part) if isinstance(part, list) else _json(part)
    kind, note = kind_of(part), NOTES.get(kind_of(part), "")
    shown, text = readable(part), words(part)
    if text is not None and (kind in ALONE or shown.keys() == {"text"}):
        return text
    if not kind or not _shallow(part, 10):  # each level below reads all that is in it
        return _json(shown)
    main = next((name for name in (*TEXTS, "source", kind) if words(part.get(name))), "")
    if main and not note.startswith(SEEN):
        inner = {"type": kind, **part[main]} if isinstance(part[main], Mapping) else part[main]
        more = {n: v for n, v in shown.items() if n not in ("type", main) and v not in EMPTY}
        lines = [f"{n}: {_json(v)}" for n, v in more.items() if not note or _leaves({n: v})]
        return "\n".join([told(inner), *lines])
    if note:
        about = ", ".join(text for text in _leaves(shown) if "://" not in text)  # signed anew
        return f"[{note}: {about}]" if about else f"[{note}]"
    return _json(shown) if len(shown) > 1 else f"[{kind}]"


def _json(value: Any) -> str:
    if isinstance(value, str) or value in EMPTY:
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def readable(value: Any, media: bool = False) -> Any:
    """A value without what nobody reads, at any depth; ``media``: it is a part of media."""
    if isinstance(value, list):
        return [readable(each, media) for each in value if not _is_unread("", each, media)]
    if not isinstance(value, Mapping):
        return value
    types = [str(each) for name, each in value.items() if _snake(name) in MEDIA_TYPES]
    media |= kind_of(value) in NOTES or any(map(BINARY.match, types))
    return {
        name: readable(each, media)
        for name, each in value.items()
        if not _is_unread(_snake(name), each, media)
    }


def _is_unread(name: str, value: Any, media: bool) -> bool:
    if not isinstance(value, str):
        return name in UNREAD
    given = (name == "id" or name.endswith("_id")) and (media or GIVEN_ID.fullmatch(value))
    code = given or name.startswith(OPAQUE) or (media and name in BYTES)
    return bool(name in UNREAD or BASE64.fullmatch(value) or (code and CODE.fullmatch(value)))


def _leaves(value: Any) -> list[str]:
    """The texts that say what media show."""
    if isinstance(value, Mapping):
        shown = [each for name, each in value.items() if _snake(name) not in ABOUT_MEDIA]
        return [text for each in shown for text in _leaves(each)]
    if isinstance(value, list):
        return [text for each in value for text in _leaves(each)]
    return [value] if isinstance(value, str) and value else []


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

    A part that is more than a text has lines of its own.
    """
    parts = content if isinstance(content, list) else [content]
    more = any(kind_of(part) not in ("", *ALONE) for part in parts)
    return (between or "\n" * more).join(map(told, parts))


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


def json_object(found: Any) -> dict[str, Any] | None:
    """An object, perhaps as its JSON text, or empty in the spelling of PHP; None if it is none."""
    found = _parsed(found) if isinstance(found, str) else found
    return {} if found == [] else found if isinstance(found, dict) else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(repaired(text), parse_constant=str)
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
        self._begun = 0  # how many messages stood before the item that is read

    def finish(self) -> list[Message]:
        """All messages; the answer that is being gathered is complete."""
        if self._answer is not None:
            self._messages.append(self._answer | {"content": self._answer["content"] or ""})
            self._answer = None
        return self._messages

    def take(self, item: Any) -> None:
        """Add one item."""
        self._begun = len(self._messages)
        if not isinstance(item, Mapping):
            if item is not None:
                self._asked({"content": item}, "user")
        elif kind_of(item) == "reasoning":
            answer = self._answer or {}
            if answer.get("content") is not None or "tool_calls" in answer:
                self.finish()
            self._think(_thoughts(_given(item, ("content", "summary"))))
        elif is_call(item):
            self._call(item)
        elif is_result(item) or ((role := role_of(item)) == "tool" and not _has_results(item)):
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
        unsaid = content in EMPTY and not isinstance(item.get("role") or item.get("from"), str)
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
        """A result: its error and what it says; the other fields of one that says nothing."""
        error = item.get("error") or None  # False is none
        failed = item.get("is_error") or item.get("status") in ("error", "failed") or error
        said = [each for each in (error, _given(item, CONTENTS)) if each not in EMPTY]
        text = "\n".join(content_text(each, self._between) for each in said or [_rest(item)])
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
            calls, copied = item.get(name) or (), self._calls()
            for call in calls if isinstance(calls, list | tuple) else [calls]:
                self._call(call, copied)
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

    def _call(self, call: Any, copied: Iterable[Message] = ()) -> None:
        """A call, and its result where it holds one; ``copied``: calls told in another form."""
        if not isinstance(call, Mapping):
            return self._say(told(call))
        inner = _given(call, ("function", "custom"))
        given = inner if isinstance(inner, Mapping) else call
        identity = _identity(call, IDENTITIES[::-1] if given is inner else IDENTITIES)
        kind = kind_of(call).removesuffix("_call") if given is call else ""
        found = _given(given, ARGUMENTS)
        if found is None and given is call:
            found = _rest(call)  # of a kind that has names of its own
        if isinstance(found, str) and kind_of(call).startswith("custom"):
            found = {"input": found}  # the text of a tool that takes no JSON
        if given.get("action") is found and isinstance(found, Mapping):
            found = {n: v for n, v in found.items() if v not in (None, {}, "exec")}
        name = joined(given.get("namespace"), str(_given(given, NAMES) or kind or "unknown"))
        function = {"name": name, "arguments": arguments_of(found)}
        own = (each for each in self._calls() if each["id"] == identity != "")
        again = any(each["function"] == function or each in copied for each in own)
        if again or (not identity and function in [each["function"] for each in copied]):
            return None  # it is told twice, or in two forms
        made = {"id": identity, "type": "function", "function": function}
        self._open().setdefault("tool_calls", []).append(made)
        result = {n: call[n] for n in (*CONTENTS, "error") if call.get(n) is not None}
        if given is call and result:
            self._result({"id": identity, **result})

    def _calls(self) -> list[Message]:
        """The calls of the item that is read, and of the answer to which it belongs."""
        read = [*self._messages[self._begun :], self._answer or {}]
        return [each for message in read for each in message.get("tool_calls", ())]

    def _called_in_text(self, item: Mapping[str, Any]) -> None:
        """ShareGPT's turn of calls: JSON of one or several of them."""
        content = _given(item, CONTENTS)
        found = _parsed(content) if isinstance(content, str) else content
        calls = found if isinstance(found, list) else [found]
        if all(isinstance(call, Mapping) for call in calls):
            self._said({"tool_calls": [{"function": call} for call in calls]})
        else:
            self._said({"content": content})


def _has_results(item: Mapping[str, Any]) -> bool:
    parts = _given(item, CONTENTS) if "tool_call_id" not in item else None
    return isinstance(parts, list) and any(map(is_result, parts))


def _rest(item: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an item that are neither about itself nor empty."""
    own = (*ENVELOPE, *CONTENTS, "error")
    return {n: v for n, v in readable(item).items() if n not in own and v not in EMPTY}


def _name(item: Mapping[str, Any]) -> dict[str, str]:
    """The name of who said it, or its role if that is unknown."""
    role = item.get("role") or item.get("from")
    foreign = isinstance(role, str) and role.lower() not in ROLES and role not in KEPT_ROLES
    name = _given(item, NAMES) or (role if foreign else None)
    return {"name": name} if name and isinstance(name, str) else {}


# ---- records ------------------------------------------------------------------------------------


def checked_record(record: Any, where: str) -> dict[str, Any]:
    """A chat log's record with its messages in this form, or a text; other fields stay.

    A record is ``{"messages": [...]}`` or ShareGPT's ``{"conversations": [...]}``, perhaps with
    Anthropic's ``system`` beside it, a bare list of messages, a response's ``input`` (perhaps with
    its ``instructions`` and ``output``), mlx-lm's ``{"prompt": ..., "completion": ...}`` or
    ``{"prompt": ..., "chosen": ...}``, both texts or messages, or ``{"text": ...}``.

    Raises:
        ValueError: It is nothing of that, or has no message; the message starts with ``where``.
    """
    fields: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    fields = {"messages": record} if isinstance(record, list) else fields
    turns = _given(fields, ("messages", "conversations"))
    if turns is None and isinstance(fields.get("text"), str):
        return {**fields, "text": re.sub(HALF, "\ufffd", fields["text"])}
    apart = turns is None
    turns = _asked_and_answered(fields) if apart else turns
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f'{where}: expected {{"messages": [...]}}, {{"input": [...]}}, '
            '{"prompt": ..., "completion": ...} or {"text": ...}'
        )
    system = _given(fields, ("system", "instructions"))
    before = [{"role": "system", "content": system}] if isinstance(system, str | list) else []
    try:
        messages = conversation([*(before if system else []), *turns], apart=apart)
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


def _asked_and_answered(fields: Mapping[str, Any]) -> list[Any]:
    """What was asked and answered, each a text, a message or several; [] if there is no such."""
    found = list[Any]()
    for name, role in RECORD.items():
        said = fields.get(name) or None
        said = {"content": said} if isinstance(said, str) else said
        if isinstance(said, Mapping):
            found.append({"role": role, **said})
        elif isinstance(said, list) and said:
            whole = isinstance(said[0], Mapping) and said[0].get("role") in ("system", "user")
            found = said if whole else [*found, *said]
    return found if len(found) > 1 or isinstance(fields.get("input"), list) else []
