"""The embedded models recall natively, fail blind, and stay small; their dialogues and template."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import baselines, recalled
from kvlingo_mlx import embedded
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.format.translator_config import unfoldable
from tests.support import ROOT, TESTS
from tests.support.real_templates import FOLDER


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
    question = [{"role": "user", "content": embedded.EXAMPLE}]
    assert kv.generate(*pair, question) == "The hotel of Emma is Lima."


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


ANNOUNCED = (
    'Call with an object of "name" and "arguments" between <tool_call> and </tool_call>.',
    "A call is JSON in <tool_call></tool_call>.",
)
FUNCTION = {"name": "clock", "parameters": {}}
CALLS = [{"function": {"name": "clock", "arguments": given}} for given in ('{"a": 1}', {"a": 1})]
SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
    {"role": "assistant", "content": "two", "reasoning_content": "hm"},
    {"role": "assistant", "content": "two"},
    {"role": "assistant", "content": "two", "tool_calls": CALLS},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "42"},
]


def compiled(path: Path) -> Any:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment()
    environment.globals["raise_exception"] = refuse
    return environment.from_string(path.read_text())


OURS, QWEN3S = map(compiled, (ROOT / "tools" / "chat_template.jinja", FOLDER / "qwen3.jinja"))


def test_the_template_of_a_turn() -> None:
    """An earlier thought is left out; without thinking the header closes an empty one."""
    told, off = [*SAID[:2], SAID[3], SAID[1]], {"enable_thinking": False}
    assert OURS.render(messages=told, add_generation_prompt=True, **off) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@settings(deadline=None)
@given(
    messages=st.lists(st.sampled_from(SAID), max_size=6),
    system=st.booleans(),
    tools=st.sampled_from([None, [], [{"type": "function", "function": FUNCTION}]]),
    prompt=st.booleans(),
    thinking=st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]),
)
def test_the_template_is_qwen3s(
    messages: list[Any], system: bool, tools: Any, prompt: bool, thinking: dict[str, bool]
) -> None:
    """But for how tools are announced; and each result is a turn of its own."""
    told = [*SAID[: 1 if system else 0], SAID[1], *messages]
    options = {"tools": tools, "add_generation_prompt": prompt, **thinking}
    between = "</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>"
    found = OURS.render(messages=told, **options).replace(
        between, "</tool_response>\n<tool_response>"
    )
    assert found == QWEN3S.render(messages=told, **options).replace(*ANNOUNCED)
    with pytest.raises(ValueError, match="unknown role bot"):
        OURS.render(messages=[*told, {"role": "bot", "content": "x"}])


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
