"""The published clients of OpenAI and Anthropic against the whole front."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx")

from kvlingo_mlx.serving.app import wires  # noqa: E402
from tests.support.serving import Running, running  # noqa: E402

KEY = "right-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(
        tmp_path_factory.mktemp("told"), wires(), api_key=KEY, queue_limit=2, routes="r.toml"
    ) as found:
        yield found


@pytest.fixture
def chat(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_chat(chat: Any) -> None:
    answer = chat.chat.completions.with_raw_response.create(
        model="large", messages=user("begin;say one;say two")
    )
    found = answer.parse()
    assert (found.choices[0].message.content, found.model) == ("onetwo", "large")
    assert answer.headers["x-kvlingo-strategy"] == "translate"
    assert found.usage.prompt_tokens_details.cached_tokens == 60
    assert found.usage.kvlingo["translated_tokens"] == 30


def test_chat_streams(chat: Any) -> None:
    """With keep-alives before the first token."""
    frames = list(
        chat.chat.completions.create(
            model="small", messages=user("wait 1;begin;say one;say two"), stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    said = "".join(f.choices[0].delta.content or "" for f in frames if f.choices)
    assert said == "onetwo" and frames[-1].usage.total_tokens == 105


def test_completions_and_responses(chat: Any) -> None:
    assert chat.completions.create(model="small", prompt="begin;say x").choices[0].text == "x"
    answer = chat.responses.create(model="small", input="begin;say one;say two")
    assert answer.output_text == "onetwo" and answer.status == "completed"
    events = chat.responses.create(model="small", input="wait 1;begin;say one", stream=True)
    kinds = [event.type for event in events]
    assert "response.output_text.delta" in kinds and kinds[-1] == "response.completed"


def test_messages(claude: Any) -> None:
    answer = claude.messages.create(
        model="small", max_tokens=9, messages=user("begin;say one;say two")
    )
    assert answer.content[0].text == "onetwo" and answer.stop_reason == "end_turn"
    with claude.messages.stream(
        model="small", max_tokens=9, messages=user("wait 1;begin;say one;say two")
    ) as stream:
        assert stream.get_final_text() == "onetwo"
    count = claude.messages.count_tokens(model="small", messages=user("four"))
    assert count.input_tokens == 4


def test_models(chat: Any, claude: Any) -> None:
    names = ["small", "large", "auto"]
    assert [model.id for model in chat.models.list()] == names
    assert [model.id for model in claude.models.list()] == names
    assert chat.models.retrieve("small").id == claude.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="small, large"):
        chat.models.retrieve("gpt-9")


def test_errors(chat: Any, claude: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="offered are small, large, auto"):
        chat.chat.completions.create(model="gpt-9", messages=user("begin"))
    with pytest.raises(anthropic.NotFoundError, match="offered are small, large, auto") as missing:
        claude.messages.create(model="claude-9", max_tokens=9, messages=user("begin"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(openai.BadRequestError, match="planted failure"):
        chat.chat.completions.create(model="small", messages=user("fail too_long"), stream=True)
    with pytest.raises(openai.APIError, match="planted failure: memory"):
        list(chat.chat.completions.create(
            model="small", messages=user("begin;say a;fail memory"), stream=True
        ))  # fmt: skip
    with pytest.raises(anthropic.APIStatusError, match="planted failure: memory"):
        list(claude.messages.create(
            model="small", max_tokens=9, messages=user("begin;say a;fail memory"), stream=True
        ))  # fmt: skip


def test_keys(server: Running) -> None:
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="a wrong key was given"):
        stranger.models.list()
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(model="small", max_tokens=9, messages=user("begin"))
    assert refused.value.body["error"]["type"] == "authentication_error"


def test_a_stream_that_is_closed_is_cancelled(chat: Any, claude: Any, server: Running) -> None:
    asked: dict[str, Any] = {"model": "small", "stream": True}
    script = "begin;say one;wait 600"
    for create, more in (
        (chat.chat.completions.create, {"messages": user(script)}),
        (chat.completions.create, {"prompt": script}),
        (chat.responses.create, {"input": script}),
        (claude.messages.create, {"messages": user(script), "max_tokens": 9}),
    ):
        before = server.told().count(["cancel"])
        stream = create(**asked, **more)
        assert any("one" in event.model_dump_json() for event in stream)
        stream.close()
        server.until(lambda before=before: server.told().count(["cancel"]) == before + 1)


def test_a_client_asks_again_where_all_places_are_taken(server: Running) -> None:
    """As often as it was told to; it waits as long as the header says."""
    once = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    claude = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    held = [
        httpx.stream(
            "POST", f"{server.url}/v1/completions", headers={"x-api-key": KEY}, timeout=30,
            json={"model": "small", "prompt": "wait 1.5", "stream": True},
        )
        for _ in range(2)
    ]  # fmt: skip
    for response in held:
        response.__enter__()  # a keep-alive has come
    with pytest.raises(openai.RateLimitError, match="2 requests wait already"):
        once.completions.create(model="small", prompt="begin;say x")
    with pytest.raises(anthropic.RateLimitError, match="2 requests wait already"):
        claude.messages.create(model="small", max_tokens=9, messages=user("begin;say x"))
    patient = once.with_options(max_retries=3)
    assert patient.completions.create(model="small", prompt="begin;say x").choices
    for response in held:
        response.__exit__(None, None, None)
