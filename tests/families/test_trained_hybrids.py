"""The trained tiny hybrids: what their answers need, and what a translation of it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import ROOT, TESTS

# In the repository, in bfloat16, is the small one alone: `tools/pretrain.py NAME --out
# build/models/NAME` makes the others, of which the tests below then run as well.
SMALL, OTHERS = "tiny-qwen3.5-s", ("tiny-qwen3.5-l", "tiny-qwen3.5-twin")
FACTS = (6, 12)


def folder(name: str) -> Path:
    return (TESTS / "zoo" if name == SMALL else ROOT / "build") / "models" / name


def made(*names: str) -> Any:
    there = all(folder(name).exists() for name in names)
    return pytest.param(*names, marks=pytest.mark.skipif(not there, reason="was not trained here"))


@pytest.fixture(scope="module")
def hybrids() -> Callable[[str], LanguageModel]:
    return lambda name: kv.load(name if name.startswith("tiny-qwen3-") else folder(name))


@pytest.fixture
def recurrent(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return pytest.importorskip("recurrent")


def samples(model: LanguageModel, count: int) -> list[Any]:
    talks = dialogues.held_out(count, seed=3, facts=FACTS)
    return [quality.recall_sample(model, talk) for talk in talks]


@pytest.mark.parametrize("name", [SMALL, *map(made, OTHERS)])
def test_answers_need_both_ways(name: str, hybrids: Any, recurrent: ModuleType) -> None:
    """Each way alone recalls its part of the attributes, and neither of them the other's."""
    model = hybrids(name)
    own = conditions.native(model)
    makers = {
        "by attention": recurrent.hidden(own, model, True),
        "by states": recurrent.hidden(own, model, False),
        "by nothing": conditions.hidden(model),
    }
    scores = quality.score(model, samples(model, 16), makers)
    recall = {way: score.recall for way, score in scores.items()}
    assert recall["native"] > 0.85 and recall["by nothing"] < 0.1
    for way in ("by attention", "by states"):
        assert 0.2 < recall[way] < 0.75, recall
    hits = {way: np.array(score.hits) for way, score in scores.items()}
    assert (hits["by attention"] & hits["by states"]).mean() < 0.5 * recall["native"]
    assert (hits["by attention"] | hits["by states"]).mean() > 0.8 * recall["native"]


@pytest.mark.parametrize(
    ("source", "target"),
    [("tiny-qwen3-s", SMALL), made(SMALL, OTHERS[0]), made(OTHERS[0], SMALL)],
)
def test_a_translation_keeps_more_than_its_controls(
    source: Any, target: Any, hybrids: Any, recurrent: ModuleType
) -> None:
    """From a plain model as well: of its keys and values the recurrences' inputs are made."""
    source, target = hybrids(source), hybrids(target)
    records = [{"messages": talk.conversation()} for talk in dialogues.for_fitting(60)]
    found = kv.fit(source, target, records, nu=2)
    whole = conditions.translated(source, target, found)
    makers = {
        "translated": whole,
        "attention alone": recurrent.hidden(whole, target, True),
        "shuffled": conditions.translated(source, target, conditions.shuffled(found)),
        "hidden": conditions.hidden(target),
    }
    scores = quality.score(target, samples(target, 12), makers)
    kl = {way: float(np.mean(score.kl)) for way, score in scores.items()}
    assert kl["translated"] < 0.7 * min(kl["shuffled"], kl["hidden"]), kl
    assert scores["translated"].recall > scores["shuffled"].recall
