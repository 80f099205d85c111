"""Text to (prefix, continuation) token ids: conversations or plain text, from JSONL."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.language_model import LanguageModel

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
        lines = path.read_text(encoding="utf-8").splitlines()
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
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where}: expected {{"messages": [...]}} or {{"text": ...}}')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: a message needs a role and a text content")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{where}: role {message.get('role')!r}, expected one of {', '.join(ROLES)}"
            )


def to_samples(
    records: Iterable[Mapping[str, Any] | Sample], model: LanguageModel
) -> Iterator[Sample]:
    """Tokenise records for a pair that shares ``model``'s tokenizer and template.

    Records whose prefix is empty or beyond the model's context are left out.
    """
    limit = min(MAX_PREFIX, model.context_length)
    for number, record in enumerate(records, 1):
        if not isinstance(record, Sample):
            check_record(record, f"record {number}")
            record = tokenise(record, model)
        room = min(MAX_CONTINUATION, model.context_length - len(record.prefix))
        if 0 < len(record.prefix) <= limit:
            yield Sample(record.prefix, record.continuation[:room])


def tokenise(record: Mapping[str, Any], model: LanguageModel) -> Sample:
    """One record as token ids.

    A conversation is cut where its last assistant turn opens: the prefix is the chat
    template up to and including that header, the turn itself the continuation. A turn
    without reasoning leaves Qwen3's empty think block in the prefix (appendix
    "Training data"). A plain text is cut in the middle.
    """
    if "text" in record:
        tokens = tuple(model.tokenizer.encode(record["text"], add_special_tokens=False))
        middle = len(tokens) // 2
        return Sample(tokens[:middle], tokens[middle:])
    messages = list(record["messages"])
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns:
        return Sample(_ids(model, _render(model, messages, True)), ())
    prefix, continuation = _cut(model, messages[: turns[-1] + 1])
    return Sample(_ids(model, prefix), _ids(model, continuation))


def _cut(model: LanguageModel, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    reply = messages[-1]
    thinking = bool(reply.get("reasoning_content")) or "<think>" in reply["content"]
    prefix = _render(model, messages[:-1], True, enable_thinking=thinking)
    whole = _render(model, messages, False)
    if whole.startswith(prefix):
        return prefix, whole[len(prefix) :].rstrip("\n")
    return prefix, reply["content"] + (model.tokenizer.eos_token or "")


def _render(
    model: LanguageModel, messages: Sequence[Mapping[str, Any]], opens: bool, **switch: bool
) -> str:
    if not model.tokenizer.has_chat_template:
        raise ValueError(f'{model.name} has no chat template; give {{"text": ...}} records instead')
    return model.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=opens, **switch
    )


def _ids(model: LanguageModel, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))
