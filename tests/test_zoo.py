"""The embedded models recall natively, fail blind, and stay small."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import embedded
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality


def test_size() -> None:
    files = [p for p in Path(embedded.__file__).parent.rglob("*") if p.is_file()]
    assert sum(path.stat().st_size for path in files) <= 30e6


@pytest.mark.parametrize("name", embedded.zoo_names())
def test_recall_needs_the_prefix(name: str) -> None:
    model = kv.load(kv.zoo(name))
    talks = dialogues.held_out(16, seed=5)
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


def test_unknown_zoo_model() -> None:
    with pytest.raises(ValueError, match="there is no zoo model 'gpt'; there are tiny-qwen3-l"):
        kv.zoo("gpt")
