"""benchmarks/recurrent.py: what it makes of translators of hybrids."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.translators import build
from tests.support import ROOT, hybrid_models
from tests.support.identity import identity_of
from tests.support.native_caches import native

PREFIX = list(range(5, 45))


@pytest.fixture
def recurrent(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return pytest.importorskip("recurrent")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    found = kv.load(hybrid_models.write_hybrid_model(folder, "qwen3_5", num_hidden_layers=4))
    hybrid_models.forget_tails(found)
    return found


def states(cache: Any) -> list[np.ndarray]:
    return [np.array(each.cache[1]) for each in cache if caches.is_recurrent(each)]


@pytest.mark.parametrize("state_maps", [False, True])
def test_a_text_goes_to_another_model_and_back(
    recurrent: ModuleType, model: Any, state_maps: bool
) -> None:
    """Through the identity all is as it was; through maps of far larger states it is not."""
    same = identity_of(model, state_maps=state_maps)
    crossing = recurrent.Crossing(model, model, same)
    wanted = states(native(model, PREFIX[:-1], 64))
    for way in (crossing, recurrent.there_and_back(crossing, crossing)):
        for found, own in zip(states(way(PREFIX)), wanted, strict=True):
            assert found == pytest.approx(own, abs=1e-5)
    arrays = {name: 1000 * a if name.endswith(".left") else a for name, a in same.floats().items()}
    larger = recurrent.Crossing(model, model, build(same.config, Weights("float32", arrays)))
    lost = states(recurrent.there_and_back(larger, crossing)(PREFIX))
    apart = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(lost, wanted, strict=True)]
    assert max(apart) > 0.1 or not state_maps
