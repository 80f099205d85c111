"""Tool calls by models whose marks and template are Qwen3's, asked by the published clients.

The models are random: what makes an answer a call is the grammar alone.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from kvlingo_mlx.backend import mx

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

import kvlingo_mlx as kv
from kvlingo_mlx.serving.scheduler import Scheduler
from kvlingo_mlx.serving.settings import Settings
from tests.support import tiny
from tests.support.engines import Clients, asked
from tests.support.served import Server, served
from tests.support.tool_callers import write_caller

ASKED = [{"role": "user", "content": "Will it rain?"}]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Place(Strict):
    city: Literal["Oslo", "Rome", 'the "Hague"']


class Weather(Strict):
    """A tool whose parameters refer to a definition."""

    place: Place
    days: int = Field(ge=1, le=9)


class Now(Strict):
    """A tool without parameters."""


TOOLS: dict[str, type[BaseModel]] = {"weather": Weather, "now": Now}
CHAT = [openai.pydantic_function_tool(cls, name=name) for name, cls in TOOLS.items()]
FLAT = [{"type": "function", **tool["function"]} for tool in CHAT]
CLAUDE = [{"name": n, "input_schema": c.model_json_schema()} for n, c in TOOLS.items()]


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    """Two models of one tokenizer, and a translator for one direction."""
    write_caller(root / "a"), write_caller(root / "b", seed=9, layers=4)
    tiny.write_random_translator(root / "a-b", root / "a", root / "b", nu=3, seed=7)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    models = {name: root / name for name in "ab"}
    with served(root / "home", models, "--translator", str(root / "a-b")) as found:
        yield found


@pytest.fixture(scope="module")
def claude(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def check(name: str, arguments: str) -> None:
    """The call is one of an existing tool, as its class reads it."""
    TOOLS[name].model_validate_json(arguments)


def chat(server: Server, messages: list[Any], **more: Any) -> Any:
    facts = {"model": "a", "max_tokens": 150, "tools": CHAT, "parallel_tool_calls": False, **more}
    return server.openai.chat.completions.create(messages=messages, **facts)


@pytest.mark.parametrize("choice", ["required", "weather", "now"])
def test_chat(server: Server, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    wanted = choice if choice == "required" else named
    drawn = set()
    for seed in range(3):
        answer = chat(server, ASKED, tool_choice=wanted, temperature=1.0, seed=seed).choices[0]
        (call,) = answer.message.tool_calls
        assert choice in ("required", call.function.name) and answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        check(call.function.name, call.function.arguments)
        drawn.add(call.function.arguments)
    assert len(drawn) > 1 or choice != "weather"  # seeds are heeded within the grammar
    with server.openai.chat.completions.stream(
        model="a", messages=ASKED, tools=CHAT, tool_choice=wanted, seed=2, temperature=1.0,
        max_tokens=150, parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )


def test_the_other_apis(server: Server, claude: Any) -> None:
    more: dict[str, Any] = {"model": "a"}
    one = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **one}, {"type": "tool", "name": "weather"}):
        answer = claude.messages.create(
            messages=ASKED, tools=CLAUDE, tool_choice=choice, max_tokens=150, **more
        )
        (block,) = answer.content
        assert block.type == "tool_use" and answer.stop_reason == "tool_use"
        assert choice.get("name") in (None, block.name)
        check(block.name, json.dumps(block.input))
    for wanted in ("required", {"type": "function", "name": "now"}):
        response = server.openai.responses.create(
            input="Will it rain?", tools=FLAT, tool_choice=wanted, max_output_tokens=150,
            parallel_tool_calls=False, **more,
        )  # fmt: skip
        (item,) = response.output
        assert item.type == "function_call" and response.status == "completed"
        check(item.name, item.arguments)
    assert item.name == "now"


def test_calls_that_cannot_be_demanded(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="names .nobody., which is not in tools"):
        chat(server, ASKED, tool_choice={"type": "function", "function": {"name": "nobody"}})
    never = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    broken = [{"type": "function", "function": {"name": "f", "parameters": never}}]
    with pytest.raises(openai.BadRequestError, match="parameters of a tool are refused"):
        chat(server, ASKED, tools=broken, tool_choice="required")


# What llguidance refuses, among it JavaScript's patterns, in a schema or in one of its properties.
REFUSED: dict[str, Any] = {
    "": {},
    "names": {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}},
    "lookahead": {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)\w+@\w+$"},
    "pattern": {"type": "array", "items": {"pattern": r"\bfoo\b"}},
    "type": {"anyOf": [{"type": "file"}, {"type": "string", "multipleOf": 0}]},
    "reference": {"$ref": "#/$defs/unknown"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_keywords_that_no_grammar_knows_are_left_to_the_model(server: Server, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "days": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True,
                     "minItems": 1, "maxItems": 1},
            "known": {"$ref": "#/$defs/known"}, name: REFUSED[name],
        },
        "required": ["days", "known"], "propertyNames": {"maxLength": 9},
        "$defs": {"known": {"const": "k"}, "other": REFUSED[name]},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = server.openai.chat.completions.create(
        model="a", messages=ASKED, max_tokens=60, response_format=form
    )
    assert re.match(r'{"days":\[[12]\],"known":"k"', answer.choices[0].message.content)


def test_thinking_switched_on_keeps_what_was_read(server: Server) -> None:
    history = [{"role": "user", "content": "Is it far to the sea from here? " * 5}]
    for thinks in (False, True):
        answer = server.openai.chat.completions.create(
            model="a", messages=history, max_tokens=2,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinks}},
        )  # fmt: skip
    assert answer.usage.prompt_tokens_details.cached_tokens > 20


def test_none_forbids_what_auto_allows(server: Server, root: Path) -> None:
    """The mark of a call is made the likeliest token."""
    tokenizer = kv.load(root / "a", lazy=True).tokenizer
    (mark,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    bias = {str(mark): 100.0}
    for choice, begun in (("auto", True), ("none", False)):
        answer = chat(server, ASKED, tool_choice=choice, logit_bias=bias, max_tokens=3).choices[0]
        assert answer.message.content.startswith("<tool_call>") is begun
        assert answer.message.tool_calls is None and answer.finish_reason == "length"


def result(call: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": "rain all day"}


def test_a_chat_with_results_goes_on_from_its_line(server: Server) -> None:
    """Also when another model goes on, and when the result's message is sent twice."""
    question = [{"role": "user", "content": "And in Rome, if it is not too much to ask?"}]
    first = chat(server, question, tool_choice="required")
    message = first.choices[0].message
    held = first.usage.total_tokens
    history = [*question, message, result(message.tool_calls[0])]
    again = chat(server, history, max_tokens=5).usage
    assert held - 1 <= again.prompt_tokens_details.cached_tokens <= held
    assert again.model_dump()["kvlingo"]["strategy"] == "kept"
    other = chat(server, history, model="b", max_tokens=5).usage
    told = other.model_dump()["kvlingo"]
    assert told["strategy"] == "translate" and told["translated_tokens"] >= held - 1
    edited = [*history[:-1], {**history[-1], "content": "sun"}]
    least = chat(server, edited, max_tokens=5).usage.prompt_tokens_details.cached_tokens
    assert least >= held - 1
    changed = message.model_dump()
    changed["tool_calls"][0]["function"]["arguments"] = '{"place": {"city": "Rome"}, "days": 9.5}'
    lost = chat(server, [*question, changed, history[-1]], max_tokens=5).usage
    assert lost.prompt_tokens_details.cached_tokens < held - 1


@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_of_two_calls(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    """With ``parallel_tool_calls`` false it ends after the first one, and is gone on with there."""
    tokenizer = kv.load(root / "a", lazy=True).tokenizer
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ids = tokenizer.encode(f"{call}\n{call}", add_special_tokens=False)
    script = itertools.chain(ids, itertools.repeat(tokenizer.eos_token_id))
    monkeypatch.setattr(
        "kvlingo_mlx.serving.scheduler.sampler_of", lambda _: lambda _: mx.array([next(script)])
    )
    clients = engine_of(root, tmp_path)
    facts: dict[str, Any] = {"tools": tuple(CHAT), "parallel_tool_calls": parallel, "template": {}}
    told = clients.together([asked("a", ASKED, max_tokens=200, **facts)])[0]
    calls = [call for event in told.events for call in getattr(event, "tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["now"] * (2 if parallel else 1)
    assert told.end.reason == "tool_calls"
    monkeypatch.undo()
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "noon"} for each in calls]
    again = clients.one("a", [*ASKED, said, *results], max_tokens=3, **facts).usage
    held = told.usage.prompt_tokens + told.usage.completion_tokens
    assert held - 1 <= again.cached_tokens <= held


def engine_of(root: Path, tmp_path: Path) -> Clients:
    kept = str(tmp_path / "kept")
    return Clients(Scheduler(Settings(models={"a": str(root / "a")}, conversations=kept)))


SCHEMA = {
    "type": "object", "properties": {"hour": {"enum": [11, 12]}}, "required": ["hour"],
    "additionalProperties": False,
}  # fmt: skip
FORMS = {  # what tells mlx-lm the form of calls, and a call in it
    "json": ("", '<tool_call>\n{"name": "now", "arguments": {"at": "<b>"}}\n</tool_call>'),
    "xml": (
        "{#- <tool_call>\\n<function= -#}",
        "<tool_call>\n<function=now>\n<parameter=at>\n<b>\n</parameter>\n</function>\n</tool_call>",
    ),
}


def written(tokenizer: Any, text: str) -> Any:
    """A sampler that writes a text as long as it may, and then what is likeliest, but no call."""
    (begun,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    left = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    def sampler(logprobs: mx.array) -> mx.array:
        if left and logprobs[0, left[0]].item() > -float("inf"):
            return mx.array([left.pop(0)])
        left.clear()
        return mx.argmax(
            mx.where(mx.arange(logprobs.shape[-1]) == begun, -float("inf"), logprobs), -1
        )

    return sampler


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_schema_holds_for_the_text_alone(
    form: str, opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls pass, whatever their form, one or several, also after a reasoning trace."""
    path = write_caller(tmp_path / "a") / "tokenizer_config.json"
    facts = json.loads(path.read_text())
    facts["chat_template"] = FORMS[form][0] + facts["chat_template"]
    if opened:  # enable_thinking=False, as the requests have it, opens a trace
        facts["chat_template"] = facts["chat_template"].replace("\\n</think>\\n\\n", "")
    path.write_text(json.dumps(facts))
    clients, call = engine_of(tmp_path, tmp_path), FORMS[form][1]
    tokenizer = kv.load(tmp_path / "a", lazy=True).tokenizer

    def answer(text: str, **more: Any) -> tuple[str, int, str]:
        script = written(tokenizer, f"so.</think>\n\n{text}" if opened else text)
        monkeypatch.setattr("kvlingo_mlx.serving.scheduler.sampler_of", lambda _: script)
        facts = {"tools": tuple(CHAT), "schema": SCHEMA, "max_tokens": 200, **more}
        question = [{"role": "user", "content": "What is <think>?"}]
        told = clients.one("a", question, **facts)
        calls = [call for event in told.events for call in getattr(event, "tool_calls", ())]
        assert all(json.loads(c["function"]["arguments"]) == {"at": "<b>"} for c in calls)
        reasoning = "".join(getattr(event, "reasoning", "") for event in told.events)
        assert reasoning == ("so." if opened else "")
        return told.text, len(calls), told.end.reason

    assert answer(call) == ("", 1, "tool_calls")
    assert answer(f"{call}\n{call}")[1:] == (2, "tool_calls")
    assert answer(f"{call}\n{call}", parallel_tool_calls=False)[1:] == (1, "tool_calls")
    assert answer('{"hour":12}') == ('{"hour":12}', 0, "stop")
    if not opened:  # a trace ends with these lines
        assert answer(f"\n\n{call}") == ("\n\n", 1, "tool_calls")
        assert answer('\n{"hour":12}') == ('\n{"hour":12}', 0, "stop")
    for told in (answer("It is noon."), answer(call, tool_choice="none"), answer(call, tools=())):
        assert json.loads(told[0])["hour"] in (11, 12) and not told[1]
    assert not answer(f"{call}It is noon.")[0].strip()
    if form == "xml":
        assert answer(call, tool_choice="now", schema=None)[1:] == (1, "tool_calls")


def test_long_tools_are_shared_without_a_message(root: Path, tmp_path: Path) -> None:
    """What stands before the messages is long enough to be worth it."""
    clients, other_question = engine_of(root, tmp_path), [{"role": "user", "content": "Snow?"}]

    def tools(last: str) -> tuple[dict[str, Any], ...]:
        texts = [*(f"Say whether {n} days are fine. " * 9 for n in range(9)), last]
        return tuple(
            {"type": "function", "function": {"name": f"f{n}", "description": text}}
            for n, text in enumerate(texts)
        )

    clients.one("a", ASKED, tools=tools("Anna"))
    same = clients.one("a", other_question, tools=tools("Anna"))
    assert same.usage.read_tokens < 30 < 2000 < same.usage.cached_tokens
    other = clients.one("a", other_question, tools=tools("Oscar"))
    assert other.usage.cached_tokens > 2000
    short = clients.one("a", other_question)
    assert short.usage.cached_tokens == 0  # negative control: nothing is shared
