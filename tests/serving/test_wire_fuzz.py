"""Whatever JSON comes, a request is read or refused in one clear line; nothing else happens."""

import itertools
import json
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlingo_mlx.serving.messages import Delta, Failure, GenerationRequest
from kvlingo_mlx.serving.wire import BadRequest, anthropic, chat, responses
from kvlingo_mlx.serving.wire.answers import Gathered
from kvlingo_mlx.serving.wire.forms import sendable
from kvlingo_mlx.tokenization.chat_messages import KEPT_ROLES
from tests.support.wire_app import PLANTED, frames_of
from tests.support.wire_bodies import (
    CHAT,
    COMPLETION,
    DECLARED,
    MESSAGES,
    RESPONSES,
    changed,
    places,
)

FULL: list[tuple[Any, dict[str, Any]]] = [
    (chat.API, CHAT),
    (chat.COMPLETIONS, COMPLETION),
    (anthropic.API, MESSAGES),
    (anthropic.COUNT, {k: v for k, v in MESSAGES.items() if k not in ("max_tokens", "stream")}),
    (responses.API, RESPONSES),
    (responses.API, DECLARED),
]
FULL[3][1].pop("stop_sequences")
SETTINGS = settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)
# Words that mean something somewhere, so that changed bodies come close to right ones.
WORDS = st.sampled_from(
    "text user assistant system tool function auto none required json_schema message reasoning"
    " tool_use tool_result image_url any name type role content weather -1 {} [] null".split()
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, -(10**400), 1e308])
    | st.floats()
    | st.text()
    | st.text(st.characters(codec=None), max_size=5)
    | WORDS
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | WORDS, inner, max_size=4)
    ),
    max_leaves=12,
)

SENDABLE = JSON.filter(sendable)  # the rest of it no body can hold


def check(api: Any, body: Any) -> Any:
    """What the API makes of a body, which must be one of two things; left as it was."""
    before = repr(body)
    try:
        read = api.read(body)
    except BadRequest as bad:
        check_refusal(api, bad.failed)
        return None
    finally:
        assert repr(body) == before
    assert isinstance(read, Gathered)
    check_ask(read.ask)
    if not read.ask.count:
        check_answer(read)
    return read


def check_refusal(api: Any, bad: Failure) -> None:
    """One clear line, that any client can be told."""
    assert 10 < len(bad.message) < 900
    assert bad.message.isprintable() and "Traceback" not in bad.message
    assert bad.param is None or (bad.param and bad.param.isprintable())
    status, body = api.error(bad)
    assert status == 400 and json.dumps(body, ensure_ascii=False).encode()


def check_ask(ask: GenerationRequest) -> None:
    """That a worker can get it, and find what it expects."""
    assert pickle.loads(pickle.dumps(ask)) == ask
    told = (ask.messages, ask.tools, dict(ask.template), ask.prompt, ask.stop, ask.schema)
    json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
    assert (ask.messages is None) != (ask.prompt is None)
    for message in ask.messages or ():
        assert message["role"] in ("system", "user", "assistant", "tool", *KEPT_ROLES)
        assert isinstance(message["content"], str)
        for call in message.get("tool_calls", ()):
            assert all(isinstance(call["function"][name], str) for name in ("name", "arguments"))
    assert ask.sampling.seed is None or 0 <= ask.sampling.seed < 2**64


def check_answer(read: Gathered) -> None:
    """That an answer can be given to it."""
    frames = [read.keep_alive()]
    for event in PLANTED["calls"]:
        frames += read.take(event)
    assert frames_of("".join(frames).encode().decode())
    assert json.dumps(read.body(), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(("api", "full"), FULL)
@SETTINGS
@given(data=st.data())
def test_any_change_of_a_full_body(api: Any, full: dict[str, Any], data: st.DataObject) -> None:
    body = full
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(body)))
        how = data.draw(st.sampled_from(["replaced", "gone", "doubled", "more"]))
        body = changed(body, path, data.draw(JSON), how)
    check(api, body)


@pytest.mark.parametrize(("api", "full"), FULL)
def test_each_place_with_each_kind_of_value(api: Any, full: dict[str, Any]) -> None:
    assert check(api, full) is not None  # else only refusals would be seen
    odd = [None, True, -1, 1.5, 10**30, float("nan"), "x", "\ud800", [], {"a": 1}]
    for path in places(full):
        for value in odd:
            check(api, changed(full, path, value, "replaced"))
        if path:
            check(api, changed(full, path, None, "gone"))


@pytest.mark.parametrize(("api", "full"), FULL)
def test_deep_and_long_bodies(api: Any, full: dict[str, Any]) -> None:
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    for body in (deep, {**full, "metadata": deep}, {**full, "x" * 10**6: 1}):
        with pytest.raises(BadRequest) as refused:
            api.read(body)
        bad = refused.value.failed
        assert len(bad.message) < 300 and len(bad.param or "") < 300


@pytest.mark.parametrize(("api", "full"), FULL[:1] + FULL[2:])
@SETTINGS
@given(data=st.data())
def test_any_past_is_read(api: Any, full: dict[str, Any], data: st.DataObject) -> None:
    """Whatever stands in a message before the last one; a client cannot mend it."""
    name = "input" if api is responses.API else "messages"
    earlier, last = full[name], {"role": "user", "content": "Well?"}
    for _ in range(data.draw(st.integers(1, 3))):
        if ways := [path for path in places(earlier) if path]:
            how = data.draw(st.sampled_from(["replaced", "gone", "doubled", "more"]))
            way = data.draw(st.sampled_from(ways))
            earlier = changed(earlier, way, data.draw(SENDABLE), how)
    body = {**full, name: [*earlier, last], "tool_choice": None}  # which may name a tool of them
    if api is chat.API:
        body |= {"continue_final_message": None, "add_generation_prompt": None}
    read = check(api, body)
    assert read is not None and read.ask.messages[-1] == last


@pytest.mark.parametrize(("api", "body"), FULL[:3] + FULL[4:])
def test_answers_with_odd_arguments_can_be_told(api: Any, body: dict[str, Any]) -> None:
    """What a model writes as arguments is not always what JSON may hold."""
    odd = ("{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": "\ud800"}', "[" * 10_000)
    for text, name in itertools.product(odd, ("f", "weather", "shell", "tool_search")):
        answer = api.read(body)
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": text}}
        told = "".join(answer.take(Delta(tool_calls=(call,))))
        assert frames_of(told.encode().decode()) or api is chat.COMPLETIONS
        assert json.dumps(answer.body(), ensure_ascii=False, allow_nan=False).encode()
