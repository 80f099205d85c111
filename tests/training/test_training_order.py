"""The order of the training stream, over data of every shape: no record comes again too soon."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.mixture import Mixture, PlainText, key_of, shuffled
from kvlingo_mlx.training.order import Refill, Walk, fill_evenly, halve, source_at
from tests.support import two_tokenizers

CONTEXT = 32_768  # of an ordinary model: the mixture is not scaled down
NATURAL = Mixture(packed_share=0)
WORDS = "name city river stone paper green little music seven garden".split()


class Words:
    """Two tokens a word: the order goes by lengths alone, and a real tokenizer costs a minute.

    Real ones are in ``test_two_tokenizers`` and ``test_training_data``.
    """

    chat_template, eos_token = "", "$"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        said = "".join(f"{m['role']} {m['content']} $ " for m in messages)
        return said + "assistant " * bool(options.get("add_generation_prompt"))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [token for word in text.split() for token in (zlib.crc32(word.encode()) % 997, 997)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Words()


def write(path: Path, lengths: Iterable[int], replies: int = 1) -> str:
    """A conversation for each number of words that its first question has."""
    with path.open("w", encoding="utf-8") as file:
        for number, words in enumerate(lengths):
            text = f"#{number} " + " ".join(WORDS[(number + i) % 10] for i in range(words))
            turns = []
            for turn in range(replies):
                turns += [{"role": "user", "content": text if turn == 0 else f"And {turn}?"},
                          {"role": "assistant", "content": f"Answer {number}.{turn}."}]  # fmt: skip
            file.write(json.dumps({"messages": turns}) + "\n")
    return str(path)


def spread_lengths(count: int) -> list[int]:
    rng = random.Random(count)
    return [min(3000, int(rng.paretovariate(0.7) * 5)) for _ in range(count)]


SHAPES: dict[str, Callable[[], list[int]]] = {
    "all short": lambda: [3 + i % 9 for i in range(400)],
    "all long": lambda: [1500 + i % 40 for i in range(60)],
    "bimodal": lambda: [5 + i % 3 if i % 2 else 900 + i % 7 for i in range(300)],
    "one long": lambda: [1200 if i == 777 else 4 + i % 5 for i in range(2000)],
    "three": lambda: [4, 9, 40],
    "one size": lambda: [20] * 250,
    "long tail": lambda: spread_lengths(600),
}


def check(drawn: list[int], records: int) -> None:
    """N draws from m records meet nearly min(n, m) of them."""
    counts = Counter(drawn)
    assert len(counts) >= 0.9 * min(len(drawn), records)
    assert max(counts.values()) <= math.ceil(len(drawn) / records) + 1


@pytest.mark.parametrize("planned", [100, 40_000], ids=["short run", "long run"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_record_comes_again_too_soon(
    shape: str, planned: int, tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "data.jsonl", SHAPES[shape]())
    stream = Stream([path], tokenizer, NATURAL.scaled(CONTEXT), 1, planned=planned)
    records = stream.survey.records
    assert records == len(SHAPES[shape]()) - stream.reserved, "all of them are of use"
    for count in (records // 2, records, min(3 * records + 1, 700)):
        check([stream.draw(index).records[0][1] for index in range(count)], records)
    late = [stream.draw(index).records[0][1] for index in range(5 * records, 6 * records)][:500]
    check(late, records)


def test_a_pass_meets_every_usable_record(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "data.jsonl", SHAPES["long tail"](), replies=3)
    stream = Stream([path], tokenizer, NATURAL, 5)
    met = {stream.draw(index).records for index in range(stream.survey.records)}
    assert len(met) == stream.survey.records == 540


def test_packs_end_in_different_records(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "data.jsonl", [60 + i % 90 for i in range(400)])
    mixture = Mixture(packed_share=1).scaled(2048)
    stream = Stream([path], tokenizer, mixture, 2, planned=80)
    draws = [stream.draw(index) for index in range(80)]
    check([draw.records[0][1] for draw in draws], 360)
    inside = Counter(place for draw in draws for place in draw.records)
    held = sum(len(draw.records) for draw in draws)
    assert len(inside) > 300, "and read most others on the way"
    assert max(inside.values()) <= 2 * math.ceil(held / 360)
    inside.update(place for index in range(80, 240) for place in stream.draw(index).records)
    assert len(inside) == 360
    again = Stream([path], tokenizer, mixture, 2, planned=80)
    assert [again.draw(index) for index in (71, 3)] == [draws[71], draws[3]]


def test_many_records(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "many.jsonl", (2 + i % 6 for i in range(20_000)))
    stream = Stream([path], tokenizer, NATURAL, planned=2000)
    assert stream.survey.records == 18_000
    check([stream.draw(index).records[0][1] for index in range(1500)], stream.survey.records)
    assert stream.survey.distinct == 2000 and stream.survey.uses == 1


@pytest.mark.parametrize("planned", [10_000, 250_000])
def test_a_hundred_thousand_records(planned: int) -> None:
    lengths = np.random.default_rng(1).pareto(0.8, 100_000) * 50 + 10
    usable = int((lengths <= 10_000).sum())
    walk = Walk(np.arange(100_001), lengths, np.zeros(100_000, bool), (1, 10_000), planned, 5)
    assert len(walk) == usable < 99_900
    for count in (1000, usable, 130_000):
        check([walk.at(step)[0] for step in range(count)], usable)


def test_sources_keep_their_weights_and_their_records(tmp_path: Path, tokenizer: Any) -> None:
    sizes, weights = (60, 300, 90), (3.0, 1.0, 0.5)
    paths = [write(tmp_path / f"{n}.jsonl", spread_lengths(n)) for n in sizes]
    stream = Stream(list(zip(paths, weights, strict=True)), tokenizer, NATURAL, 4, planned=300)
    drawn = [stream.draw(index).records[0] for index in range(300)]
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        mine = [record for origin, record in drawn if origin == source]
        assert abs(len(mine) - 300 * weight / sum(weights)) <= 4
        check(mine, size - max(2, size // 10))


def test_two_tokenizers(tmp_path: Path) -> None:
    """Prefixes are counted by the tokenizer that makes more of them."""
    writers = two_tokenizers.write_qwen, two_tokenizers.write_mistral
    one, other = (AutoTokenizer.from_pretrained(w(tmp_path / w.__name__)) for w in writers)
    path = write(tmp_path / "data.jsonl", SHAPES["long tail"]())
    mixture = Mixture(packed_share=0).scaled(2048)
    stream = Stream([path], one, mixture, source_tokenizer=other, planned=200)
    draws = [stream.draw(index) for index in range(200)]
    check([draw.records[0][1] for draw in draws], stream.survey.records)
    assert all(draw.sample.num_read <= mixture.natural[1] for draw in draws)
    assert any(draw.sample.aligned is not None for draw in draws)


def test_texts(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "texts.jsonl"
    books = [" ".join(WORDS[(n + i) % 10] for i in range(20 + 9 * (n % 40))) for n in range(200)]
    path.write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    stream = Stream([str(path)], tokenizer, PlainText(128, 64), planned=150)
    long_enough = [len(tokenizer.encode(book, add_special_tokens=False)) >= 192 for book in books]
    for index in range(20):
        long_enough[shuffled(index, 200, key_of(0, "held out"))] = False
    assert 100 < stream.survey.records == sum(long_enough) < 190
    check([stream.draw(i).records[0][1] for i in range(400)], stream.survey.records)


# ---- what the run is told of its data ----------------------------------------------------


def test_the_survey_counts_what_a_run_will_see(tmp_path: Path, tokenizer: Any) -> None:
    """The fault that this order mends: short chats, and a model that could read long ones."""
    path = write(tmp_path / "chats.jsonl", [10 + i % 60 for i in range(430)])
    stream = Stream([path], tokenizer, Mixture().scaled(CONTEXT), planned=1600)
    survey = stream.survey
    assert (survey.records, survey.held_out, survey.skipped) == (387, 43, 0)
    assert (survey.packed_share, survey.packed_asked) == (0.0, 0.5), "two packs' worth of tokens"
    drawn = [stream.draw(index) for index in range(1600)]
    met = Counter(draw.records[0][1] for draw in drawn)
    assert (len(met), max(met.values())) == (survey.distinct, survey.uses) == (387, 5)
    assert max(len(draw.sample.prefix) for draw in drawn) == survey.longest
    assert survey.falls_short
    assert str(survey).startswith(
        "data: 387 records to train on; 1,600 samples end in 387 different ones, each used at "
        f"most 5 times; prefixes of at most {survey.longest} tokens (the recipe: 10,000); packed: "
        f"0% of samples, not 50%: too few fit, of {survey.tokens:,} tokens"
    )


def test_data_that_bear_the_recipe_are_not_complained_of(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "rich.jsonl", [8 * (1 + i % 100) for i in range(900)])
    stream = Stream([path], tokenizer, Mixture().scaled(2048), planned=200)
    survey = stream.survey
    assert not survey.falls_short
    assert survey.packed_share == 0.5
    met = {stream.draw(index).records[0] for index in range(200)}
    assert survey.distinct > 170 and abs(len(met) - survey.distinct) <= 10, "a pack may not fit"


# ---- the arithmetic, against plain loops --------------------------------------------------


def a_walk(records: int, planned: int, rng: random.Random) -> tuple[Walk, list[list[float]]]:
    talks = [sorted(rng.uniform(1, 200) for _ in range(rng.randint(1, 4))) for _ in range(records)]
    starts = np.cumsum([0, *map(len, talks)])
    lengths = np.array([length for talk in talks for length in talk])
    traces = np.array([rng.random() < 0.3 for _ in lengths])
    return Walk(starts, lengths, traces, (20, 150), planned, key=7), talks


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 90), st.integers(0, 10**6))
def test_an_epoch_is_every_record_that_has_a_reply_within_reach(
    records: int, planned: int, seed: int
) -> None:
    walk, talks = a_walk(records, planned, random.Random(seed))
    usable = [n for n, talk in enumerate(talks) if any(20 <= length <= 150 for length in talk)]
    assert walk.rows.tolist() == usable
    for epoch in range(2 if usable else 0):
        steps = [walk.at(epoch * len(usable) + step) for step in range(len(usable))]
        assert sorted(row for row, _ in steps) == usable
        assert all(20 <= talks[row][reply] <= 150 for row, reply in steps)
    assert sorted(walk.first(planned)) == sorted(
        walk.at(step)[0] for step in range(min(planned, len(usable)))
    )


def test_a_run_gets_all_lengths_evenly_and_all_the_time() -> None:
    """Ninety-nine short records to one long: a run of 200 gets the long ones too, spread out."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.uniform(10, 100, 9900), rng.uniform(900, 1000, 100)])
    walk = Walk(np.arange(10_001), lengths, np.zeros(10_000, bool), (1, 2000), 200, key=3)
    drawn = np.array([lengths[walk.at(step)[0]] for step in range(200)])
    assert 90 <= (drawn > 500).sum() <= 100
    for part in np.split(drawn, 4):
        assert 20 <= (part > 500).sum() <= 28, "in every quarter of the run"
    rest = np.array([lengths[walk.at(step)[0]] for step in range(200, 10_000)])
    assert (rest > 500).sum() + (drawn > 500).sum() == 100, "and none of them twice"


def test_half_of_a_run_reasons_where_the_data_allow_it() -> None:
    traces = np.arange(4000) % 10 == 0
    lengths = np.linspace(10, 1000, 4000)
    walk = Walk(np.arange(4001), lengths, traces, (1, 2000), 600, key=3)
    assert abs(sum(traces[walk.at(step)[0]] for step in range(600)) - 300) <= 16
    scarce = Walk(np.arange(4001), lengths, np.arange(4000) < 3, (1, 2000), 600, key=3)
    assert sum(scarce.at(step)[0] < 3 for step in range(600)) == 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_filling_evenly(sizes: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(sizes)))
    found = fill_evenly(np.array(sizes), total)
    by_hand = [0] * len(sizes)  # one after the other, always the least filled
    for _ in range(total):
        open_ = [i for i, size in enumerate(sizes) if by_hand[i] < size]
        by_hand[min(open_, key=lambda i: by_hand[i])] += 1
    assert sorted(found.tolist()) == sorted(by_hand)
    assert all(found <= np.array(sizes))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1), st.data())
def test_halving(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    some, others = (np.array(side) for side in zip(*pairs, strict=True))
    quotas = np.array([data.draw(st.integers(0, a + b)) for a, b in pairs])
    taken = halve(some, others, quotas)
    assert (taken >= np.maximum(quotas - others, 0)).all()
    assert (taken <= np.minimum(some, quotas)).all()
    least, most = np.maximum(quotas - others, 0).sum(), np.minimum(some, quotas).sum()
    half = min(max(quotas.sum() / 2, least), most)
    assert abs(taken.sum() - half) <= len(pairs), "up to a rounding each"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=5), st.integers(0, 1000))
def test_sources_by_number(weights: list[float], key: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    drawn = [source_at(ordinal, shares, key) for ordinal in range(160)]
    for source, share in enumerate(shares):
        mine = [ordinal for origin, ordinal in drawn if origin == source]
        assert sorted(mine) == list(range(len(mine))), "each number once"
        assert abs(len(mine) - 160 * share) <= 2 + 2 * len(shares)


def test_refilling_goes_on_where_it_stopped() -> None:
    tokens = np.array([5.0, 1.0, 10.0, 4.0])
    refill = Refill(np.array([3, 5, 8, 9]), tokens, key=2)
    by_row = dict(zip((3, 5, 8, 9), tokens, strict=True))
    met = 0.0
    for position in range(12):
        assert refill.start(met) == position
        assert refill.start(met + by_row[refill.at(position)] - 0.5) == position
        met += by_row[refill.at(position)]
    epochs = [[refill.at(4 * e + i) for i in range(4)] for e in range(4)]
    assert all(sorted(epoch) == [3, 5, 8, 9] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_is_the_same_on_every_machine() -> None:
    """Written down once: a run that resumes elsewhere must meet the same records."""
    walk, _ = a_walk(12, 5, random.Random(0))
    assert [walk.at(step)[0] for step in range(len(walk))] == [11, 0, 2, 1, 6, 10, 9, 7, 5, 4, 3]
