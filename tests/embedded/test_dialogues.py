"""The dialogues the zoo is trained and judged on, and its chat template."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvlingo_mlx.embedded import dialogues
from tests.support import ROOT

TEMPLATE = ROOT / "tools" / "chat_template.jinja"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
]
HEAD = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
    "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
)


def render(messages: list[dict], **options: Any) -> str:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment()
    environment.globals["raise_exception"] = refuse
    return environment.from_string(TEMPLATE.read_text()).render(messages=messages, **options)


def test_template_has_qwen3s_thinking_switch() -> None:
    opened = HEAD + "<|im_start|>assistant\n"
    assert render(TALK) == HEAD
    assert render(TALK, add_generation_prompt=True) == opened
    assert render(TALK, add_generation_prompt=True, enable_thinking=True) == opened
    off = render(TALK, add_generation_prompt=True, enable_thinking=False)
    assert off == opened + "<think>\n\n</think>\n\n"


def test_template_keeps_only_the_last_turns_reasoning() -> None:
    last = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nfour"}
    expected = HEAD + "<|im_start|>assistant\n<think>\nwell\n</think>\n\nfour<|im_end|>\n"
    assert render([*TALK, last]) == expected
    apart = {"role": "assistant", "content": "four", "reasoning_content": "well"}
    assert render([*TALK, apart]) == expected
    plain = {"role": "assistant", "content": "four"}
    assert render([*TALK, plain]).endswith("<think>\n\n</think>\n\nfour<|im_end|>\n")


def test_template_announces_tools_and_shows_calls() -> None:
    """Prompts without tools are as they were when the models were trained."""
    tool = {"function": {"name": "clock", "parameters": {}}, "type": "function"}
    said = render(TALK, tools=[tool], add_generation_prompt=True)
    assert said.startswith(
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n"
        '{"function": {"name": "clock", "parameters": {}}, "type": "function"}\n</tools>\n'
    )
    assert said.count("Be brief.") == 1
    rest = HEAD.removeprefix("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert said.endswith(f"<|im_end|>\n{rest}<|im_start|>assistant\n")
    assert render(TALK, tools=[]) == render(TALK, tools=None) == HEAD
    call = {"type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    parsed = {"function": {"name": "clock", "arguments": {"a": 1}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call, parsed]}
    block = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
    assert (
        render([TALK[1], asked, TALK[3]])
        .split("assistant\n")[1]
        .startswith(f"{block}\n{block}<|im_end|>")
    )


def test_template_takes_tools_and_refuses_other_roles() -> None:
    said = render([{"role": "tool", "content": "42"}])
    assert said == "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    with pytest.raises(ValueError, match="unknown role bot"):
        render([{"role": "bot", "content": "x"}])


@pytest.mark.parametrize("seed", range(20))
def test_every_fact_is_told_once_and_asked_at_most_once(seed: int) -> None:
    rng = random.Random(seed)
    talk = dialogues.dialogue(rng, rng.randint(4, 28), 6)
    told = " ".join(m["content"] for m in talk.messages[:-1] if m["role"] == "user")
    keys = [(fact.name, fact.attribute) for fact in talk.facts]
    assert len(set(keys)) == len(keys)
    for fact in talk.facts:
        assert sum(fact.say(template) in told for template in dialogues.STATEMENTS) >= 1
    assert len(set(talk.asked)) == len(talk.asked) == len(talk.questions)
    assert set(talk.asked) <= set(talk.facts)
    assert talk.messages[-1] == {"role": "user", "content": talk.questions[0]}
