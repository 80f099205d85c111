"""benchmarks/mapped_states.py: recurrent states mapped, in closed form and self-distilled."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.training.on_mlx import gradients
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.recipe import Recipe
from tests.support import ROOT, hybrid_models
from tests.support.identity import identity_of
from tests.support.trainings import Random


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return pytest.importorskip("mapped_states")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    return kv.load(hybrid_models.write_hybrid_model(folder, "qwen3_5", num_hidden_layers=4))


def same(states: ModuleType, model: Any) -> Any:
    """The maps that leave a model's own states as they are."""
    maps = states.StateMaps(model, model)
    for t, (tail, state) in enumerate(states.states_of(model, range(5, 25))):
        heads, width, keys = state.shape
        for name, size, many in (("a", width, heads), ("b", keys, heads)):
            maps.tensors[f"{t}.{name}"] = mx.array(np.stack([np.eye(size)] * many, dtype="f4"))
        maps.tensors[f"{t}.tail"] = mx.eye(tail.size)
    return maps


def divergence(states: ModuleType, model: Any, maps: Any, translator: Any = None) -> float:
    """KL with mapped states; keys and values are exact, or a translator's."""
    translator = translator or identity_of(model)
    made = MLXTranslator.from_arrays(translator.config, translator.floats())
    sample = Random().sample(0)
    reading = gradients.read(model, model, sample, translator.config.capture)
    found = states.states_of(model, sample.prefix[:-1])
    tensors = {**made.tensors, **maps.tensors}
    with in_chunks():
        cache = states._cache(model, made, maps, tensors, reading, found)
        return float(states._divergence(model, cache, reading).item())


def test_a_planted_pair_of_matrices_is_found(states: ModuleType) -> None:
    """Up to a factor that goes from one to the other; of unrelated states nothing is."""
    rng = np.random.default_rng(0)
    given, a, b = (rng.standard_normal(s) for s in ((400, 6, 8), (5, 6), (8, 7)))
    found = states.bilinear(given, a @ given @ b)
    share = [np.linalg.norm(each[0] @ given @ each[1] - a @ given @ b) for each in (found, (a, b))]
    assert share[0] < 1e-2 * np.linalg.norm(a @ given @ b)
    other = rng.standard_normal((400, 5, 7))
    lost = states.bilinear(given, other)
    assert np.linalg.norm(lost[0] @ given @ lost[1] - other) > 0.8 * np.linalg.norm(other)


def test_the_models_own_states_are_exact(states: ModuleType, model: Any) -> None:
    """Through unit matrices; without one layer's heads they are not."""
    maps = same(states, model)
    assert divergence(states, model, maps) < 1e-6
    maps.tensors["1.a"] = mx.zeros_like(maps.tensors["1.a"])
    assert divergence(states, model, maps) > 1e-3


@pytest.mark.parametrize("tails", [True, False])
def test_a_text_goes_to_another_model_and_back(states: ModuleType, model: Any, tails: bool) -> None:
    """Through unit matrices all is as it was, but for the tails where there are none."""
    maps = same(states, model)
    maps.names = ("tail", "a", "b")[not tails :]
    crossing = states.Crossing(model, model, identity_of(model), maps)
    prefix = list(range(5, 45))
    wanted = states.states_of(model, prefix[:-1])
    for way in (crossing, states.there_and_back(crossing, crossing)):
        for found, own in zip(states.held_by(way(prefix)), wanted, strict=True):
            assert (found[0] != 0).any() == tails
            if tails:
                assert found[0] == pytest.approx(own[0], abs=1e-5)
                assert found[1] == pytest.approx(own[1], abs=1e-5)
    damaged = same(states, model)
    for t in range(3):
        damaged.tensors[f"{t}.a"] = 100 * damaged.tensors[f"{t}.a"]
    lost = states.there_and_back(replace(crossing, maps=damaged), crossing)(prefix)
    pairs = zip(states.held_by(lost), wanted, strict=True)  # the first layer forgets within tokens
    apart = [np.linalg.norm(found[1] - own[1]) / np.linalg.norm(own[1]) for found, own in pairs]
    assert max(apart) > 0.1


def test_what_comes_back_is_the_other_models_state(states: ModuleType, model: Any) -> None:
    """With maps of states, nothing of what the first model had is left in its own."""
    maps = same(states, model)
    for name in maps.tensors:
        maps.tensors[name] = 2 * maps.tensors[name] if name.endswith(".a") else maps.tensors[name]
    crossing = states.Crossing(model, model, identity_of(model), maps)
    prefix = list(range(5, 45))
    other = crossing(prefix)
    own = states.held_by(other)
    crossing.go_on(given := crossing(prefix), [], other)
    for found, theirs in zip(states.held_by(given), own, strict=True):
        assert found[1] == pytest.approx(2 * theirs[1], abs=1e-5)


def test_shuffled_maps_are_those_of_other_layers(states: ModuleType, model: Any) -> None:
    maps = same(states, model)
    for name in ("tail", "a", "b"):
        for t in range(3):
            maps.tensors[f"{t}.{name}"] = (t + 1) * maps.tensors[f"{t}.{name}"]
    found = {name: array.max().item() for name, array in maps.shuffled().tensors.items()}
    assert found == {f"{t}.{name}": (3, 1, 2)[t] for t in range(3) for name in ("tail", "a", "b")}


def test_distilling_brings_damaged_maps_nearer(states: ModuleType, model: Any) -> None:
    maps, curve = same(states, model), list[float]()
    rng = np.random.default_rng(1)
    for name, array in maps.tensors.items():
        maps.tensors[name] = array + 0.2 * mx.array(rng.standard_normal(array.shape, dtype="f4"))
    before = divergence(states, model, maps)
    recipe = Recipe(steps=16, batch=2, learning_rates=(2e-2,))
    with in_chunks():
        refined = states.distilled(
            model, identity_of(model), maps, Random(), recipe, lambda step, kl: curve.append(kl)
        )
    assert len(curve) == 16
    assert np.mean(curve[-3:]) < 0.5 * np.mean(curve[:3])
    assert divergence(states, model, maps, refined) < 0.5 * before
