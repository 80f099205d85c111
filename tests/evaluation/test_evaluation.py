"""Recall and KL against independent values, and controls that must differ."""

import math
import random
import re

import numpy as np
import pytest

from benchmarks.paper.evaluation import recalled
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.embedded.dialogues import ANSWER
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.evaluation.error_bars import Mean, over_clusters, over_items, over_sets
from kvlingo_mlx.evaluation.needles import FACTS, MAGIC, STYLES, VARIANTS, make_item, recall
from tests.support.fixtures import Models
from tests.support.guards import logs


@pytest.fixture
def sample(models: Models) -> quality.RecallSample:
    talk = dialogues.dialogue(random.Random(3), 2, 2)
    return quality.recall_sample(models["dense"], talk)


def test_recalled_tokens_are_exactly_the_values(models: Models) -> None:
    tokenizer = models["dense"].tokenizer
    for seed in range(10):
        talk = dialogues.dialogue(random.Random(seed), 3, 3)
        sample = quality.recall_sample(models["dense"], talk)
        for fact, indices in zip(talk.asked, sample.recalled, strict=True):
            assert tokenizer.decode([sample.continuation[i] for i in indices]).strip() == fact.value
        text = tokenizer.decode(list(sample.continuation))
        assert text.startswith(talk.asked[0].say(ANSWER) + "<|im_end|>\n<|im_start|>user\n")
        assert tokenizer.decode(list(sample.prefix)).endswith("<think>\n\n</think>\n\n")


def test_kl_and_hits_against_float64(models: Models, sample: quality.RecallSample) -> None:
    """One forward pass over everything for native, one over the continuation for hidden."""
    model = models["dense"]
    score = recalled.score(model, [sample], {"hidden": conditions.hidden(model)})

    behind = slice(-len(sample.continuation) - 1, -1)
    whole, last = [*sample.prefix, *sample.continuation], [sample.prefix[-1], *sample.continuation]
    native, alone = (logs(model, None, tokens)[behind] for tokens in (whole, last))
    kl = (np.exp(native) * (native - alone)).sum(-1)
    assert score["hidden"].kl[0] == pytest.approx(kl.mean(), rel=1e-4)
    values = [i for indices in sample.recalled for i in indices]
    assert score["hidden"].value_kl[0] == pytest.approx(kl[values].mean(), rel=1e-4)
    best = native.argmax(-1)
    hits = tuple(all(best[i] == sample.continuation[i] for i in row) for row in sample.recalled)
    assert score["native"].hits == hits


def test_items() -> None:
    found = over_items([1.0, 0.0, 0.0, 1.0, 1.0])
    variance = (3 * 0.4**2 + 2 * 0.6**2) / 4
    assert found == Mean(pytest.approx(0.6), pytest.approx(math.sqrt(variance / 5)), 5)
    assert math.isnan(over_items([2.0]).error)
    assert str(over_items([0.25])) == "0.250" and str(Mean(0.25, 0.5, 2)) == "0.250 +- 0.500"
    with pytest.raises(ValueError, match="no scores"):
        over_items([])


def test_sets() -> None:
    found = over_sets([Mean(0.2, 0.03, 10), Mean(0.6, 0.04, 30)])
    assert (found.value, found.error, found.count) == pytest.approx((0.4, 0.025, 40))
    weighted = over_sets([Mean(0.2, 0.03, 10), Mean(0.6, 0.04, 30)], [1, 3])
    assert weighted.value == pytest.approx(0.5)
    assert weighted.error == pytest.approx(math.hypot(0.25 * 0.03, 0.75 * 0.04))


def test_clusters() -> None:
    """A question that is right at every length is one item, not three."""
    scores, questions = [1, 1, 1, 0, 0, 0], ["a", "a", "a", "b", "b", "b"]
    assert over_clusters(scores, questions) == over_items([1.0, 0.0])
    assert over_clusters(scores, range(6)) == over_items(scores)


def words(messages) -> int:
    return sum(len(message["content"].split()) for message in messages)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [150, 1000, 4000])
def test_length_and_needles(name: str, length: int) -> None:
    variant = VARIANTS[name]
    item = make_item(3, variant, length, words)
    assert length - 20 < words(item.messages) <= length
    text = item.messages[0]["content"]
    found = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", text)
    assert len(found) == variant.keys * variant.values == len(set(found))
    question = text.rsplit("\n", 1)[1]
    wanted = {value for key, value in found if key in question}
    assert wanted == set(item.references)
    assert len(item.references) == variant.queries * variant.values


def test_depths_are_true_and_spread() -> None:
    items = [make_item(i, VARIANTS["single"], 2000, words) for i in range(40)]
    for item in items:
        text = item.messages[0]["content"]
        at = text.index("One of the special") / len(text)
        assert at == pytest.approx(item.depths[0], abs=0.03)
    depths = sorted(item.depths[0] for item in items)
    assert depths[0] < 0.15 and depths[-1] > 0.85


def test_same_index_same_item() -> None:
    """At several lengths the same question, so that rungs can be clustered by it."""
    draws = [make_item(i, VARIANTS["multi-key"], 500, words, seed=s)
             for i, s in ((1, 0), (1, 0), (2, 0), (1, 1))]  # fmt: skip
    assert draws[0] == draws[1]
    assert len({draw.messages[0]["content"] for draw in draws}) == 3
    short, long = (make_item(5, VARIANTS["multi-query"], n, words) for n in (300, 3000))
    assert short.references == long.references and short.depths == long.depths


def test_the_users_own_text() -> None:
    text = "First one here. Second one there! Is this the third? Yes."
    item = make_item(0, VARIANTS["single"], 300, words, text=text)
    body = item.messages[0]["content"]
    assert body.count("Second one there!") > 10
    assert not any(s in body for s in ("gardener", "traveller"))


def test_zoo_style_speaks_the_zoos_words() -> None:
    item = make_item(0, VARIANTS["multi-key"], 200, words, style=FACTS)
    text = item.messages[0]["content"]
    statements = re.findall(r"The (\w+ of \w+) is (\w+)\.", text)
    asked = re.search(r"What is the (\w+ of \w+)\?", text).group(1)
    assert len(statements) == 4 and dict(statements)[asked] == item.references[0]
    assert STYLES == {"magic": MAGIC, "facts": FACTS}


def test_recall() -> None:
    assert recall("They are 1234567 and 7654321.", ["1234567", "7654321"]) == 1.0
    assert recall("It is 1234567", ["1234567", "7654321"]) == 0.5
    assert recall("OSLO", ["Oslo"]) == 1.0
    assert recall("", ["Oslo"]) == 0.0
