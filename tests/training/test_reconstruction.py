"""An MLP's stage 1: the loss of the paper's equation, against plain loops in float64.

The equation for the closed form: the squared Frobenius norm of ``M K_src - K_tgt`` of a whole
prefix, for every layer's keys and values.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.group import Group
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.plan import TrainingPlan, initial, make_config
from kvlingo_mlx.training.runtime import pair_of
from tests.support import kinds, tiny

FORMS = {
    "mixing": {},
    "head-wise": {"head_mixing": False},
    "ungated": {"gated": False},
    "two layers": {"nu": 2},
}
HIDDEN = 5
STEP = 1e-5
Arrays = dict[str, Any]  # by tensor, or by side a list


def error(arrays: Arrays, config: Any, read: Arrays, goal: Arrays) -> float:
    """The loss in float64, of maps that are plain loops; (T, width) a side and layer."""
    made = kinds.reference(config.to_json(), arrays, {s: [a[None] for a in read[s]] for s in read})
    return sum(
        float(np.square(out[0].swapaxes(0, 1).reshape(wanted.shape) - wanted).sum())
        for side in goal for out, wanted in zip(made[side], goal[side], strict=True)
    )  # fmt: skip


def in_numpy(states: Any) -> dict[str, list[np.ndarray]]:
    """States of either runtime as rows in float64, by side and layer."""

    def rows(array: Any) -> np.ndarray:
        made = np.array(array.float().numpy() if hasattr(array, "numpy") else array)
        return made.reshape(made.shape[-2:]).astype(np.float64)

    return {side: [rows(a) for a in getattr(states, side)] for side in ("keys", "values")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = dict(layers=2, kv_heads=2, head_dim=8, hidden=16, heads=2)
    return tiny.write_tiny_model(tmp_path_factory.mktemp("m") / "m", "qwen3", seed=2, **facts)


def loaded(folder: Path, runtime: str) -> Any:
    if runtime == "mlx":
        return kv.load(folder)
    torch = pytest.importorskip("torch")
    room = importlib.import_module("kvlingo_mlx.cuda.model")
    return room.load(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("runtime", ["mlx", "torch"])
def test_the_loss_is_the_equations(folder: Path, runtime: str, form: str) -> None:
    """Its value, and its gradient by finite differences of the reference."""
    model = loaded(folder, runtime)
    options = dict(FORMS[form])
    gated = options.pop("gated", True)
    config = make_config(model, model, TrainingPlan(kind="mlp", hidden=HIDDEN, **options))
    rng = np.random.default_rng(1)
    arrays = {
        name: (a + 0.3 * rng.standard_normal(a.shape)).astype(np.float32)
        for name, a in initial(config, HIDDEN, 0, gated=gated).items()
    }
    assert any("gate" in name for name in arrays) == gated
    tokens = rng.integers(5, 280, 7).tolist()
    pair = pair_of(model, model)
    (states,) = pair.spans(Sample(tuple(tokens), (1,)), config.capture)
    read, goal = map(in_numpy, states)
    made = pair.trainable(config, arrays)
    wide = {name: a.astype(np.float64) for name, a in arrays.items()}
    expected = error(wide, config, read, goal)
    assert pair.reconstruction(made, states) == pytest.approx(expected, rel=1e-5)
    assert pair.reconstruction(made, states, 0.25) == pytest.approx(expected, rel=1e-5)
    assert made.gather(Group())
    checked = 0
    for name, array in wide.items():
        if runtime == "mlx":
            found = np.array(made.gradients[name])
        else:
            found = made.tensors[name].grad.numpy()
        for place in rng.integers(0, array.size, 2):
            at = np.unravel_index(place, array.shape)
            values = []
            for sign in (1, -1):
                moved = {**wide, name: array.copy()}
                moved[name][at] += sign * STEP
                values.append(error(moved, config, read, goal))
            slope = 0.25 * (values[0] - values[1]) / (2 * STEP)
            scale = 1e-3 * float(np.abs(found).max())
            assert float(found[at]) == pytest.approx(slope, rel=2e-3, abs=scale)
            checked += abs(slope) > 1e-3
    assert checked > 10


def test_the_papers_widths_are_the_default(tmp_path: Path) -> None:
    """Qwen3's keys: 8 heads of 128. 128 to 2048 to 128 for a head, 1024 to 2048 to 1024 for all;
    either has as many numbers, and a gate for each head."""
    facts = dict(seed=0, layers=1, kv_heads=8, head_dim=128, hidden=64, heads=8)
    model = kv.load(tiny.write_tiny_model(tmp_path / "m", "qwen3", **facts))
    numbers = []
    for mixing, inner in ((False, (8, 2048, 128)), (True, (2048, 1024))):
        plan = TrainingPlan(kind="mlp", head_mixing=mixing)
        made = initial(make_config(model, model, plan), plan.hidden, 0, gated=plan.gated)
        assert made["keys.0.w1"].shape == inner
        assert made["keys.0.w2"].shape == (*inner[:-2], inner[-1], inner[-2])
        assert made["values.0.gate"].shape == (8,) and (made["values.0.gate"] == 4).all()
        numbers.append(made["keys.0.w1"].size + made["keys.0.w2"].size)
    assert numbers[0] == numbers[1] == 2 * 1024 * 2048
