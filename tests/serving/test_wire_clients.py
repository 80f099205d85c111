"""The clients that OpenAI and Anthropic publish, against a whole server of planted answers."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.support.fixtures import Temp
from tests.support.serving import Running
from tests.support.wire_app import CALL, CALL_2, PLANTED, Planted, planted_server

HI: list[Any] = [{"role": "user", "content": "hi"}]
KEY = "right-key"
SAID = {
    "role": "assistant", "content": "One moment.", "reasoning_content": "Ask.",
    "tool_calls": [CALL, CALL_2],
}  # fmt: skip
RESULTS = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "9"} for n in (1, 2)]
GONE_ON = ({"role": "system", "content": "Be kind."}, HI[0], SAID, *RESULTS)
PLAIN = "Grüß Gott,\n\ndata: 世界 \u2028🌍."


@pytest.fixture(scope="module")
def server(tmp_path_factory: Temp) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("told")
    with planted_server(folder, api_key=KEY, queue_limit=2, routes="r.toml") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


class City(BaseModel):
    city: str


def test_chat_parses_into_a_class(client: Any) -> None:
    answer = client.chat.completions.parse(model="json", messages=HI, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Malmö")
    assert Planted.asks[-1].schema["properties"]["city"]["type"] == "string"


def test_chat_history_comes_back_as_it_went(client: Any) -> None:
    answer = client.chat.completions.create(model="calls", messages=HI)
    message = answer.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "9"} for call in message.tool_calls
    ]
    client.chat.completions.create(model="plain", messages=[*HI, message, *results])
    dumped = message.model_dump()
    client.chat.completions.create(model="plain", messages=[*HI, dumped, *results])
    for ask in Planted.asks[-2:]:
        assert ask.messages[1] == SAID
        assert ask.messages[2] == {"role": "tool", "content": "9", "tool_call_id": "call_1"}


def test_chat_logprobs(client: Any) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(model="logprobs", messages=HI, **asked)
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("Hej", -0.5, [72, 101, 106])
    assert first.top_logprobs[1].logprob == -9999.0
    assert Planted.asks[-1].logprobs == 2
    (chunk,) = [
        c
        for c in client.chat.completions.create(model="logprobs", messages=HI, stream=True, **asked)
        if c.choices[0].logprobs
    ]
    assert [t.token for t in chunk.choices[0].logprobs.content] == ["Hej", " då"]


def test_completions(client: Any) -> None:
    answer = client.completions.create(model="plain", prompt=[1, 2, 3], max_tokens=9)
    assert answer.choices[0].text == PLAIN and answer.usage.completion_tokens == 7
    assert Planted.asks[-1].prompt == (1, 2, 3) and Planted.asks[-1].messages is None
    chunks = list(client.completions.create(model="cut", prompt="x", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Once upon a"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_responses_whole(client: Any) -> None:
    answer = client.responses.create(model="thinks", input="2 + 2?", metadata={"a": "b"})
    assert answer.output_text == "Four" and answer.status == "completed"
    assert (
        answer.output[0].type == "reasoning" and answer.output[0].content[0].text == "Let me see."
    )
    assert answer.usage.input_tokens_details.cached_tokens == 100
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    assert answer.usage.kvlingo["strategy"] == "translate" and answer.metadata == {"a": "b"}


def test_responses_history_comes_back_as_it_went(client: Any) -> None:
    answer = client.responses.create(model="calls", input="hi")
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "9"}
        for item in answer.output
        if item.type == "function_call"
    ]
    history = [*HI, *answer.output, *results]
    client.responses.create(model="plain", input=history, instructions="Be kind.", store=False)
    assert Planted.asks[-1].messages == GONE_ON


def test_messages_call_tools_and_history_comes_back(claude: Any) -> None:
    tool = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
    answer = claude.messages.create(model="calls", max_tokens=9, messages=HI, tools=[tool])
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[2].input == {"city": "Malmö", "days": 2}
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "9"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    history = [
        *HI,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    claude.messages.create(model="plain", max_tokens=9, messages=history, system="Be kind.")
    assert Planted.asks[-1].messages == (*GONE_ON, {"role": "user", "content": "Go on."})


def test_messages_stop_reasons(claude: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 9, "messages": HI}
    stopped = claude.messages.create(model="stopped", stop_sequences=["three"], **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert Planted.asks[-1].stop == ("three",) and Planted.asks[-1].max_tokens == 9
    assert claude.messages.create(model="cut", **asked).stop_reason == "max_tokens"


def test_tokens_are_counted(claude: Any) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    counted = claude.messages.count_tokens(model="plain", messages=HI, system="s", tools=tools)
    assert counted.input_tokens == 321
    assert Planted.asks[-1].messages == ({"role": "system", "content": "s"}, HI[0])
    with pytest.raises(anthropic.BadRequestError, match="messages: Field required"):
        claude.messages.with_raw_response.count_tokens(model="plain", messages=anthropic.NOT_GIVEN)


def test_failures_in_the_middle_of_a_stream(client: Any, claude: Any) -> None:
    said = []
    with pytest.raises(openai.APIError, match="the worker stopped"):
        for chunk in client.chat.completions.create(model="breaks", messages=HI, stream=True):
            said.append(chunk.choices[0].delta.content)
    assert said[-1] == "Well"
    with pytest.raises(openai.APIError, match="the worker stopped"):
        list(client.completions.create(model="breaks", prompt="x", stream=True))
    with pytest.raises(anthropic.APIStatusError, match="the worker stopped"):
        list(claude.messages.create(model="breaks", messages=HI, max_tokens=3, stream=True))
    last = list(client.responses.create(model="breaks", input="x", stream=True))[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message.startswith("the worker stopped")
    assert last.response.output_text == "Well"
    last = list(client.responses.create(model="long", input="x", stream=True))[-1]
    assert last.response.error.code == "context_length_exceeded"  # Codex looks for it in streams


def test_models(client: Any, claude: Any, server: Running) -> None:
    names = ["small", "large", *PLANTED, "auto"]
    assert [model.id for model in client.models.list()] == names
    assert [model.id for model in claude.models.list()] == names
    for path in ("/v1/models/", "/v1/models"):
        found = httpx.get(server.url + path, headers={"x-api-key": KEY}).json()["data"]
        assert [model["id"] for model in found] == names
        assert {model["created"] for model in found} == {client.models.retrieve("large").created}
    assert client.models.retrieve("small").kvlingo["context"] == 4096
    assert client.models.retrieve("small").id == claude.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="small, large"):
        client.models.retrieve("gpt-9")
