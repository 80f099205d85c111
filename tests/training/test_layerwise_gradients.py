"""The gradient that is taken layer by layer, against one trace of the whole pass."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

pytest.importorskip("torch")

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.models.reclassed import calling
from kvlingo_mlx.training import trainer
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.on_mlx import gradients
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from kvlingo_mlx.training.runtime import pair_of
from tests.support import hybrid_models, plain_models, tiny, trainings
from tests.support.fixtures import Models, Patch
from tests.support.trainings import Random, check_gradients, distance, random_arrays, training

KL = objective_named("kl")
READ = 44  # tokens that are translated, beyond the windows of the tiny models


@pytest.mark.parametrize("name", sorted({*plain_models.CONFIGS, *tiny.FAMILIES}))
def test_families(families: Models, name: str) -> None:
    """With windows, latents, experts, and layers that read other layers' caches (Gemma 4)."""
    check_gradients(pair_of(families[name], families[name]), Random(READ + 1, 15).sample(1))


@pytest.mark.parametrize("name", hybrid_models.CONFIGS)
def test_hybrids(families: Models, name: str, monkeypatch: Patch) -> None:
    """Through recurrences in segments, against one trace; and against mlx-lm's own loops."""
    pair, sample = pair_of(families[name], families[name]), Random(READ + 1, 15).sample(1)
    with in_chunks():
        check_gradients(pair, sample)
    config = make_config(pair.source, pair.target, TrainingPlan())
    reading, found = pair.read(sample, config), list[dict[str, np.ndarray]]()
    for segment in (512, 16):
        monkeypatch.setattr(gradients, "SEGMENT", segment)
        made = pair.trainable(config, random_arrays(config, 3))
        pair.loss(made, reading, KL, 1.0)
        found.append({name: np.array(each) for name, each in made.gradients.items()})
    assert distance(*found) < 1e-4
    check_gradients(pair, sample, tolerance=1e-4)


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "lfm2"])
def test_hybrids_native_layers_are_left_alone(families: Models, name: str) -> None:
    """And the reading of a conversation is as it was before a gradient was taken from it."""
    pair, sample = pair_of(families[name], families[name]), Random(READ + 1, 15).sample(1)
    config = make_config(pair.source, pair.target, TrainingPlan(native_layers=3))
    made, reading = pair.trainable(config, random_arrays(config, 3)), pair.read(sample, config)
    held = [[np.array(array) for array in entry] for entry in reading.native]
    first = pair.loss(made, reading, KL, 1.0)
    assert {name.split(".")[1] for name in made.gradients} == {
        str(t) for t in range(3, len(config.target.layers))
    }
    for entry, before in zip(reading.native, held, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(entry, before, strict=True))
    assert pair.loss(made, reading, KL).kl == first.kl
    exact = make_config(pair.source, pair.target, TrainingPlan())
    assert first.kl != pair.loss(made, pair.read(sample, exact), KL).kl


def test_it_needs_less_memory(models: Models) -> None:
    """What a layer keeps for its backward pass is there once, not once a layer."""
    pair = pair_of(models["dense"], models["wide"])
    config = make_config(pair.source, pair.target, TrainingPlan())
    reading = pair.read(Random(200, 400).sample(0), config)

    def peak(learn: Callable[[MLXTranslator], object]) -> int:
        made = pair.trainable(config, random_arrays(config, 3))
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        learn(made)
        mx.eval(list(made.gradients.values()))
        return mx.get_peak_memory() - before

    whole = peak(lambda made: trainings.traced(pair, made, reading))
    assert peak(lambda made: pair.loss(made, reading, KL, 1.0)) < 0.7 * whole


def test_nothing_is_kept(models: Models) -> None:
    """Not even until Python next collects what refers to itself."""
    pair = pair_of(models["dense"], models["wide"])
    config = make_config(pair.source, pair.target, TrainingPlan())
    made, sample = pair.trainable(config, random_arrays(config, 3)), Random(200, 40).sample(0)

    def learn() -> int:
        pair.loss(made, pair.read(sample, config), KL, 1.0)
        mx.eval(list(made.gradients.values()))
        return mx.get_active_memory()

    learn()
    gc.collect()
    gc.disable()
    try:
        held = [learn() for _ in range(5)]
        assert len(set(held[2:])) == 1, "each conversation would leave something behind"
    finally:
        gc.enable()


def without_gradient(x: mx.array) -> mx.array:
    """An operation of MLX that has no gradient, with its input unchanged."""
    return x + 0 * mx.linalg.qr(x[0, :2, :2].astype(mx.float32), stream=mx.cpu)[0][0, 0]


@pytest.mark.parametrize(
    ("act", "reason"),
    [(without_gradient, "QR"), (mx.stop_gradient, "of all keys is 0")],
    ids=["no vjp", "zeros"],
)
def test_it_is_refused(
    models: Models, tmp_path: Path, monkeypatch: Patch, act: Any, reason: str
) -> None:
    target = models["wide"]

    def change(call: Any) -> Any:
        return lambda *args, **kwargs: act(call(*args, **kwargs))

    monkeypatch.setattr(trainer.Trainer, "_first", None)  # no work is begun
    with (
        calling([target.model.layers[-1]], change),
        pytest.raises(UnsupportedModelError, match=reason) as found,
    ):
        training(models, tmp_path / "t", pair=("dense", "wide")).run()
    assert target.name in str(found.value) and "--steps 0" in str(found.value)
    assert "\n" not in str(found.value)
    assert not list(tmp_path.iterdir())


def test_a_closed_form_needs_none(models: Models, tmp_path: Path) -> None:
    with calling([models["wide"].model.layers[-1]], lambda call: lambda *a, **k: mx.stop_gradient(
        call(*a, **k)
    )):  # fmt: skip
        training(models, tmp_path / "t", pair=("dense", "wide"), steps=0).run()
