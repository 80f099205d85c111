"""What clients are told of planted events, as a stream and whole."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlingo_mlx.serving.messages import Delta, Failure, Finished, FirstToken, Progress
from kvlingo_mlx.serving.wire import anthropic, chat, openai_error, responses
from tests.support.wire_app import CALL, PLANTED, USAGE, events, frames_of, stream, whole

HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HI, "stream": True}
COUNTED = {**CHAT, "stream_options": {"include_usage": True}}
TEXT = {"model": "m", "prompt": "hi", "stream": True}
MESSAGES = {**CHAT, "max_tokens": 5}
RESPONSES = {"model": "m", "input": "hi", "stream": True}
ALL: list[tuple[Any, dict[str, Any]]] = [
    (chat.API, COUNTED),
    (chat.COMPLETIONS, TEXT),
    (anthropic.API, MESSAGES),
    (responses.API, RESPONSES),
]


def test_signs_of_life() -> None:
    for api, body in ALL:
        answer = api.read(body)
        answer.take(Progress(64, 120))
        before = answer.keep_alive()
        assert before.endswith("\n\n")
        found = frames_of(before)
        if api in (chat.API, chat.COMPLETIONS):
            assert before == ": keepalive 64/120\n\n" and not found
        if api is anthropic.API:
            assert found == [("ping", {"type": "ping"})]
        if api is responses.API:
            assert [name for name, _ in found] == ["response.created", "response.in_progress"]
            later = frames_of("".join(answer.take(PLANTED["plain"][2])) + answer.keep_alive())
            assert [name for name, _ in later] == ["response.in_progress"]
            assert later[0][1]["sequence_number"] == 2


def test_usage_of_streams() -> None:
    *chunks, last, done = stream(chat.API, COUNTED, PLANTED["plain"])
    assert done == "[DONE]" and last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["kvlingo"] == {
        "cached_tokens": 100,
        "translated_tokens": 15,
        "read_tokens": 5,
        "strategy": "translate",
        "translator": "small-to-large",
        "translator_digest": "ab12",
        "ttft_s": 0.25,
        "queue_s": 0.125,
        "reread_s": 9.5,
        "fallback": None,
        "doubt": None,
    }


def test_thinking_may_be_left_out() -> None:
    hidden = {**MESSAGES, "thinking": {"type": "adaptive", "display": "omitted"}}
    content = whole(anthropic.API, hidden, PLANTED["thinks"])["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]
    assert content[0]["thinking"] == "" and content[0]["signature"]
    told = json.dumps(stream(anthropic.API, hidden, PLANTED["thinks"]))
    assert "see." not in told and "Four" in told


TEXTS = st.text(max_size=4)
PIECES = st.builds(
    Delta,
    content=TEXTS,
    reasoning=st.just("") | TEXTS,
    tool_calls=st.lists(st.just(CALL), max_size=2).map(tuple),
)
ENDS = st.sampled_from(["stop", "length", "tool_calls"])
SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def rebuilt_chat(frames: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for frame in frames[:-1]:
        for choice in frame["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            message["tool_calls"] += delta.get("tool_calls", [])
    assert [c.pop("index") for c in message["tool_calls"]] == [*range(len(message["tool_calls"]))]
    return message


@SETTINGS
@given(pieces=st.lists(PIECES, max_size=6), reason=ENDS)
def test_chat_streamed_is_chat_whole(pieces: list[Delta], reason: str) -> None:
    planted = events(*pieces, reason=reason)
    message = whole(chat.API, COUNTED, planted)["choices"][0]["message"]
    frames = stream(chat.API, COUNTED, planted)
    assert rebuilt_chat(frames) == {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "tool_calls": message.get("tool_calls", []),
    }
    assert frames[-3]["choices"][0]["finish_reason"] == reason


@SETTINGS
@given(pieces=st.lists(PIECES, max_size=6), reason=ENDS)
def test_messages_streamed_are_messages_whole(pieces: list[Delta], reason: str) -> None:
    planted = events(*pieces, reason=reason)
    blocks: list[Any] = []
    frames = stream(anthropic.API, MESSAGES, planted)
    assert [frames[place]["type"] for place in (0, -1)] == ["message_start", "message_stop"]
    for frame in frames:
        if frame["type"] == "content_block_start":
            blocks.append(frame["content_block"] | {"json": ""})
        if frame["type"] == "content_block_delta":
            kind, text = frame["delta"].values()
            assert frame["index"] == len(blocks) - 1
            name = {"input_json_delta": "json"}.get(kind, kind.removesuffix("_delta"))
            blocks[-1][name] += text
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    body = whole(anthropic.API, MESSAGES, planted)
    (ended,) = (frame for frame in frames if frame["type"] == "message_delta")
    assert (blocks, ended["delta"]["stop_reason"]) == (body["content"], body["stop_reason"])
    said = "".join(block["text"] for block in blocks if block["type"] == "text")
    assert said == "".join(piece.content for piece in pieces)


@SETTINGS
@given(pieces=st.lists(PIECES, max_size=6), reason=ENDS)
def test_responses_streamed_are_responses_whole(pieces: list[Delta], reason: str) -> None:
    planted = events(*pieces, reason=reason)
    frames = stream(responses.API, RESPONSES, planted)
    assert [f["sequence_number"] for f in frames] == list(range(len(frames)))
    assert frames[0]["type"] == "response.created"
    assert frames[-1]["type"] in ("response.completed", "response.incomplete")
    items = [f["item"] for f in frames if f["type"] == "response.output_item.done"]
    assert items == frames[-1]["response"]["output"]
    texts = [f["delta"] for f in frames if f["type"] == "response.output_text.delta"]
    done = [f["text"] for f in frames if f["type"] == "response.output_text.done"]
    assert "".join(texts) == "".join(done) == "".join(piece.content for piece in pieces)
    body = whole(responses.API, RESPONSES, planted)
    assert [strip(item) for item in body["output"]] == [strip(item) for item in items]
    assert body["status"] == ("incomplete" if reason == "length" else "completed")


def strip(item: dict[str, Any]) -> dict[str, Any]:
    """An item without its id, which is another in each answer."""
    return {key: value for key, value in item.items() if key != "id"}


@SETTINGS
@given(pieces=st.lists(PIECES, max_size=6))
def test_completions_streamed_are_completions_whole(pieces: list[Delta]) -> None:
    frames = stream(chat.COMPLETIONS, TEXT, events(*pieces))
    text = "".join(frame["choices"][0]["text"] for frame in frames[:-1])
    assert text == whole(chat.COMPLETIONS, TEXT, events(*pieces))["choices"][0]["text"]
    assert text == "".join(piece.reasoning + piece.content for piece in pieces)


@pytest.mark.parametrize(("api", "body"), ALL)
def test_nothing_is_told_after_the_end(api: Any, body: dict[str, Any]) -> None:
    for last in (Finished("stop", USAGE), Failure("crashed", "gone")):
        answer = api.read(body)
        assert answer.take(last)
        for event in (
            Delta("more"),
            Finished("stop", USAGE),
            Failure("internal", "x"),
            FirstToken("m", USAGE),
        ):
            assert answer.take(event) == []


@pytest.mark.parametrize(
    ("kind", "status", "theirs"),
    [
        ("invalid", 400, "invalid_request_error"),
        ("too_long", 400, "invalid_request_error"),
        ("unauthorized", 401, "authentication_error"),
        ("forbidden", 403, "permission_error"),
        ("not_found", 404, "not_found_error"),
        ("too_large", 413, "request_too_large"),
        ("busy", 429, "rate_limit_error"),
        ("unready", 503, "overloaded_error"),
        ("memory", 503, "overloaded_error"),
        ("crashed", 503, "api_error"),
        ("internal", 500, "api_error"),
        ("unheard of", 500, "api_error"),
    ],
)
def test_kinds_of_failures(kind: str, status: int, theirs: str) -> None:
    failed = Failure(kind, "why", "field")
    assert anthropic.API.error(failed) == (
        status,
        {"type": "error", "error": {"type": theirs, "message": "why"}},
    )
    found, body = openai_error(failed)
    assert found == status and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["param"] == "field"
    for api in (chat.API, chat.COMPLETIONS, responses.API):
        assert api.error(failed) == (found, body)
