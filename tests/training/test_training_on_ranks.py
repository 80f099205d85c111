"""A training on MLX that several ranks of ``mlx.launch`` share, beside one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.group import Group
from kvlingo_mlx.timing.random_maps import random_maps
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from tests.support import rank_jobs, tiny
from tests.support.ranks import shared

MODULE = ("-m", "tests.support.rank_jobs")
STEPS = {"steps": 20, "batch": 3, "learning_rates": [1e-2], "validate_every": 5}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("trained")
    shape = {"layers": 3, "kv_heads": 1, "head_dim": 16}
    folders = [
        tiny.write_tiny_model(root / n, "qwen3", seed=s, **shape) for s, n in enumerate("ab")
    ]
    return dict(zip(("source", "target"), map(str, folders), strict=True))


def test_ranks_train_as_one_process(ends: dict[str, str], tmp_path: Path) -> None:
    """Twenty steps: the same curve, which moved, and nearly the same maps, written by one rank.

    A batch of three leaves one of two ranks more to do.
    """
    case: dict[str, Any] = {"name": "whole", "work": "training", **ends, "recipe": STEPS}
    case["out"] = str(tmp_path / "out" / "t")
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"folder": str(tmp_path), "cases": [case]}))
    done = shared(2, *MODULE, str(job))
    assert done.returncode == 0, done.stdout[-2000:]
    own, other = (dict(np.load(tmp_path / f"whole-{rank}.npz")) for rank in range(2))
    alone = rank_jobs.training({**case, "out": str(tmp_path / "alone")})
    assert set(own) == set(alone) and not other["wrote"]
    for name in ("held_out", "loss"):
        assert np.nanmax(np.abs(own[name] / alone[name] - 1)) < 1e-4, name
    assert np.nanmax(np.abs(own["held_out"][1:] / own["held_out"][0] - 1)) > 1e-3
    for name in (name for name in alone if "weights/" in name):
        assert np.linalg.norm(own[name] - alone[name]) < 1e-3 * np.linalg.norm(alone[name]), name


def test_gradients_have_one_order_on_all_ranks(ends: dict[str, str]) -> None:
    """Their norm is summed in that order, and rounding would let ranks part: found with four."""
    models = [kv.load(ends[role]) for role in ("source", "target")]
    config = make_config(*models, TrainingPlan())
    made = MLXTranslator.from_arrays(config, random_maps(config))
    names = list(made.tensors)
    made.learn({name: made.tensors[name] for name in reversed(names)})
    assert made.gather(Group(1, 2))
    assert list(made.gradients) == names
    for name, tensor in made.tensors.items():
        assert np.array_equal(np.array(made.gradients[name]), np.array(tensor))
