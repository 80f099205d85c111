"""The order of the training stream, over data of every shape: no record comes again too soon."""

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
from transformers import AutoTokenizer

from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.index import REPLY
from kvlingo_mlx.training.mixture import Mixture
from kvlingo_mlx.training.schedule import Schedule, parts_of
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


def write(path: Path, lengths: Iterable[int], replies: int = 1, traced: int = 0) -> str:
    """A conversation for each number of words that its first question has.

    Every ``traced``-th one reasons.
    """
    with path.open("w", encoding="utf-8") as file:
        for number, words in enumerate(lengths):
            text = f"#{number} " + " ".join(WORDS[(number + i) % 10] for i in range(words))
            turns = []
            for turn in range(replies):
                turns += [{"role": "user", "content": text if turn == 0 else f"And {turn}?"},
                          {"role": "assistant", "content": f"Answer {number}.{turn}."}]  # fmt: skip
                if traced and number % traced == 0:
                    turns[-1]["reasoning_content"] = "Let me see."
            file.write(json.dumps({"messages": turns}) + "\n")
    return str(path)


def spread_lengths(count: int) -> list[int]:
    rng = random.Random(count)
    return [min(3000, int(rng.paretovariate(0.7) * 5)) for _ in range(count)]


SHAPES: dict[str, Callable[[], list[int]]] = {
    "bimodal": lambda: [5 + i % 3 if i % 2 else 900 + i % 7 for i in range(300)],
    "one long": lambda: [1200 if i == 777 else 4 + i % 5 for i in range(2000)],
    "three": lambda: [4, 9, 40],
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


def test_sources_keep_their_weights_and_their_records(tmp_path: Path, tokenizer: Any) -> None:
    sizes, weights = (60, 300, 90), (3.0, 1.0, 0.5)
    paths = [write(tmp_path / f"{n}.jsonl", spread_lengths(n)) for n in sizes]
    stream = Stream(list(zip(paths, weights, strict=True)), tokenizer, NATURAL, 4, planned=300)
    drawn = [stream.draw(index).records[0] for index in range(300)]
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        mine = [record for origin, record in drawn if origin == source]
        assert abs(len(mine) - 300 * weight / sum(weights)) <= 4
        check(mine, size - max(2, size // 10))


def test_lengths_are_near_uniform_and_half_reason(tmp_path: Path, tokenizer: Any) -> None:
    """Of data that have enough of every length, though most of them are short and untraced."""
    rng = random.Random(1)
    sizes = [min(540, 2 + int(rng.paretovariate(0.8) * 30)) for _ in range(2400)]
    path = write(tmp_path / "data.jsonl", sizes, traced=4)
    mixture = NATURAL.scaled(2048)
    stream = Stream([path], tokenizer, mixture, 3, planned=128)
    draws = [stream.draw(index) for index in range(128)]
    low, high = mixture.natural

    def chi_square(lengths: list[int]) -> float:
        counts = np.histogram(lengths, np.linspace(low, high + 1, 9))[0]
        return float(((counts - 16) ** 2 / 16).sum())

    # The 0.999 quantile with 7 degrees of freedom is 24.3.
    assert chi_square([2 * size for size in sizes[:128]]) > 100, "the data are not uniform"
    assert chi_square([len(draw.sample.prefix) for draw in draws]) < 24.3
    assert 0.45 < np.mean([draw.reasoning for draw in draws]) < 0.55
    long = [draw.reasoning for draw in draws if len(draw.sample.prefix) > high / 2]
    assert 0.35 < np.mean(long) < 0.65


@pytest.mark.parametrize("planned", [10_000, 250_000])
def test_a_hundred_thousand_records(planned: int) -> None:
    """A short run has all lengths evenly, half of them traced; a long one meets each as often."""
    rng, many = np.random.default_rng(1), 100_000
    table = np.zeros(many, REPLY)
    table["record"], table["last"] = np.arange(many), True
    table["before"] = lengths = rng.pareto(0.8, many) * 50 + 10
    table["traced"] = rng.random(many) < 0.2
    usable = lengths <= 10_000
    parts = parts_of(table, "natural", 1.0, np.ones(1), usable)
    schedule = Schedule(table, parts, planned, 5)
    check([schedule.at(step)[1] for step in range(130_000)], int(usable.sum()))
    assert usable[schedule.first].all() and not (~usable).all()
    if planned < many:
        inside = np.histogram(lengths[schedule.first], np.linspace(10, 10_000, 9))[0]
        as_they_come = np.histogram(lengths[usable], np.linspace(10, 10_000, 9))[0]
        assert inside[0] < 0.5 * planned < 0.9 * as_they_come[0], "the long ones all come"
        assert (inside[4:] == as_they_come[4:]).all()
        assert table["traced"][schedule.first].mean() > 0.3


def test_kinds_keep_their_shares_in_every_stretch(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "data.jsonl", [60 + i % 90 for i in range(400)])
    for share in (0.25, 0.3, 0.5):
        mixture = Mixture((10, 900), (1200, 1800), packed_share=share)
        stream = Stream([path], tokenizer, mixture, 5, planned=400)
        packed = [stream.draw(index).kind == "packed" for index in range(120)]
        ends = np.arange(1, 121)
        assert np.abs(np.cumsum(packed) - share * ends).max() <= 2
        for processes in (2, 4, 8):
            some = packed[::processes]
            assert abs(sum(some) / len(some) - share) < 0.2, "no process gets one kind only"


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


def test_the_survey_counts_what_a_run_will_see(tmp_path: Path, tokenizer: Any) -> None:
    """The fault that this order mends: short chats, and a model that could read long ones."""
    path = write(tmp_path / "chats.jsonl", [10 + i % 60 for i in range(430)])
    stream = Stream([path], tokenizer, Mixture().scaled(CONTEXT), planned=1600)
    survey = stream.survey
    assert (survey.records, stream.reserved, stream.skipped) == (387, 43, 0)
    assert (survey.packed_share, survey.packed_asked) == (0.0, 0.5), "two packs' worth of tokens"
    drawn = [stream.draw(index) for index in range(1600)]
    met = Counter(draw.records[0][1] for draw in drawn)
    assert (len(met), max(met.values())) == (survey.distinct, survey.uses) == (387, 5)
    assert max(len(draw.sample.prefix) for draw in drawn) == survey.longest
    assert survey.falls_short
    assert str(survey).startswith(
        "data: 387 records to train on; 1,600 samples from 387 of them, each at most 5 times; "
        f"prefixes of at most {survey.longest} tokens (the recipe: 10,000); packed: 0% of samples, "
        f"not 50%: conversations of {survey.tokens:,} tokens are too few"
    )


def test_data_that_bear_the_recipe_are_not_complained_of(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "rich.jsonl", [8 * (1 + i % 100) for i in range(900)])
    stream = Stream([path], tokenizer, Mixture().scaled(2048), planned=200)
    survey = stream.survey
    assert not survey.falls_short
    assert survey.packed_share == 0.5
    met = {stream.draw(index).records[0] for index in range(200)}
    assert survey.distinct > 170 and abs(len(met) - survey.distinct) <= 10, "a pack may not fit"
