"""The published clients of OpenAI and Anthropic against the whole front."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx")

from kvlingo_mlx.serving.app import apis  # noqa: E402
from tests.support.serving import Running, running  # noqa: E402

KEY = "right-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(
        tmp_path_factory.mktemp("told"), apis(), api_key=KEY, queue_limit=2, routes="r.toml"
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


def test_streams_that_are_kept_alive(chat: Any, claude: Any) -> None:
    """With what each client takes for a sign of life before the first token."""
    script = "wait 1;begin;say one;say two"
    asked: dict[str, Any] = {"model": "small", "stream": True}
    frames = list(chat.chat.completions.create(messages=user(script), **asked))
    assert "".join(f.choices[0].delta.content or "" for f in frames) == "onetwo"
    events = list(chat.responses.create(input=script, **asked))
    assert events[-1].response.output_text == "onetwo"
    with claude.messages.stream(model="small", max_tokens=9, messages=user(script)) as stream:
        assert stream.get_final_text() == "onetwo"


def test_models(chat: Any, claude: Any) -> None:
    names = ["small", "large", "auto"]
    assert [model.id for model in chat.models.list()] == names
    assert [model.id for model in claude.models.list()] == names
    assert chat.models.retrieve("small").id == claude.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="small, large"):
        chat.models.retrieve("gpt-9")


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
