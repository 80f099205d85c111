"""Records to (prefix, continuation) token ids: conversations or plain text, from JSONL.

The device and the CUDA path render records with this one room. ``tokenizer`` is any
transformers tokenizer, bare or as mlx-lm wraps it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

MAX_PREFIX, MAX_CONTINUATION = 16_384, 2048
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Sample:
    """A prefix whose cache is translated, and what follows it (may be empty)."""

    prefix: tuple[int, ...]
    continuation: tuple[int, ...]


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read {"messages": [...]} or {"text": ...} records, one a line; blank lines are skipped.

    Raises:
        ValueError: The file is missing, empty, or a line is not such a record; the
            message names the file and the line.
    """
    path = Path(path)
    records = []
    try:
        # Not splitlines: a JSON string may hold U+2028, which is a line's end to it.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            records.append(_parse(line, f"{path}, line {number}"))
    if not records:
        raise ValueError(
            f'{path} holds no records; each line should be {{"messages": [...]}} or {{"text": ...}}'
        )
    return records


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    check_record(record, where)
    return record


def check_record(record: Any, where: str) -> None:
    """Refuse (ValueError) what is neither a conversation nor a text."""
    fields = record if isinstance(record, dict) else {}
    messages = fields.get("messages")
    if messages is None and isinstance(fields.get("text"), str):
        _check_unicode(fields["text"], where)
        return
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where}: expected {{"messages": [...]}} or {{"text": ...}}')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: a message needs a role and a text content")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{where}: role {message.get('role')!r}, expected one of {', '.join(ROLES)}"
            )
        _check_unicode(message["content"], where)


def _check_unicode(text: str, where: str) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: text that is not valid Unicode ({error.reason})") from None


def to_samples(
    records: Iterable[Mapping[str, Any] | Sample], tokenizer: Any, context_length: int
) -> Iterator[Sample]:
    """Tokenise records for a pair that shares ``tokenizer`` and its chat template.

    Records whose prefix is empty or beyond ``context_length`` are left out.
    """
    limit = min(MAX_PREFIX, context_length)
    for number, record in enumerate(records, 1):
        if not isinstance(record, Sample):
            check_record(record, f"record {number}")
            record = tokenise(record, tokenizer)
        room = min(MAX_CONTINUATION, context_length - len(record.prefix))
        if 0 < len(record.prefix) <= limit:
            yield Sample(record.prefix, record.continuation[:room])


def tokenise(record: Mapping[str, Any], tokenizer: Any, turn: int = -1) -> Sample:
    """One record as token ids.

    A conversation is cut where an assistant turn opens (``turn`` counts those turns, the
    last by default; one before any question is none) and ends with it: the prefix is the
    chat template up to and including that header, the turn itself the continuation. A turn
    without reasoning leaves Qwen3's empty think block in the prefix (appendix "Training
    data"). A conversation without an assistant turn has no continuation. A plain text is
    cut in the middle.
    """
    if record.get("messages") is None:
        tokens = encode_plain(tokenizer, record["text"])
        middle = len(tokens) // 2
        return Sample(tokens[:middle], tokens[middle:])
    messages = list(record["messages"])
    asked = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > asked]
    if not replies:
        return Sample(encode_plain(tokenizer, _render(tokenizer, messages, True)), ())
    prefix, continuation = cut(messages[: replies[turn] + 1], tokenizer)
    return Sample(encode_plain(tokenizer, prefix), encode_plain(tokenizer, continuation))


def cut(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> tuple[str, str]:
    """A conversation that ends with a reply, as text before and from that reply on."""
    reply = messages[-1]
    prefix = _render(tokenizer, messages[:-1], True, enable_thinking=reasons(reply))
    whole = _render(tokenizer, messages, False)
    if whole.startswith(prefix):
        return prefix, whole[len(prefix) :].rstrip("\n")
    return prefix, reply["content"] + (tokenizer.eos_token or "")


def reasons(reply: Mapping[str, Any]) -> bool:
    """Whether a reply opens with a reasoning trace: a property of the record."""
    trace, closed, _ = reply["content"].lstrip().partition("</think>")
    opens = bool(closed) and trace.startswith("<think>") and trace != "<think>"
    return bool(reply.get("reasoning_content")) or (opens and not trace[7:].isspace())


def encode_plain(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a rendered text, with nothing added."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], opens: bool, **switch: bool
) -> str:
    # mlx-lm's wrapper also knows templates written in Python.
    if not getattr(tokenizer, "has_chat_template", tokenizer.chat_template is not None):
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(
            f'the tokenizer {name} has no chat template; give {{"text": ...}} records instead '
            "(train: --plain-text)"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=opens, **switch
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template does not take a conversation of {roles:.200} ({error})"
        ) from None
