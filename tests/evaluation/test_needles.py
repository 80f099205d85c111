"""Needles are hidden where they should be, fit their length, and are scored as RULER does."""

from __future__ import annotations

import re

import pytest

from kvlingo_mlx.evaluation.needles import FACTS, MAGIC, STYLES, VARIANTS, make_item, recall


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
