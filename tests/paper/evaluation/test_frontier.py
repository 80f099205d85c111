"""Scores beside times: the figure of both, and the times that the laboratory's eval takes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.paper.commands import run
from benchmarks.paper.evaluation.frontier import score_against_time

pytest.importorskip("matplotlib")


def mean(value: float) -> Any:
    return SimpleNamespace(value=value, error=0.01)


def test_evals_tasks_have_a_panel_each() -> None:
    times = {"native": [0.4, 0.5], "translated": [0.02, 0.03]}
    outcomes: Any = [
        SimpleNamespace(task=task, metrics=[metric], tables={
            name: {"all": {metric: mean(value)}}
            for name, value in {"native": 1.0, "translated": 0.8, "shuffled": 0.0,
                                "hidden": 0.0}.items()
        })
        for task, metric in (("continuation", "kl"), ("recall", "recall"))
    ]  # fmt: skip
    panels = score_against_time(outcomes, times).axes
    assert [axes.get_ylabel() for axes in panels] == ["continuation: kl", "recall: recall"]
    for axes in panels:
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(times)
        assert [text.get_text() for text in axes.texts] == ["shuffled, hidden"]  # one place, once


def test_the_verb_times_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["eval", "--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l", "--tasks", "recall",
               "--limit", "2", "--baselines", "hidden,text", "--json", "r.json"]  # fmt: skip
    assert run([*options, "--compare", "--plot", "x.png"]) == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(Path("r.json").read_text())["results"]["first_token_s"]
    assert found.keys() == {"native", "translated", "text"}
    assert {len(samples) for samples in found.values()} == {5}
