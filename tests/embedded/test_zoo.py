"""The embedded models recall natively, fail blind, and stay small; their dialogues and template."""

import random
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import baselines, recalled
from kvlingo_mlx import embedded
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.format.translator_config import unfoldable
from tests.support import ROOT, TESTS


@pytest.mark.parametrize("name", embedded.zoo_names())
def test_recall_needs_the_prefix(name: str) -> None:
    model = kv.load(kv.zoo(name))
    talks = dialogues.held_out(8, seed=5)
    samples = [quality.recall_sample(model, talk) for talk in talks]
    scores = recalled.score(model, samples, {"hidden": conditions.hidden(model)})
    assert scores["native"].recall >= 0.95
    assert scores["hidden"].recall <= 0.15


@pytest.mark.parametrize("pair", embedded.zoo_pairs(), ids="--".join)
def test_stored_translators_are_found(pair: tuple[str, str]) -> None:
    source, target = (kv.load(kv.zoo(name)) for name in pair)
    talk = next(dialogues.held_out(1))
    text = kv.generate(source, target, talk.messages, enable_thinking=False, max_tokens=12)
    assert text.startswith("The ")


OTHERS = TESTS / "zoo"
PAIRS = [path.parent.name for path in OTHERS.glob("translators/*/translator_config.json")]


# Of native recall. Keys after RoPE, and tokens of another tokenizer, translate less well.
LEAST = {
    "tiny-qwen3-narrow--tiny-qwen3-l": 0.6,
    "tiny-qwen3-s--tiny-mistral": 0.75,
    "tiny-mistral--tiny-qwen3-s": 0.75,
}


def folder(name: str) -> Path:
    own = OTHERS / "models" / name
    return own if own.exists() else kv.zoo(name)


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_other_families_recall_through_a_translation(pair: str) -> None:
    """Local layers of Gemma-3 get their windows alone: prefixes are two to four times as long."""
    source, target = (kv.load(folder(name)) for name in pair.split("--"))
    translator = kv.load_translator(OTHERS / "translators" / pair)
    talks = dialogues.held_out(4, facts=(8, 16))
    samples = [quality.recall_sample(target, talk, source) for talk in talks]
    assert min(len(sample.prefix) for sample in samples) > 2 * 60
    shuffled = conditions.shuffled(translator)
    makers = {
        "translated": conditions.translated(source, target, translator),
        "shuffled": conditions.translated(source, target, shuffled),
        "hidden": conditions.hidden(target),
    }
    if unfoldable(translator.config) is None:
        makers["folded"] = baselines.folded(source, target, translator)
    scores = recalled.score(target, samples, makers)
    native, translated = scores["native"], scores["translated"]
    assert native.recall >= 0.85
    assert translated.recall >= LEAST.get(pair, 0.85) * native.recall
    assert max(scores[name].recall for name in ("shuffled", "hidden")) <= 0.15
    if "folded" in scores:  # never written out, and yet the same
        assert scores["folded"].hits == translated.hits
        assert scores["folded"].kl == pytest.approx(translated.kl, abs=1e-4)


def test_unknown_zoo_model() -> None:
    with pytest.raises(ValueError, match="there is no zoo model 'gpt'; there are tiny-qwen3-l"):
        kv.zoo("gpt")


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
