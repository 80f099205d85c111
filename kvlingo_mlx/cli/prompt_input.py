"""The prompt of a verb that answers."""

from __future__ import annotations

import json
import sys
from typing import Any

MESSAGES_HELP = 'A JSON or JSONL file of chat messages, {"role": ..., "content": ...}; - reads \
standard input.'


def read_prompt(prompt: str | None, messages_file: str | None) -> str | list[dict[str, Any]]:
    """The text of ``--prompt``, or the messages of ``--messages``.

    Raises:
        ValueError: Neither or both were given, the input is empty, or it is something else.
    """
    if messages_file is not None:
        if prompt is not None:
            raise ValueError("--prompt and --messages are both given; leave out one of them")
        return _messages(_read(messages_file), messages_file)
    if prompt is None:
        raise ValueError("no prompt is given; give --prompt TEXT, or --messages FILE")
    text = prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = _stdin("--prompt") if prompt == "-" else text
    if not text.strip():
        raise ValueError("the prompt is empty; give some text")
    return text


def _read(path: str) -> str:
    if path == "-":
        return _stdin("--messages")
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"--messages {path} cannot be read: {error.strerror}") from None


def _stdin(option: str) -> str:
    if sys.stdin is None:
        raise ValueError(f"{option} - reads standard input, which is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text ({error.reason})") from None


def _messages(text: str, path: str) -> list[dict[str, Any]]:
    """Messages from a JSON list, one per line, or a training record {"messages": [...]}."""
    found = _json(text, path)
    records = [r for r in found if isinstance(r, dict) and "messages" in r]
    if len(records) > 1:
        raise ValueError(f"{path} holds {len(records)} conversations; give a file of one")
    if records:
        found = records[0]["messages"]
    bad = next((m for m in found if not isinstance(m, dict) or "role" not in m), None)
    if not isinstance(found, list) or not found or bad is not None:
        what = "no messages" if not found else f"{bad!r:.60}"
        raise ValueError(f'{path} holds {what}; give messages {{"role": ..., "content": ...}}')
    return found


def _json(text: str, path: str) -> list[Any]:
    """All values in a JSON or JSONL file, as a list."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        return whole if isinstance(whole, list) else [whole]
    found = []
    # splitlines would also split at U+2028, which a JSON string may hold.
    for number, line in enumerate(text.split("\n"), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    return found
