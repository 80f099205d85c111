"""The verb with real models, asked by the published clients of both APIs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx")

import kvlingo_mlx as kv  # noqa: E402
from kvlingo_mlx.embedded import zoo  # noqa: E402
from tests.support.served import PLAIN, ZOO, Server, served  # noqa: E402


def test_a_client_switches_models_in_mid_conversation(zoo_server: Server) -> None:
    talk = kv.Conversation({n: zoo(f) for n, f in ZOO.items()}, enable_thinking=False)
    messages: list[Any] = []
    for turn, name in enumerate(("large", "moe", "large", "moe")):
        question = f"Anna lives in Rome. Oscar lives in Oslo. Where does Oscar live? {turn}"
        messages.append({"role": "user", "content": question})
        answer = zoo_server.openai.chat.completions.create(
            model=name, messages=messages, max_tokens=16, extra_body=PLAIN
        )
        message = answer.choices[0].message
        assert message.content.strip() == talk.reply(name, question, max_tokens=16).strip()
        told = answer.usage.model_dump()["kvlingo"]
        assert told["strategy"] == ("translate" if turn else "read")
        if turn:
            assert told["translated_tokens"] > 0 and told["read_tokens"] < 70
        messages.append(message)


def test_a_server_heals_while_nothing_is_asked(tmp_path: Path) -> None:
    """What it then says is what a conversation says that is healed before each question."""
    models = {name: zoo(folder) for name, folder in ZOO.items()}
    talk = kv.Conversation(models, enable_thinking=False)
    messages, used, healed = list[Any](), set[str](), 0
    facts = "Anna lives in Rome. Oscar lives in Oslo. Maria lives in Lima. " * 6
    with served(tmp_path, models, "-c", "heal=idle") as server:
        assert server.status()["healed"] == 0
        for turn, name in enumerate(("large", "moe", "moe", "large")):
            question = f"{'' if turn else facts}Where does Oscar live? {turn}"
            messages.append({"role": "user", "content": question})
            answer = server.openai.chat.completions.create(
                model=name, messages=messages, max_tokens=16, extra_body=PLAIN
            )
            messages.append(answer.choices[0].message)
            said = talk.reply(name, question, max_tokens=16)
            assert answer.choices[0].message.content.strip() == said.strip()
            used.add(name)  # others are not loaded, so their lines do not follow
            for each in used:
                healed += talk.lines[each].left(answers=False)
                assert talk.heal(each) == 0
            server.until(lambda: server.status()["healed"] == healed)  # noqa: B023
        time.sleep(0.5)
        assert server.status()["healed"] == healed > 250  # and then it rests
        assert (
            f"kvlingo_healed_tokens_total {float(healed)}"
            in httpx.get(f"{server.url}/metrics").text
        )


def test_streams_and_the_other_api_say_the_same(zoo_server: Server) -> None:
    messages = [{"role": "user", "content": "Maria lives in Vienna. Where does Maria live?"}]
    chunks = list(
        zoo_server.openai.chat.completions.create(
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
    client = anthropic.Anthropic(base_url=zoo_server.url, api_key="none", max_retries=0)
    with client.messages.stream(
        model="large", messages=messages, max_tokens=16, extra_body=PLAIN
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == streamed and final.usage.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(model="large", messages=messages, extra_body=PLAIN)
    assert counted.input_tokens == (final.usage.input_tokens + final.usage.cache_read_input_tokens)


def test_errors_are_the_clients_own(zoo_server: Server) -> None:
    for none, long in (
        (openai.NotFoundError, openai.BadRequestError),
        (anthropic.NotFoundError, anthropic.BadRequestError),
    ):
        ask = chat if none is openai.NotFoundError else message
        with pytest.raises(none, match="large, moe"):
            ask(zoo_server, "x", model="none")
        with pytest.raises(long, match="context"):
            ask(zoo_server, "Anna " * 4000)
    with pytest.raises(openai.BadRequestError, match="logit_bias names token 99999"):
        chat(zoo_server, "x", logit_bias={"99999": 1})


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_a_client_that_leaves_stops_its_answer(zoo_server: Server, client: str) -> None:
    """What was read for it is kept. It leaves a stream, or runs out of patience without one."""
    ask: Callable[..., Any] = {"openai": chat, "anthropic": message}[client]
    endless = {"max_tokens": 1900, "extra_body": {**PLAIN, "logit_bias": stops()}}
    question = f"The code of {client} is 4711. " * 9 + "What is the code?"
    left = zoo_server.left()
    stream = ask(zoo_server, question, stream=True, **endless)
    for _ in range(5):
        next(iter(stream))
    stream.close()
    zoo_server.until(lambda: zoo_server.left() == left + 1)
    usage = ask(zoo_server, question).usage.model_dump()["kvlingo"]
    assert (usage["strategy"], usage["read_tokens"]) == ("kept", 1)
    asyncio.run(cancelled(zoo_server, client, [{"role": "user", "content": question}], endless))
    zoo_server.until(lambda: zoo_server.left() == left + 2)
    zoo_server.until(lambda: not zoo_server.status()["running"])


async def cancelled(server: Server, client: str, messages: list[Any], facts: Any) -> None:
    """Let an asynchronous client's task be cancelled while its answer is being written."""
    made = {"openai": openai.AsyncOpenAI, "anthropic": anthropic.AsyncAnthropic}[client]
    base = server.url + {"openai": "/v1", "anthropic": ""}[client]
    async with made(base_url=base, api_key="none", max_retries=0) as alone:
        asked = alone.chat.completions if client == "openai" else alone.messages
        answer = asyncio.create_task(asked.create(model="large", messages=messages, **facts))
        await asyncio.to_thread(server.until, lambda: server.status()["running"])
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer


def test_a_killed_server_comes_back(zoo_server: Server) -> None:
    """A client that tries again gets its answer when the next process is ready."""
    biased = {**PLAIN, "logit_bias": stops()}
    stream = chat(zoo_server, "Iris?", stream=True, max_tokens=400, extra_body=biased)
    next(stream)
    os.kill(zoo_server.child(), signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.TransportError)):
        for _ in stream:
            pass
    patient = claude(zoo_server).with_options(max_retries=30)
    asked: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": "Iris?"}]}
    assert patient.messages.create(**asked, max_tokens=8).content
    assert chat(zoo_server, "Iris?", max_tokens=8).choices


def claude(server: Server) -> Any:
    """Anthropic's client of a server."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def chat(server: Server, text: str, **more: Any) -> Any:
    """What OpenAI's client gets for one message."""
    facts = {"model": "large", "max_tokens": 8, "extra_body": PLAIN, **more}
    messages = [{"role": "user", "content": text}]
    return server.openai.chat.completions.create(messages=messages, **facts)


def message(server: Server, text: str, **more: Any) -> Any:
    """What Anthropic's client gets for one message."""
    facts = {"model": "large", "max_tokens": 8, "extra_body": PLAIN, **more}
    return claude(server).messages.create(messages=[{"role": "user", "content": text}], **facts)


def stops() -> dict[str, float]:
    """A bias against the tokens that would end the answer."""
    ids = kv.load(zoo("tiny-qwen3-l"), lazy=True).tokenizer.eos_token_ids
    return dict.fromkeys(map(str, ids), -100.0)
