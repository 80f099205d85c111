"""A training watches itself: its curve, the step that is kept, and its rates in little time."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.training import distill
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.watch import complaints, outlook
from tests.support.fixtures import Models, Patch
from tests.support.trainings import die_after, log_of, training

Curve = list[dict[str, Any]]


def curve(held_out: list[float], train: list[float]) -> Curve:
    lines: Curve = [{"step": 0, "held_out": [held_out[0]]}]
    for index, (held, kl) in enumerate(zip(held_out[1:], train, strict=True), start=1):
        lines.append({"step": 250 * index, "held_out": [held], "train_kl": [kl]})
    return lines


HEALTHY = [0.5, 0.3, 0.2, 0.15, 0.14], [0.33, 0.22, 0.14, 0.13]


@pytest.mark.parametrize(
    ("held_out", "train", "name", "text"),
    [
        # The numbers of the fault that this was made for: loss to 0.006, held-out standing still.
        ([0.31, 0.30, 0.29, 0.30], [0.2, 0.03, 0.006], "by heart",
         "step 750: the KL on the training conversations, 0.0060, is far below that on held-out "
         "ones, 0.3000"),
        ([0.31, 0.30, 0.29], [0.25, 0.05], None, ""),  # one look alone may be chance
        ([0.5, 0.3, 0.31, 0.32, 0.3, 0.31], [0.3] * 5, "stalled",
         "has not fallen since step 250 (0.3000, now 0.3100)"),
        ([0.5, 0.6], [0.6], "worse", "0.6000, worse than the 0.5000"),
        *((HEALTHY[0][:n], HEALTHY[1][: max(0, n - 1)], None, "") for n in range(1, 6)),
    ],
)  # fmt: skip
def test_what_a_curve_is_complained_of(
    held_out: list[float], train: list[float], name: str | None, text: str
) -> None:
    found = complaints(curve(held_out, train))
    assert list(found) == ([] if name is None else [name])
    assert text in "".join(found.values()) and complaints([]) == {}


def test_the_leading_rate_is_judged() -> None:
    lines = [
        {"step": 0, "held_out": [0.5, 0.5]},
        {"step": 1, "held_out": [None, 0.4], "train_kl": [None, 0.35]},
        {"step": 2, "held_out": [math.inf, 0.3], "train_kl": [math.nan, 0.25]},
    ]
    assert complaints(lines) == {}
    lines[1]["train_kl"], lines[2]["train_kl"] = [0.3, 0.1], [0.3, 0.1]
    assert list(complaints(lines)) == ["by heart"]


WILD = (3.0,)  # a learning rate that ruins any translator


def test_the_best_step_is_kept_stage_1_included(
    torch_models: dict[str, TorchModel], tmp_path: Path
) -> None:
    first = training(torch_models, tmp_path / "first", steps=0).run()
    said: list[str] = []
    out = training(torch_models, tmp_path / "t", WILD, warn=said.append).run()
    config, weights = translator_folder.read(out)
    facts, log = config.provenance, log_of(tmp_path / "t")
    assert log[-1]["held_out"][0] > log[0]["held_out"][0], "it was ruined"
    assert (facts["best_step"], facts["held_out_kl"]) == (0, log[0]["held_out"][0])
    stage1 = translator_folder.read(first)[1].arrays
    assert all(np.array_equal(array, stage1[name]) for name, array in weights.arrays.items())
    assert any("worse than the" in text for text in said)
    assert facts["complaints"] and all(isinstance(text, str) for text in facts["complaints"])


def test_a_step_in_the_middle_is_kept_and_survives_a_kill(
    torch_models: dict[str, TorchModel], tmp_path: Path, monkeypatch: Patch
) -> None:
    """Two good steps, then the rate is raised until all is ruined, and the process killed."""
    monkeypatch.setattr(Recipe, "rate_factor", lambda self, step: 1e-3 if step < 2 else 3000.0)
    options: dict[str, Any] = {"learning_rates": (1.0,)}
    whole = training(torch_models, tmp_path / "whole", **options).run()
    log = log_of(tmp_path / "whole")
    values = [line["held_out"][0] for line in log]
    assert values.index(min(values)) == 1 and log[1]["step"] == 2
    assert translator_folder.read_config(whole).provenance["best_step"] == 2
    with monkeypatch.context() as patch:
        die_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            training(torch_models, tmp_path / "t", **options).run()
    rest = training(torch_models, tmp_path / "t", **options).run()
    kept = [translator_folder.read(folder)[1].arrays for folder in (whole, rest)]
    assert all(np.array_equal(array, kept[1][name]) for name, array in kept[0].items())
    lines = [json.loads(line) for line in (tmp_path / "t.log.jsonl").read_text().splitlines()]
    assert [line.get("train_kl") for line in lines] == [line.get("train_kl") for line in log]


class Clock:
    """Every step and every validation takes one second."""

    def __init__(self) -> None:
        self.ticks = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self.ticks))

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture()
def rates(monkeypatch: Patch) -> list[float]:
    """The rates of all steps taken."""
    monkeypatch.setattr(distill, "time", Clock())
    taken: list[float] = []
    update = MLXTranslator.update

    def spy(self: Any, rate: float, clip: float) -> None:
        taken.append(rate)
        update(self, rate, clip)

    monkeypatch.setattr(MLXTranslator, "update", spy)
    return taken


LIMITED = {"steps": 5000, "validate_every": 250, "seconds": 60.0, "learning_rates": (1.0e-3,)}


def test_the_rates_fall_in_the_time(models: Models, tmp_path: Path, rates: list[float]) -> None:
    """5,000 steps asked for, about 50 made in 60 seconds: warmed up, and down to nearly 0."""
    out = training(models, tmp_path / "t", **LIMITED).run()
    assert 48 <= len(rates) <= 56
    top = rates.index(max(rates))
    assert top <= 4 and max(rates) > 0.99e-3
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.01e-3
    # The curve_of of a run that has all its steps.
    whole = Recipe(steps=len(rates), learning_rates=(1e-3,))
    expected = [1e-3 * whole.rate_factor(step) for step in range(len(rates))]
    assert np.abs(np.subtract(rates, expected))[4:].max() < 0.1e-3
    lines = log_of(tmp_path / "t")
    assert lines[-1]["step"] == len(rates), "validated at the end"
    assert len(lines) + len(rates) <= 60
    assert 4 <= len(lines) <= 8, "a tenth of the time"
    assert translator_folder.read_config(out).provenance["stage"] == 2


def test_steps_may_end_it_first(models: Models, tmp_path: Path, rates: list[float]) -> None:
    limited = training(models, tmp_path / "t", **{**LIMITED, "steps": 6, "seconds": 1e6}).run()
    first = list(rates)
    rates.clear()
    free = training(models, tmp_path / "u", **{**LIMITED, "steps": 6, "seconds": None}).run()
    assert len(first) == 6 and np.allclose(first, rates, rtol=1e-4)
    a, b = (translator_folder.read(folder)[1].arrays for folder in (limited, free))
    assert all(np.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_what_is_spent_counts_after_a_kill(
    models: Models, tmp_path: Path, rates: list[float], monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        die_after(patch, 20)
        with pytest.raises(KeyboardInterrupt):
            training(models, tmp_path / "t", **LIMITED, keep_every=0.0).run()
    made = len(rates)
    training(models, tmp_path / "t", **LIMITED, keep_every=0.0).run()
    assert 48 <= len(rates) <= 58 and len(rates) > made
    assert rates[-1] < 0.01e-3


def test_what_more_time_may_bring() -> None:
    def curve_of(*kls: float) -> Curve:
        return [{"step": step, "held_out": [kl, None]} for step, kl in enumerate(kls)]

    said = outlook(curve_of(1.0, 0.6, 0.5, 0.45, 0.4))
    assert said is not None and "20 % (0.5000 to 0.4000)" in said and "as much again" in said
    said = outlook(curve_of(1.0, 0.6, 0.5, 0.495, 0.497))
    assert said is not None and "1 %" in said and "little" in said
    assert outlook(curve_of(1.0)) is None
    assert outlook(curve_of(0.3, 0.5, 0.6)) is None, "it got worse, which is said elsewhere"
