"""What a fit reads, and what it says of the time before."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.fitting import data
from kvlingo_mlx.fitting.data import MANY, Chosen, chosen, outlook, records_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.stage1.closed_form import READ, unknowns
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.samples import JUDGES, HeldOut, read_jsonl, to_samples
from kvlingo_mlx.training.plan import TrainingPlan, make_config

WORDS = "the a one two some many red green small large man dog tree house sees finds".split()


@pytest.fixture(scope="module")
def pair(models: dict[str, LanguageModel]) -> tuple[LanguageModel, LanguageModel, TranslatorConfig]:
    ends = models["dense"], models["wide"]
    return *ends, make_config(*ends, TrainingPlan())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 texts of a file that is sorted: the first half begins with `A`, the others with `B`."""
    path, draw = tmp_path_factory.mktemp("data") / "sorted.jsonl", np.random.default_rng(3)
    lines = []
    for number in range(600):
        text = "AB"[number // 300] + "\u2028" + " ".join(draw.choice(WORDS, 60))
        line = json.dumps({"text": text}, ensure_ascii=False)
        lines += [line, " " * (number % 2)]  # blank lines are no records
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    return path


def texts(read: Chosen, model: LanguageModel) -> list[str]:
    return [model.tokenizer.decode(list(sample.prefix))[0] for sample in read.samples]


def test_data_that_hold_less_are_read_to_their_end(pair: Any, file: Path) -> None:
    """All samples, in the order of the file, but for the few that the receipt measures."""
    source, target, config = pair
    context = min(source.context_length, target.context_length)
    every = list(to_samples(read_jsonl(file), target.tokenizer, context))
    assert len(every) == len(set(every)) == 600
    ends = (source, target), config, "frobenius", 10**9
    for name, records in (("sorted.jsonl", file), ("the data", read_jsonl(file))):
        read = chosen(records_of(records), *ends)
        kept = [sample for sample in every if sample not in read.samples]
        assert read.own is not None and read.own.data == name and len(kept) == JUDGES == 8
        assert set(read.own.samples) == set(HeldOut.of(name, kept).samples)
        assert list(read.samples) == [sample for sample in every if sample not in kept]
        assert read.records == 600
        assert read.tokens == sum(sample.num_translated for sample in read.samples)
    few = chosen(read_jsonl(file)[: MANY - 1], *ends)
    assert few.own is None and list(few.samples) == every[: MANY - 1] and few.records == MANY - 1


def test_a_sorted_file_is_read_all_over(pair: Any, file: Path) -> None:
    """As many tokens as were wanted and at most one sample more; in each process the same."""
    source, target, config = pair
    wanted = 3000
    read = chosen(records_of(file), (source, target), config, "frobenius", wanted)
    longest = max(sample.num_translated for sample in read.samples)
    assert wanted <= read.tokens < wanted + longest
    assert read.own is not None and len(read.own.samples) == JUDGES
    assert read.records == len(read.samples) + JUDGES < 300
    begin = texts(read, target)
    share = begin.count("A") / len(begin)
    assert 0.3 < share < 0.7 and begin == sorted(begin), "both halves, in the order of the file"
    again = chosen(records_of(file), (source, target), config, "frobenius", wanted)
    assert again == read


def test_how_much_is_read_by_itself(pair: Any, file: Path) -> None:
    """64 tokens an unknown; a norm by attention wants samples that go on."""
    source, target, config = pair
    texts = [*read_jsonl(file)] * 5
    read = chosen(texts, (source, target), config, "frobenius", None)
    assert READ * unknowns(config) <= read.tokens < READ * unknowns(config) + 250
    (sample,) = to_samples([{"text": "a dog sees"}], target.tokenizer, 512)
    ends = dataclasses.replace(sample, continuation=())
    found = chosen([ends, sample], (source, target), config, "attention_mass", 10**9)
    assert found.samples == [sample] and found.records == 2


def test_the_fit_that_is_made(pair: Any, file: Path) -> None:
    source, target, config = pair
    told: list[str] = []
    made = kv.fit(source, target, str(file), tokens=2000, say=told.append)
    facts = made.config.provenance
    assert 2000 <= facts["prefix_tokens"] < 2250
    assert facts["records"] == facts["samples"] + JUDGES
    (line,) = told
    assert f"maps of {unknowns(config)} inputs on {facts['prefix_tokens']:,} tokens" in line
    assert f"{facts['samples']} of 600 records of sorted.jsonl" in line
    assert line.endswith(" on this machine")
    with pytest.raises(ValueError, match="tokens is 0; give a number of tokens, 1 or more"):
        kv.fit(source, target, file, tokens=0)


@pytest.mark.parametrize("paces", [(0.0001, 0.0002), (0.01, 0.03), (0.5, 0.25)])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_time_that_is_told(
    pair: Any, file: Path, monkeypatch: pytest.MonkeyPatch, paces: tuple[float, float], passes: int
) -> None:
    """A planted pace of each model, three times slower at first; little is read to find it."""
    source, target, config = pair
    read = chosen(records_of(file), (source, target), config, "frobenius", 4000)
    pace_of, taken = {source.name: paces[0], target.name: paces[1]}, list[int]()
    now = [0.0]

    def prefill(model: LanguageModel, tokens: Any) -> Any:
        taken.append(len(tokens))
        now[0] += pace_of[model.name] * len(tokens) * (3 if len(taken) <= 2 else 1)
        return iter(())

    monkeypatch.setattr(data, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(data, "prefill", prefill)
    monkeypatch.setattr(data, "solving_seconds", lambda config: 100.0)
    monkeypatch.setattr(data, "receipt_rows", lambda *arguments: 1000.0)
    monkeypatch.setattr(ClosedForm, "passes", passes)
    form: Any = ClosedForm(config, SimpleNamespace(), lambda start: ())
    text = outlook(form, read)
    assert sum(taken) <= 4 * 64 and read.own is not None
    judged = sum(len(sample.prefix) + len(sample.continuation) for sample in read.own.samples)
    assert judged > 8 * 100
    seconds = sum(paces) * (passes * read.tokens + 1000 + judged) + 100
    units = {"s": 1, "min": 60, "h": 3600}
    parts = re.findall(r"(\d+) (s|min|h)\b", text.split("about ")[1])
    found = sum(int(number) * units[unit] for number, unit in parts)
    assert 0.95 * seconds - 30 <= found <= 1.05 * seconds + 30
