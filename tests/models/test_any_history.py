"""Histories of any order, fitted to templates that behave as those of released models."""

import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import kvlingo_mlx as kv
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import render_text
from tests.support.real_templates import FAMILIES, NAMES, TOOL, Family, write_real
from tests.support.router_sessions import CHAT_TOOLS, FACT, WORD

Json = dict[str, Any]
EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "25"))
ROLES = ("system", "user", "assistant", "developer")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    root = tmp_path_factory.mktemp("real")
    return {family.name: kv.load(write_real(root / family.name, family)) for family in FAMILIES}


@st.composite
def histories(draw: st.DrawFn) -> list[Json]:
    """Messages in the chat API's form, in any order; each text and argument has its own word."""
    words = (f"fact{number:04d}x" for number in itertools.count())
    found: list[Json] = []
    waiting: list[str] = []  # calls without a result
    for number in range(draw(st.integers(1, 9))):
        what = draw(st.sampled_from(["say", "say", "calls", "result", "results", "orphan"]))
        if what == "calls":
            calls = [
                _call(draw, f"{number}{n}", next(words)) for n in range(draw(st.integers(1, 3)))
            ]
            waiting = [call["id"] for call in calls]
            found.append({"role": "assistant", "tool_calls": calls, **_said(draw, next(words))})
        elif what in ("result", "results") and waiting:
            for _ in range(1 if what == "result" else len(waiting)):
                found.append(_result(waiting.pop(0), next(words)))
        elif what == "orphan":
            found.append(_result("call_of_nobody", next(words)))
        else:
            found.append({"role": draw(st.sampled_from(ROLES)), **_said(draw, next(words))})
    return found


def _said(draw: st.DrawFn, word: str) -> Json:
    marks = st.sampled_from(["<think>", "</think>", "<|channel>", "<channel|>"])
    content = draw(
        st.sampled_from([f"It is {word}.", f" {word}\n", f"- {word}", "", None])
        | st.tuples(marks, marks).map(lambda m: f"The mark {m[0]} is {word}, not {m[1]}, yes.")
    )
    thought = draw(st.sampled_from([{}, {"reasoning_content": "Hm."}]))
    return {"content": content, "name": draw(st.sampled_from(["user", "Ann", "Bob"])), **thought}


def _call(draw: st.DrawFn, number: str, word: str) -> Json:
    whole: Json = draw(
        st.sampled_from([{"place": word}, {"place": word, "deep": [1, {"a": None}]}])
    )
    given = draw(st.sampled_from([whole, json.dumps(whole), '{"place": "' + word, f'["{word}"]']))
    function = {"name": TOOL, "arguments": given}
    return {"id": f"call_{number}_0123456789abcdef", "type": "function", "function": function}


def _result(call: str, word: str) -> Json:
    return {"role": "tool", "tool_call_id": call, "content": f"There is {word}."}


def spoken(message: Json) -> list[str]:
    """The words of a message's text."""
    return FACT.findall(message["content"] or "")


def arguments(message: Json) -> list[str]:
    """The words of a message's calls."""
    return FACT.findall(json.dumps(message.get("tool_calls") or ()))


def check(family: Family, history: Sequence[Json], prompt: str) -> None:
    """All words once; texts in their order, but for a system prompt that a template moves."""
    found = WORD.findall(prompt)
    for message in history:
        for word in [*spoken(message), *arguments(message)]:
            assert found.count(word) == 1, f"{word} stands {found.count(word)} times in {prompt!r}"
    led = itertools.takewhile(lambda m: m["role"] in ("system", "developer"), history)
    start = len(list(led)) if family.unstable else 0
    said = [word for message in history[start:] for word in spoken(message)]
    assert [word for word in found if word in said] == said, prompt
    calls = {
        c["id"]: FACT.findall(json.dumps(c)) for m in history for c in m.get("tool_calls") or ()
    }
    for message in history:
        for call in calls.get(message.get("tool_call_id", ""), ()):
            assert found.index(call) < found.index(spoken(message)[0]), prompt


def checked(model: LanguageModel, family: Family, history: list[Json], tools: Any) -> str:
    prompt = render_text(model, history, tools=tools)
    check(family, history, prompt)
    said = (m.get("name", "user") for m in history if m["role"] == "user")
    assert all(name in prompt for name in said if name != "user")
    return prompt


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True,
          phases=[Phase.explicit, Phase.generate],  # to shrink takes minutes
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(history=histories(), tools=st.sampled_from([None, CHAT_TOOLS]), data=st.data())
def test_a_history_of_any_order(
    models: dict[str, LanguageModel], family: Family, history: list[Json], tools: Any, data: Any
) -> None:
    """It is taken, nothing is lost or told twice, and its beginning is that of a shorter one."""
    model = models[family.name]
    prompt = checked(model, family, history, tools)
    cut = data.draw(st.integers(1, len(history)))
    asked = [number for number, m in enumerate(history[:cut]) if m["role"] == "user" and spoken(m)]
    if family.unstable or not asked:
        return
    if family.forgets:
        history = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
        prompt = checked(model, family, history, tools)
    before = checked(model, family, history[:cut], tools)
    common = common_prefix(before, prompt)
    for word in (w for m in history[: asked[-1] + 1] for w in spoken(m)):
        assert re.search(rf"\b{word}\b", prompt[:common]), f"{word}: {before!r}\n{prompt!r}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_name_is_told_where_its_user_begins_to_speak(
    models: dict[str, LanguageModel], family: Family
) -> None:
    """A lone user's stands once, and none that is but the role."""
    history: list[Json] = []
    for number, name in enumerate(("Ann", "Ann", "user", "Bob", "Ann")):
        history.append({"role": "user", "name": name, "content": f"fact{number}x"})
        history.append({"role": "assistant", "name": "Helper", "content": "yes"})
    prompt = checked(models[family.name], family, history[:-1], None)
    assert re.findall(r"(?:User: )?(\w*:?) ?(fact\dx)", prompt) == [  # SmolVLM's role is no name
        ("Ann:", "fact0x"), ("", "fact1x"), ("", "fact2x"), ("Bob:", "fact3x"), ("Ann:", "fact4x"),
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_thought_does_not_change_how_a_call_is_told(
    models: dict[str, LanguageModel], family: Family
) -> None:
    """Beside a text, too, which gpt-oss's template refuses in one answer."""
    function = {"name": TOOL, "arguments": '{"place": "fact0002x"}'}
    answer = {
        "role": "assistant", "content": "fact0001x",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }  # fmt: skip
    around = [{"role": "user", "content": "fact0000x"}], [_result("call_0", "fact0003x")]
    told = []
    for thought in ({}, {"reasoning_content": "Hm."}):
        history = [*around[0], answer | thought, *around[1]]
        prompt = checked(models[family.name], family, history, CHAT_TOOLS)
        told.append(prompt[prompt.index("fact0001x") :])
    assert told[0] == told[1]


# ---- templates that refuse ---------------------------------------------------------------------

TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
TOLD = "{%- for t in tools or [] -%}{{- t.function.name + '\\n' -}}{%- endfor -%}"
PROPERTY = (
    "{%- for t in tools or [] -%}{{- t.function.name + t.function.description -}}"
    "{%- for k in t.function.parameters.properties -%}"
    "{%- set p = t.function.parameters.properties[k] -%}{{- k + ' ' + p.type + ' ' + "
    "p.description -}}{%- endfor -%}{%- endfor -%}"
)


def raises(condition: str) -> str:
    return "{%- if " + condition + " -%}{{- raise_exception('Not this.') -}}{%- endif -%}"


# What stands before the messages, and before each of them.
REFUSING = {
    "no names": (TOLD, raises("'name' in m")),
    "no other fields": (TOLD, raises("m | length > 2")),
    "no empty text": (TOLD, raises("not m.content")),
    "no white space": (TOLD, raises("m.content != m.content | trim")),
    "a system message": (TOLD + raises("messages[0].role != 'system'"), ""),
    "two messages": (TOLD + raises("messages | length < 2"), ""),
    "no thoughts": (TOLD, raises("'reasoning_content' in m or 'thinking' in m")),
    "described tools": (TOLD.replace("name +", "name + t.function.description +"), ""),
    "typed properties": (PROPERTY, ""),
    "listed properties": (PROPERTY.replace("' ' + p.type", "' ' + p.type | join").replace(
        "p.description", "''"), ""),
    "no such parameter": (TOLD.replace("{{- t", raises("'word' in t.function.parameters | string")
                          + "{{- t").replace("name +", "name + t.function.description +"), ""),
    "names": (TOLD, "{{- m.name + '\\n' if m.name -}}"),
}  # fmt: skip
ODD_TOOLS: list[Json] = [
    {"name": "plainest"},
    {"name": "undescribed", "parameters": {"type": "object", "properties": {"a": {}}}},
    {"name": "unlisted", "description": "", "parameters": {"type": "object"}},
    {"name": "empty", "description": None, "parameters": {}},
    {"name": "union", "description": "Deep.", "parameters": {"type": "object", "properties": {
        "word_b": {"type": ["string", "null"]}, "word_c": {"anyOf": [{"type": "array"}, {}]},
        "word_d": {"type": "object", "properties": {"word_e": {"enum": [1]}}}}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    root, family = tmp_path_factory.mktemp("refusing"), FAMILIES[NAMES.index("smollm2")]
    found = {}
    for name, (first, each) in REFUSING.items():
        folder = write_real(root / name, family)
        text = f"{first}{{%- for m in messages -%}}{each}{TURN}{{%- endfor -%}}"
        (folder / "chat_template.jinja").write_text(text)
        found[name] = kv.load(folder)
    return found


@pytest.mark.parametrize("name", REFUSING)
@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True,
          phases=[Phase.explicit, Phase.generate],
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(history=histories(), tools=st.lists(st.sampled_from(ODD_TOOLS), unique_by=str))
def test_a_template_that_refuses(
    refusing: dict[str, LanguageModel], name: str, history: list[Json], tools: Any
) -> None:
    """Histories and tools are fitted to it, and no word of theirs is lost."""
    given_tools = [{"type": "function", "function": tool} for tool in tools]
    prompt = checked(refusing[name], FAMILIES[0], history, given_tools or None)
    for tool in tools:
        assert tool["name"] in prompt
    words = {"typed properties": r"word_[b-d]", "no such parameter": r"word_\w"}
    for word in re.findall(words.get(name, "(?!)"), str(tools)):
        assert word in prompt


def test_a_lost_word_is_noticed() -> None:
    """The negative control: templates alone lose, move or repeat what was said."""
    history = [{"role": "user", "content": f"fact{n:04d}x"} for n in range(3)]
    good = "\n".join(m["content"] for m in history)
    check(FAMILIES[0], history, good)
    for bad in (
        good.replace("fact0001x", ""),
        good + " fact0001x",
        good[::-1],
        good.replace("2", "3"),
    ):
        with pytest.raises(AssertionError):
            check(FAMILIES[0], history, bad)
