"""The verb with real models, asked by the published clients of both APIs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("httpx")

import kvlingo_mlx as kv  # noqa: E402
from kvlingo_mlx.embedded import zoo  # noqa: E402
from tests.support.served import PLAIN, Server, served  # noqa: E402

NAMES = {"large": "tiny-qwen3-l", "moe": "tiny-qwen3-moe"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = {name: zoo(folder) for name, folder in NAMES.items()}
    with served(tmp_path_factory.mktemp("server"), models) as found:
        yield found


def test_a_client_switches_models_in_mid_conversation(server: Server) -> None:
    talk = kv.Conversation({n: zoo(f) for n, f in NAMES.items()}, enable_thinking=False)
    messages: list[Any] = []
    for turn, name in enumerate(("large", "moe", "large", "moe")):
        question = f"Anna lives in Rome. Oscar lives in Oslo. Where does Oscar live? {turn}"
        messages.append({"role": "user", "content": question})
        answer = server.openai.chat.completions.create(
            model=name, messages=messages, max_tokens=16, extra_body=PLAIN
        )
        message = answer.choices[0].message
        assert message.content.strip() == talk.reply(name, question, max_tokens=16).strip()
        told = answer.usage.model_dump()["kvlingo"]
        assert told["strategy"] == ("translate" if turn else "read")
        if turn:
            assert told["translated_tokens"] > 0 and told["read_tokens"] < 70
        messages.append(message)


def test_streams_and_the_other_api_say_the_same(server: Server) -> None:
    messages = [{"role": "user", "content": "Maria lives in Vienna. Where does Maria live?"}]
    chunks = list(
        server.openai.chat.completions.create(
            model="large",
            messages=messages,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=PLAIN,
        )
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed and chunks[-1].usage.completion_tokens > 3
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with client.messages.stream(
        model="large", messages=messages, max_tokens=16, extra_body=PLAIN
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == streamed and final.usage.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(model="large", messages=messages, extra_body=PLAIN)
    assert counted.input_tokens == (final.usage.input_tokens + final.usage.cache_read_input_tokens)


def test_errors_are_the_clients_own(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="large, moe"):
        server.openai.chat.completions.create(
            model="none", messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(openai.BadRequestError, match="context"):
        server.openai.chat.completions.create(
            model="large", messages=[{"role": "user", "content": "Anna " * 4000}]
        )


def test_a_killed_worker_is_told_and_comes_back(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "Iris lives in Dallas. Where?"}]
    ask = {"model": "large", "messages": messages, "max_tokens": 400, "extra_body": PLAIN}
    stream = server.openai.chat.completions.create(
        stream=True, **{**ask, "extra_body": {**PLAIN, "logit_bias": stops()}}
    )
    next(stream)
    os.kill(server.worker(), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="crashed .SIGKILL."):
        for _ in stream:
            pass
    server.ready()
    assert server.openai.chat.completions.create(**{**ask, "max_tokens": 8}).choices


def stops() -> dict[str, float]:
    """A bias against the tokens that would end the answer."""
    ids = kv.load(zoo("tiny-qwen3-l"), lazy=True).tokenizer.eos_token_ids
    return dict.fromkeys(map(str, ids), -100.0)
