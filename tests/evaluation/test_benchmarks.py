"""lm-eval's tasks across a line-up, and in the verb ``eval``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.commands import run
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.evaluation import conditions, lineup
from kvlingo_mlx.loading.models import load

pytest.importorskip("lm_eval")

from kvlingo_mlx.evaluation.harness import benchmarks, running
from tests.support.fixtures import Models, Patch

PAIR = ["eval", "--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l"]


def test_seeds_are_averaged_item_by_item_and_groups_weighted(
    models: Models, task_folder: Path, monkeypatch: Patch
) -> None:
    # A group may name tasks of lm-eval's own, so all of them would be read; this one names none.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(task_folder / "none" / "manager.py"))
    model, names = models["dense"], ["tiny_group", "tiny_words"]
    seeds = (conditions.native(model), conditions.hidden(model))
    line = [lineup.native(model), lineup.Condition("two", seeds)]
    found = benchmarks.evaluate(model, names, line, include_path=task_folder)
    assert [o.task for o in found] == ["tiny_choice", "tiny_other", "tiny_words", "tiny_group"]
    single = [
        running.run(model, make, names, condition=str(i), include_path=task_folder)["tasks"]
        for i, make in enumerate(seeds)
    ]
    tables = {o.task: o.tables["two"]["mean"] for o in found}
    squares, values, differ = [], [], []
    for name in ("tiny_choice", "tiny_other"):
        runs = [[item["scores"]["acc_norm"] for item in run[name]["items"]] for run in single]
        differ.append(runs[0] != runs[1])
        both = np.mean(runs, axis=0)
        values.append(both.mean())
        squares.append((both.std(ddof=1) / np.sqrt(len(both))) ** 2)
        assert tables[name]["acc_norm"].value == pytest.approx(values[-1])
        assert tables[name]["acc_norm"].error == pytest.approx(np.sqrt(squares[-1]))
    assert any(differ)
    assert tables["tiny_group"]["acc_norm"].value == pytest.approx(np.mean(values))
    assert tables["tiny_group"]["acc_norm"].error == pytest.approx(np.sqrt(sum(squares)) / 2)
    # A perplexity is no mean over items: the seeds' mean, without an error.
    two = [run["tiny_words"]["metrics"]["perplexity"]["value"] for run in single]
    assert tables["tiny_words"]["perplexity"].value == pytest.approx(np.mean(two))
    assert np.isnan(tables["tiny_words"]["perplexity"].error)
    assert found[0].count == len(single[0]["tiny_choice"]["items"])
    # Each seed alone, and the group of their tasks.
    for outcome in found[:2]:
        alone = [run[outcome.task]["metrics"]["acc_norm"] for run in single]
        each = [table["mean"]["acc_norm"] for table in outcome.seeds["two"]]
        assert [m.value for m in each] == pytest.approx([one["value"] for one in alone])
        assert [m.error for m in each] == pytest.approx([one["error"] for one in alone])
    whole = [table["mean"]["acc_norm"].value for table in found[3].seeds["two"]]
    parts = [[t["mean"]["acc_norm"].value for t in o.seeds["two"]] for o in found[:2]]
    assert whole == pytest.approx(np.mean(parts, axis=0)) and list(found[3].seeds) == ["two"]


def evaluated(tmp_path: Path, *more: str) -> dict[str, Any]:
    record = tmp_path / "record.json"
    record.unlink(missing_ok=True)
    out = ["--out", str(tmp_path / "scores.jsonl"), "--json", str(record)]
    assert run([*PAIR, *out, *more]) == 0
    return json.loads(record.read_text())["results"]


def test_the_verb_runs_them_and_resumes(tmp_path: Path, task_folder: Path) -> None:
    options = ["--tasks", "recall,tiny_choice,tiny_answers", "--include-path", str(task_folder),
               "--limit", "3", "--baselines", "hidden", "--num-shots", "0",
               "--no-apply-chat-template", "--max-tokens", "4"]  # fmt: skip
    found = evaluated(tmp_path, *options)
    assert set(found["means"]) == {"recall", "tiny_choice", "tiny_answers"}
    assert set(found["means"]["tiny_choice"]) == {"native", "translated", "prefix hidden"}
    target = load(zoo("tiny-qwen3-l"))
    own = running.run(
        target, conditions.native(target), ["tiny_choice"], condition="x", limit=3,
        include_path=task_folder, apply_chat_template=False,
    )["tasks"]["tiny_choice"]  # fmt: skip
    means = found["means"]["tiny_choice"]["native"]["mean"]
    assert means["acc"] == pytest.approx(own["metrics"]["acc"])
    items = found["items"]["tiny_choice"]["native"]
    assert [i["scores"]["acc"] for i in items] == [i["scores"]["acc"] for i in own["items"]]
    kept = tmp_path / "scores.responses.jsonl"
    before = kept.read_text()
    assert len(before.splitlines()) == 3 * (3 + 3)  # conditions, contexts of both tasks
    assert evaluated(tmp_path, *options)["means"] == found["means"]
    assert kept.read_text() == before
