"""Bodies of requests: right ones in which most fields are used, and what chance makes of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
SAMPLED: dict[str, Any] = {
    "model": "small", "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7,
    "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
    "logit_bias": {"42": -1.5}, "kvlingo": {"strategy": "reread"},
    "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip
CALL = {"id": "c", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLED,
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Anna lives in Rome."}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "9", "tool_call_id": "c"},
            {"role": "user", "content": "Where?"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto", "stop": ["END"], "stream": True, "logprobs": True,
        "stream_options": {"include_usage": True}, "top_logprobs": 2, "max_tokens": 4, "n": 1,
        "response_format": {"type": "text"}, "user": "somebody",
    },
    "/v1/completions": {
        **{k: v for k, v in SAMPLED.items() if k != "chat_template_kwargs"},
        "prompt": "Anna lives in", "max_tokens": 4, "stop": "END", "echo": True, "logprobs": 2,
        "stream": False,
    },
    "/v1/messages": {
        **SAMPLED,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Anna lives in Rome."},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "9"},
                {"type": "text", "text": "Well?"},
            ]},
        ],
        "tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
        "max_tokens": 4, "stop_sequences": ["END"], "stream": True,
        "metadata": {"user_id": "somebody"},
    },
    "/v1/messages/count_tokens": {
        "model": "small", "system": "Be kind.", "messages": [{"role": "user", "content": "Hi"}],
    },
    "/v1/responses": {
        **SAMPLED,
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Anna?"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "9"},
        ],
        "max_output_tokens": 4, "stream": True, "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "store": False,
    },
}  # fmt: skip
# The embedded models' templates announce no tools, so bodies with them are refused in the end.
PLAIN = {
    path: {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}
    for path, body in WHOLE.items()
}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.5, 1e308, float("nan"), float("inf"), 2**31, 2**63,
    2**64, 10**30, -(10**400), "", " ", "x", "\0", "\ud800", "user", "tool", "assistant", "system",
    "auto", "none", "required", "reread", "large", "json_schema", "text", "image_url", "\u202e",
    "9" * 500, "Anna " * 3000, [], [[]], [None], {}, {"type": "text"}, {"role": "user"},
    {"type": "image_url"}, {"": ""}, [1, 2, 3], ["END"], {"type": "json_object"}, "🙂", "\r\n",
]  # fmt: skip


def _deep(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found] if depth % 2 else {"a": found}
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body but the body itself."""
    inner = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = list(enumerate(value))
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(body: Any, chance: random.Random) -> Any:
    """A copy of a body in which one place is replaced, gone, doubled, or has one thing more."""
    body = copy.deepcopy(body)
    path = chance.choice(list(places(body)) or [()])
    if not path:
        return chance.choice(ODD)
    here = body
    for key in path[:-1]:
        here = here[key]
    how = chance.choice(["odd", "odd", "deep", "gone", "doubled", "nested", "more"])
    value = _deep(chance.choice([3, 40, 63, 200])) if how == "deep" else chance.choice(ODD)
    if how == "gone":
        del here[path[-1]]
    elif how == "nested":
        here[path[-1]] = chance.choice([[here[path[-1]]], {"a": here[path[-1]]}])
    elif how in ("doubled", "more") and isinstance(here, list):
        here.insert(0, copy.deepcopy(here[path[-1]]) if how == "doubled" else value)
    elif how == "more":
        here[chance.choice(["", "x", "type", "text", "content", "name", "\ud800"])] = value
    else:
        here[path[-1]] = value
    return body


def broken(text: bytes, chance: random.Random) -> bytes:
    """A body's bytes, made into what is not JSON or hardly is."""
    at = chance.randrange(len(text) + 1)
    ways = [
        b"", b"null", b"[]", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 5_000, text[:at],
        text + text, text[:at] + bytes([chance.randrange(256)]) + text[at:], text + b"x",
        b"\xef\xbb\xbf" + text, text.decode().encode("utf-16"), text[:-1] + b',"model":"none"}',
        b'{"model":"small",' + text[1:], text.replace(b'"small"', b"NaN"),
        text.replace(b"Anna", b"\xc3\x28"), text.replace(b"Anna", b"\\ud83d"),
        text.replace(b"0.5", b"1e999"), text.replace(b"7", b"7" * 5000), b"0" * 150_000,
    ]  # fmt: skip
    return chance.choice(ways)


def drawn(seed: int, count: int) -> Iterator[tuple[str, bytes, str]]:
    """So many requests: path, body, content type."""
    chance = random.Random(seed)
    types = ["application/json"] * 8 + ["", "text/plain", "multipart/form-data", "a;b;c", "x" * 500]
    for _ in range(count):
        path = chance.choice(list(WHOLE))
        body: Any = chance.choice([WHOLE, PLAIN, PLAIN])[path]
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            body = changed(body, chance)
        text = json.dumps(body).encode()
        if chance.random() < 0.2:
            text = broken(json.dumps(PLAIN[path]).encode(), chance)
        yield path, text, chance.choice(types)
