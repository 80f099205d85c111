"""The sweep of learning rates, on planted landscapes: where the best rate lies is known."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.training import jobs
from benchmarks.paper.training.sweep import SweepTrainer, neighbour, window
from kvlingo_mlx.errors import KVLingoError, NotEnoughMemoryError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training import distill, trainer
from kvlingo_mlx.training.checkpoints import log_of, read_log
from kvlingo_mlx.training.command_line import Listeners, Options
from kvlingo_mlx.training.objectives import Loss
from kvlingo_mlx.training.on_mlx.pair import MLXPair
from kvlingo_mlx.training.plan import TrainingPlan, reconstruction
from kvlingo_mlx.training.recipe import Recipe
from tests.support.fixtures import Folders, Models, Patch
from tests.support.random_samples import Random

STEPS = 8
FIRST = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)


def test_windows_are_the_papers() -> None:
    assert window(1e-4) == FIRST
    assert window(3e-6) == (3e-7, 1e-6, 3e-6, 1e-5, 3e-5)
    assert window(3e-6, 3) == (1e-6, 3e-6, 1e-5)
    assert neighbour(1e-2, 1) == 3e-2 and neighbour(3e-7, -1) == 1e-7 and neighbour(1.0, -1) == 0.3
    # Of other digits each is a root of ten times the one below, to three digits.
    assert window(2e-4) == (2e-5, 6.32e-5, 2e-4, 6.32e-4, 2e-3)
    for centre in (7e-8, 1e-5, 3e-5, 4.2e-3):
        ratios = np.log10(window(centre)[1:]) - np.log10(window(centre)[:-1])
        assert np.abs(ratios - 0.5).max() < 0.025


class Planted:
    """A translator that keeps how far it was moved: its peak rate times the schedule's sum."""

    def __init__(self, config: Any, arrays: Mapping[str, np.ndarray]) -> None:
        self.config, self.tensors, self.moved = config, dict(arrays), 0.0

    def arrays(self) -> dict[str, np.ndarray]:
        first = sorted(self.tensors)[0]
        return {**self.tensors, first: np.full_like(self.tensors[first], 1 + self.moved)}

    def state(self) -> dict[str, np.ndarray]:
        return {**self.tensors, "moved": np.array([self.moved])}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.moved = float(state["moved"][0])

    def gather(self, group: Any) -> bool:
        return True

    def update(self, rate: float, clip: float) -> None:
        self.moved += rate

    def forget(self) -> None:
        pass


WHOLE = sum(Recipe(steps=STEPS).rate_factor(step) for step in range(STEPS))


def landscape(best: float, highest: float = math.inf) -> type[MLXPair]:
    """A pair whose KL is lowest where a whole run's rate was ``best``, and 1 before any step.

    A higher rate passes the lowest point on its way, so its best look is as good; only the end
    tells them apart. Above ``highest`` the loss is not finite.
    """

    class Landscape(MLXPair):
        room = 5  # translators

        def trainable(self, config: Any, arrays: Mapping[str, np.ndarray]) -> Any:
            return Planted(config, arrays)

        def read(self, sample: Sample, config: Any, attends: bool = False) -> Any:
            return None

        def loss(self, translator: Any, *rest: Any, **more: Any) -> Loss:
            rate = translator.moved / WHOLE
            if rate > highest:
                return Loss(math.nan, math.nan)
            value = 1.0 if rate == 0 else min(0.999, 0.1 + 0.02 * math.log10(rate / best) ** 2)
            return Loss(value, value)

        def reconstruction(self, translator: Any, states: Any, scale: float = 0.0) -> float:
            return self.loss(translator).value

        def states(self, sample: Sample, capture: str) -> Any:
            return None

        def check_gradients(self, sample: Sample, config: Any) -> None:
            pass

        def check_memory(self, config: Any, lengths: Any, rates: int, *_: Any) -> str:
            if rates > self.room:
                raise NotEnoughMemoryError(f"{rates} of {self.room}")
            return f"training takes room for {rates}"

        def receipt(self, *given: Any) -> None:
            return None

    return Landscape


def made(
    models: Models, out: Path, first: tuple[float, ...] = FIRST, **more: Any
) -> SimpleNamespace:
    """A training that sweeps; what it says and warns of."""
    said, warned = list[str](), list[str]()
    recipe = Recipe(steps=STEPS, batch=1, learning_rates=first, validate_every=2, sweep=True)
    recipe = more.pop("recipe", recipe)
    plan = TrainingPlan(fit_samples=4, held_out=2, recipe=recipe, **more.pop("plan", {}))
    training = SweepTrainer(
        models["dense"], models["wide"], Random(), plan, out, keep_every=0.0, warn=warned.append,
        say=said.append, **more,
    )  # fmt: skip
    return SimpleNamespace(training=training, said=said, warned=warned)


def result(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A translator's provenance, without what differs from run to run, and its log."""
    found = dict(translator_folder.read_config(out).provenance)
    times = ("seconds", "spent")
    return found, [{k: v for k, v in x.items() if k not in times} for x in read_log(log_of(out))]


def finals(log: list[dict[str, Any]]) -> dict[float, float | None]:
    """What each rate ended with, the lowest rate first."""
    return dict(zip(log[-1]["learning_rates"], log[-1]["held_out"], strict=True))


def groups(said: list[str]) -> list[str]:
    start = "sweep: training at "
    return [text.removeprefix(start) for text in said if text.startswith(start)]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1e-4, FIRST),
        (1e-5, (3e-6, *FIRST)),
        (1e-6, (3e-7, 1e-6, 3e-6, *FIRST)),
        (1e-2, (*FIRST, 3e-3, 1e-2, 3e-2)),
    ],
)
def test_the_best_rate_is_found_and_lies_within(
    models: Models, tmp_path: Path, monkeypatch: Patch, best: float, tried: tuple[float, ...]
) -> None:
    monkeypatch.setattr(trainer, "pair_of", landscape(best))
    run = made(models, tmp_path / "t")
    found, log = result(run.training.run())
    assert found["learning_rate"] == best and found["best_step"] == STEPS
    expected = [0.1 + 0.02 * math.log10(rate / best) ** 2 for rate in tried]
    assert found["held_out_kl"] == pytest.approx(0.1) and found["held_out_kl_at_first"] == 1
    assert [line["step"] for line in log] == [0, 2, 4, 6, 8]
    assert tuple(finals(log)) == tried
    assert list(finals(log).values()) == pytest.approx(expected)
    told = groups(run.said)
    assert told[0] == "1e-05, 3e-05, 0.0001, 0.0003, 0.001" and len(told) == 1 + len(tried) - 5
    (few,) = run.warned
    assert "only " in few and not (tmp_path / "t.partial").exists()
    # The translator is the one that this rate ended with.
    weights = translator_folder.read(tmp_path / "t")[1]
    moved = weights.as_float32(sorted(weights.arrays)[0]).flat[0] - 1
    assert moved == pytest.approx(best * WHOLE, rel=0.01)
    assert run.training.finished()


def test_a_sweep_goes_by_the_ends(models: Models, tmp_path: Path, monkeypatch: Patch) -> None:
    """A rate that is too high passes the lowest point on its way, and a run keeps that look."""
    monkeypatch.setattr(trainer, "pair_of", landscape(1.3e-4))
    swept, _ = result(made(models, tmp_path / "swept").training.run())
    assert (swept["learning_rate"], swept["best_step"]) == (1e-4, STEPS)
    recipe = Recipe(steps=STEPS, batch=1, learning_rates=FIRST, validate_every=2)
    found, log = result(made(models, tmp_path / "t", recipe=recipe).training.run())
    assert found["learning_rate"] == 3e-4 and found["best_step"] < STEPS
    assert found["held_out_kl"] < swept["held_out_kl"] == min(log[-1]["held_out"])


def test_rates_that_diverge(models: Models, tmp_path: Path, monkeypatch: Patch) -> None:
    """Some of the window, all of it, and everywhere."""
    monkeypatch.setattr(trainer, "pair_of", landscape(3e-5, 2e-4))
    found, log = result(made(models, tmp_path / "some").training.run())
    assert [value is None for value in finals(log).values()] == [False] * 3 + [True] * 2
    assert found["learning_rate"] == 3e-5
    for at_once in (None, 1):
        monkeypatch.setattr(trainer, "pair_of", landscape(1e-6, 5e-6))
        out = tmp_path / f"all-{at_once}"
        found, log = result(made(models, out, at_once=at_once).training.run())
        assert found["learning_rate"] == 1e-6 and finals(log)[1e-3] is None
        assert list(finals(log))[:3] == [3e-7, 1e-6, 3e-6]
    monkeypatch.setattr(trainer, "pair_of", landscape(1e-6, 1e-12))
    run = made(models, tmp_path / "none")
    with pytest.raises(KVLingoError, match="diverged .* at every learning rate: 1e-08, 3e-08, 1e"):
        run.training.run()
    assert not (tmp_path / "none").exists()


def test_a_best_rate_out_of_reach_is_told(
    models: Models, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(trainer, "pair_of", landscape(1e-10))
    run = made(models, tmp_path / "t")
    found, _ = result(run.training.run())
    assert found["learning_rate"] == 1e-8
    assert run.warned[1].startswith("the best learning rate is at the edge of those tried, 1e-08 ")


def test_groups_that_fit_give_the_same(models: Models, tmp_path: Path, monkeypatch: Patch) -> None:
    """By the memory there is, and as asked for; too little for one is refused."""
    pair = landscape(1e-5)
    monkeypatch.setattr(trainer, "pair_of", pair)
    whole = result(made(models, tmp_path / "whole").training.run())
    for name, room, more, at_first in (
        ("two", 2, {"lengths": (30, 10)}, "1e-05, 3e-05"),
        ("one", 5, {"at_once": 1}, "1e-05"),
        ("three", 5, {"lengths": (30, 10), "at_once": 3}, "1e-05, 3e-05, 0.0001"),
    ):
        monkeypatch.setattr(pair, "room", room)
        run = made(models, tmp_path / name, **more)
        found, log = result(run.training.run())
        assert groups(run.said)[0] == at_first
        assert any("at most" in text and "at a time" in text for text in run.said)
        assert log == whole[1]
        assert found["learning_rate"] == whole[0]["learning_rate"]
    assert any("training takes room for 3" in text for text in run.said)
    monkeypatch.setattr(pair, "room", 0)
    with pytest.raises(NotEnoughMemoryError, match="1 of 0"):
        made(models, tmp_path / "none", lengths=(30, 10)).training.run()


@pytest.mark.parametrize("at_once", [None, 2])
def test_a_sweep_that_is_killed_goes_on(
    models: Models, tmp_path: Path, monkeypatch: Patch, at_once: int | None
) -> None:
    """After every single step, within and between groups: no step is taken again but the one that
    was under way, and the result is the same."""
    monkeypatch.setattr(trainer, "pair_of", landscape(3e-6))
    whole = result(made(models, tmp_path / "whole", at_once=at_once).training.run())
    advance, taken = distill.Distillation.advance, list[tuple[float, ...]]()

    def dying(self: distill.Distillation) -> None:
        if len(alive) == lives[0]:
            raise KeyboardInterrupt
        alive.append(1)
        advance(self)
        taken.append(tuple(run.rate for run in self.runs))

    monkeypatch.setattr(distill.Distillation, "advance", dying)
    for each in (1, 3, STEPS, STEPS + 1):
        alive, lives, ended = list[int](), [each], False
        taken.clear()
        out = tmp_path / f"killed-{each}"
        while not ended:
            alive.clear()
            # Whoever resumes it may have more memory: a group that was begun stays as it is.
            run = made(models, out, at_once=at_once if len(taken) == 0 else 5)
            try:
                run.training.run()
                ended = True
            except KeyboardInterrupt:
                assert run.warned[-1].startswith("stopped; ")
        found, log = result(out)
        assert found["learning_rate"] == 3e-6 and log == whole[1]
        counts = {rates: taken.count(rates) for rates in taken}
        assert set(counts.values()) == {STEPS}, counts


@pytest.mark.parametrize(
    ("rates", "best", "first"),
    [
        ((), 3e-2, 3e-2),
        ((1e-3,), 1e-2, 1e-3),  # one alone is the one that is used
    ],
)
def test_an_mlps_stage_1_is_swept_too(
    models: Models,
    tmp_path: Path,
    monkeypatch: Patch,
    rates: tuple[float, ...],
    best: float,
    first: float,
) -> None:
    monkeypatch.setattr(trainer, "pair_of", landscape(best))
    stage2 = Recipe(steps=STEPS, batch=1, learning_rates=FIRST, validate_every=2, sweep=True)
    stage1 = reconstruction(stage2, rates or jobs.MLP_STAGE1_SWEEP, STEPS)
    plan = {"kind": "mlp", "hidden": 4, "stage1_recipe": stage1}
    run = made(models, tmp_path / "t", recipe=stage2, plan=plan, at_once=2)
    found, _ = result(run.training.run())
    assert (found["stage1_rate"], found["learning_rate"]) == (first, best)
    assert ("0.03, 0.1" in groups(run.said) or "0.1" in groups(run.said)) == (not rates)


def test_a_job_sweeps_around_its_rate(
    folders: Folders, generated: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The rates of the window end with what a run of them without a sweep ends with, to the bit."""
    monkeypatch.setattr(MLXPair, "receipt", lambda *rest: None)  # which takes longer than the rest
    ends = {"source": str(folders["dense"]), "target": str(folders["wide"])}
    options = Options(**ends, data=(generated,), device="mlx", max_continuation=8)
    plan = {"fit_samples": 8, "held_out": 2, "nu": None, "norm": None}
    recipe = {"steps": 4, "batch": 1, "validate_every": 2}
    said = list[str]()
    heard = Listeners(lambda *report: None, lambda text: None, said.append)
    logs = []
    for name, rates, sweep in (("a", (1e-3,), True), ("b", window(1e-3), False)):
        own = {**recipe, "learning_rates": rates, "sweep": sweep}
        asked = jobs.plan_of(options, plan, own)
        assert jobs.train(options, asked, str(tmp_path / name), heard) is not None
        logs.append(result(tmp_path / name))
    (found, swept), (_, plain) = logs
    assert "sweep: training at 0.0001, 0.0003, 0.001, 0.003, 0.01" in said
    ends_of = finals(swept)
    assert found["learning_rate"] == min(ends_of, key=lambda rate: ends_of[rate] or math.inf)
    assert {rate: ends_of[rate] for rate in window(1e-3)} == finals(plain)
