"""A training with little time: its rates, its validations, its end; by a clock of our own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.training import distill
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.watch import outlook
from tests.support.trainings import die_after, log_of, training

Models = dict[str, LanguageModel]


class Clock:
    """Every step and every validation takes one second."""

    def __init__(self) -> None:
        self.ticks = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self.ticks))

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture()
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
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
    # The curve of a run that has all its steps.
    whole = Recipe(steps=len(rates), learning_rates=(1e-3,))
    expected = [1e-3 * whole.rate_factor(step) for step in range(len(rates))]
    assert np.abs(np.subtract(rates, expected))[4:].max() < 0.1e-3
    lines = log_of(tmp_path / "t.log.jsonl")
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
    models: Models, tmp_path: Path, rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        die_after(patch, 20)
        with pytest.raises(KeyboardInterrupt):
            training(models, tmp_path / "t", **LIMITED, keep_every=0.0).run()
    made = len(rates)
    training(models, tmp_path / "t", **LIMITED, keep_every=0.0).run()
    assert 48 <= len(rates) <= 58 and len(rates) > made
    assert rates[-1] < 0.01e-3


def curve(*kls: float) -> list[dict[str, Any]]:
    return [{"step": step, "held_out": [kl, None]} for step, kl in enumerate(kls)]


def test_what_more_time_may_bring() -> None:
    said = outlook(curve(1.0, 0.6, 0.5, 0.45, 0.4))
    assert said is not None and "20 % (0.5000 to 0.4000)" in said and "as much again" in said
    said = outlook(curve(1.0, 0.6, 0.5, 0.495, 0.497))
    assert said is not None and "1 %" in said and "little" in said
    assert outlook(curve(1.0)) is None
    assert outlook(curve(0.3, 0.5, 0.6)) is None, "it got worse, which is said elsewhere"


def test_the_better_half_of_the_rates_goes_on(models: Models, tmp_path: Path) -> None:
    """Of four rates two are left after a tenth, and one after two; it learns as if alone."""
    rates = (1e-5, 1e-2, 1e-3, 30.0)
    options: dict[str, Any] = {"steps": 20, "validate_every": 2, "seconds": None}
    many = training(models, tmp_path / "many", rates, halving=True, **options).run()
    lines = log_of(tmp_path / "many.log.jsonl")
    left = [sum(kl is not None for kl in line["held_out"]) for line in lines]
    assert left == [4, 4, 2, *[1] * 8]
    judged = lines[1]["held_out"]
    assert lines[2]["held_out"][3] is None and max(judged) == judged[3]
    won = [index for index, kl in enumerate(lines[-1]["held_out"]) if kl is not None]
    alone = training(models, tmp_path / "alone", (rates[won[0]],), **options).run()
    (config, a), (_, b) = (translator_folder.read(folder) for folder in (many, alone))
    assert config.provenance["learning_rate"] == rates[won[0]]
    assert all(np.array_equal(array, b.arrays[name]) for name, array in a.arrays.items())
