"""Evaluation runs: journals that resume, conditions, means, and the verb."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.evaluation import conditions, lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from tests.support.fixtures import Models, Patch, Printed
from tests.support.identity import identity_of

TALKS = [
    {"messages": talk.conversation()} for talk in dialogues.held_out(3, facts=(2, 3), questions=2)
]


@pytest.fixture
def task(models: Models) -> probes.Task:
    return probes.continuation(models["dense"], TALKS, 3, 512)


def counted(condition: lineup.Condition, calls: list[int]) -> lineup.Condition:
    """The same, its cache makings counted."""

    def count(make: conditions.CacheMaker) -> conditions.CacheMaker:
        return lambda tokens: (calls.append(len(tokens)), make(tokens))[1]

    return dataclasses.replace(condition, makers=tuple(map(count, condition.makers)))


def line_of(model: LanguageModel) -> list[lineup.Condition]:
    same = lineup.translated("same", model, model, [identity_of(model)])
    return [lineup.native(model), same, lineup.baseline("hidden", model, model, [])]


def test_identity_scores_as_native(models: Models, task: probes.Task) -> None:
    found = evaluate(models["dense"], [task], line_of(models["dense"]), Journal())["continuation"]
    for own, same, hidden in zip(*found.values(), strict=True):
        assert own == same
        assert own.scores["kl"] == 0.0 and own.scores["agreement"] == 1.0
        assert hidden.scores["kl"] > 0.0 and hidden.scores["nll"] != own.scores["nll"]


def test_another_translator_or_item_is_another_run(
    models: Models, task: probes.Task, tmp_path: Path
) -> None:
    model, journal, calls = models["dense"], tmp_path / "scores.jsonl", []
    same = identity_of(model)
    weights = same.to_weights()
    halved = {name: array / 2 for name, array in weights.arrays.items()}
    other = build(same.config, Weights(weights.dtype, halved))

    def scores(translator: Any, asked: probes.Task) -> list[float]:
        condition = counted(lineup.translated("same", model, model, [translator]), calls)
        found = evaluate(model, [asked], [condition], Journal(journal))
        return [s.scores["kl"] for s in found["continuation"]["same"]]

    assert scores(same, task) == [0.0] * 3 and len(calls) == 3
    assert min(scores(other, task)) > 0.0 and len(calls) == 6
    shorter = probes.continuation(model, [*TALKS[:2], TALKS[0]], 3, 512)  # the third differs
    assert scores(same, shorter) == [0.0] * 3 and len(calls) == 7


def test_kinds_of_records_are_told_apart(models: Models) -> None:
    turns = [{"role": "user", "content": "a b"}]
    plain = {"messages": [*turns, {"role": "assistant", "content": "c d"}]}
    trace = {"role": "assistant", "content": "c d", "reasoning_content": "e f"}
    records = [plain, {"messages": [*turns, trace]}, {"messages": turns}, {"text": "one two three"}]
    task = probes.continuation(models["dense"], records, 9, 512)
    assert [(i.name, i.group) for i in task.items] == [
        ("0", "no reasoning"), ("1", "reasoning"), ("3", "text")
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no record of the data has"):
        probes.continuation(models["dense"], records[2:3], 9, 512)


@pytest.mark.parametrize("text", ["not json\n", '{"a": 1}\n', "[]\n", '{"run": "x", "item": 3'])
def test_what_is_no_journal_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("x\n" + text)
    with pytest.raises(ValueError, match="notes.jsonl, line 1: not a line of"):
        Journal(path)
    assert path.read_text() == "x\n" + text


def test_text_reads_what_the_tokens_spell(models: Models) -> None:
    source, target = models["dense"], models["wide"]
    tokens = source.tokenizer.encode("What is the city of Anna? It is a long day.")

    def keys(make: conditions.CacheMaker) -> np.ndarray:
        return np.array(make(tokens)[0].keys)

    own = keys(conditions.native(target))
    assert np.array_equal(keys(conditions.text(source, target)), own)
    assert not np.array_equal(keys(conditions.native(source)), own)


@pytest.mark.parametrize("spec", ["nothing", "droidspeak:2", "reuse", "text:x"])
def test_unknown_baselines(models: Models, spec: str) -> None:
    model = models["dense"]
    with pytest.raises(ValueError, match="hidden, shuffled, text; canonical, folded, reuse"):
        lineup.baseline(spec, model, model, [])


ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
PAIR = ["eval", "--source", ENDS[0], "--target", ENDS[1]]


def evaluated(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    record = tmp_path / "record.json"
    record.unlink(missing_ok=True)
    out = ["--out", str(tmp_path / "scores.jsonl"), "--json", str(record)]
    status = run([*PAIR, *out, *more])
    return status, json.loads(record.read_text())["results"] if status == 0 else {}


def test_the_verb_compares_and_resumes(tmp_path: Path, capsys: Printed) -> None:
    options = ["--limit", "2", "--tasks", "recall,needles", "--needles", "single", "--lengths",
               "100,200", "--style", "facts", "--max-tokens", "12",
               "--baselines", "hidden,text"]  # fmt: skip
    status, found = evaluated(tmp_path, *options)
    assert status == 0
    means = found["means"]
    assert set(means["recall"]) == {"native", "translated", "prefix hidden", "text"}
    assert set(means["needles"]["native"]) == {"single, 100", "single, 200", "mean"}
    assert means["recall"]["native"]["dialogues"]["recall"]["value"] > 0.9
    assert means["recall"]["prefix hidden"]["dialogues"]["recall"]["value"] < 0.3
    assert means["needles"]["native"]["mean"]["recall"]["value"] > 0.7
    assert means["needles"]["prefix hidden"]["mean"]["recall"]["value"] < 0.5
    folder = TRANSLATORS / "--".join(ENDS)
    digest = translator_folder.digest(*translator_folder.read(folder))
    assert found["translators"] == {"translated": [{"path": str(folder), "digest": digest}]}
    journal = (tmp_path / "scores.jsonl").read_text()
    again = evaluated(tmp_path, *options[:-2], "--baselines", "hidden")[1]
    assert again["items"]["recall"]["native"] == found["items"]["recall"]["native"]
    assert (tmp_path / "scores.jsonl").read_text() == journal
    assert f"translated: {folder} (sha256 {digest[:12]})" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        [*PAIR, "TRANSLATOR", "--tasks", "recall", "--limit", "1", "--baselines", "shuffled"],
        ["tune", *ENDS, "--translator", "TRANSLATOR", "--limit", "1", "--native-layers", "0"],
        ["verify", "TRANSLATOR", *PAIR[1:]],
    ],
    ids=lambda command: command[0],
)
def test_another_checkpoints_translator(
    command: list[str], tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """Refused, unless it was asked for: then by every part of a run, controls included."""
    monkeypatch.chdir(tmp_path)
    config, weights = translator_folder.read(TRANSLATORS / "--".join(ENDS))
    fingerprint = {**config.source.fingerprint, "norms": "0" * 64}
    other = dataclasses.replace(
        config, source=dataclasses.replace(config.source, fingerprint=fingerprint)
    )
    translator_folder.write(tmp_path / "other", other, weights)
    words = ["other" if word == "TRANSLATOR" else word for word in command]
    assert run(words) == 2
    assert "another checkpoint (norms fingerprint); allow_mismatch" in capsys.readouterr().err
    assert run([*words, "--allow-mismatch"]) == 0


def test_an_interrupted_run_says_how_to_go_on_and_does(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """Although it was killed as it wrote; what was scored is not scored again."""
    options = ["--limit", "2", "--tasks", "recall", "--baselines", "none"]
    whole = evaluated(tmp_path, *options)[1]["items"]
    journal = tmp_path / "scores.jsonl"
    journal.unlink()
    add, kept = Journal.add, []

    def keep_and_stop(self: Journal, *entry: Any) -> None:
        add(self, *entry)
        kept.append(entry)
        if len(kept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", keep_and_stop)
    assert evaluated(tmp_path, *options)[0] == 130
    assert "the same command goes on" in capsys.readouterr().err
    with journal.open("a") as file:
        file.write('{"run": "half a li')
    assert evaluated(tmp_path, *options)[1]["items"] == whole
    assert len(kept) == 4  # two items, native and translated
    assert all(json.loads(text) for text in journal.read_text().splitlines())
