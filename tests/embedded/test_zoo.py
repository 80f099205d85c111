"""The embedded models recall natively, fail blind, and stay small."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import embedded
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.format.translator_config import unfoldable
from tests.support import TESTS


@pytest.mark.parametrize("name", embedded.zoo_names())
def test_recall_needs_the_prefix(name: str) -> None:
    model = kv.load(kv.zoo(name))
    talks = dialogues.held_out(8, seed=5)
    samples = [quality.recall_sample(model, talk) for talk in talks]
    scores = quality.score(model, samples, {"hidden": conditions.hidden(model)})
    assert scores["native"].recall >= 0.95
    assert scores["hidden"].recall <= 0.15


@pytest.mark.parametrize("pair", embedded.zoo_pairs(), ids="--".join)
def test_stored_translators_are_found(pair: tuple[str, str]) -> None:
    source, target = (kv.load(kv.zoo(name)) for name in pair)
    talk = next(dialogues.held_out(1))
    text = kv.generate(source, target, talk.messages, enable_thinking=False, max_tokens=12)
    assert text.startswith("The ")


# ---- other families: trained for the tests, not shipped ----------------------------------------

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
        makers["folded"] = conditions.folded(source, target, translator)
    scores = quality.score(target, samples, makers)
    native, translated = scores["native"], scores["translated"]
    assert native.recall >= 0.85
    assert translated.recall >= LEAST.get(pair, 0.85) * native.recall
    assert max(scores[name].recall for name in ("shuffled", "hidden")) <= 0.15
    if "folded" in scores:  # never written out, and yet the same
        assert scores["folded"].hits == translated.hits
        assert scores["folded"].kl == pytest.approx(translated.kl, abs=1e-4)


def test_one_pair_can_be_folded_and_two_cross_tokenizers() -> None:
    configs = [kv.load_translator(OTHERS / "translators" / pair).config for pair in PAIRS]
    assert [c.source.name for c in configs if unfoldable(c) is None] == ["tiny-qwen3-narrow"]
    assert sum(c.alignment == "minimal_groups" for c in configs) == 2


def test_unknown_zoo_model() -> None:
    with pytest.raises(ValueError, match="there is no zoo model 'gpt'; there are tiny-qwen3-l"):
        kv.zoo("gpt")
