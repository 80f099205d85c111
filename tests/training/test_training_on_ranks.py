"""A training on MLX that several ranks of ``mlx.launch`` share, beside one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.group import Group
from kvlingo_mlx.training.initial import drawn
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from tests.support import rank_jobs, tiny
from tests.support.ranks import launched, launching, shared

ALL = "KVLINGO_EXAMPLES" in os.environ
BY_HAND = pytest.mark.skipif(not ALL, reason="by hand: every process takes seconds to start")
MODULE = ("-m", "tests.support.rank_jobs")
STEPS = {"steps": 20, "batch": 3, "learning_rates": [1e-2], "validate_every": 5}
SHORT = {"steps": 4, "batch": 3, "learning_rates": [1e-2, 3e-3], "validate_every": 2}
Case = dict[str, Any]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("trained")
    shape = {"layers": 3, "kv_heads": 1, "head_dim": 16}
    folders = [
        tiny.write_tiny_model(root / n, "qwen3", seed=s, **shape) for s, n in enumerate("ab")
    ]
    return dict(zip(("source", "target"), map(str, folders), strict=True))


def case(ends: dict[str, str], folder: Path, name: str, recipe: Case, **more: Any) -> Case:
    out = str(folder / "out" / name)
    return {"name": name, "work": "training", **ends, "out": out, "recipe": recipe, **more}


def start(folder: Path, count: int, cases: list[Case]) -> subprocess.CompletedProcess[str]:
    (folder / "job.json").write_text(json.dumps({"folder": str(folder), "cases": cases}))
    return shared(count, *MODULE, str(folder / "job.json"))


def found(folder: Path, count: int, cases: list[Case]) -> list[dict[str, Any]]:
    """What the first rank found in each case."""
    done = start(folder, count, cases)
    assert done.returncode == 0, done.stdout[-2000:]
    return [dict(np.load(folder / f"{each['name']}-0.npz")) for each in cases]


def check(own: dict[str, Any], alone: dict[str, Any], bound: float = 1e-4) -> None:
    """The same curve, which moved, and nearly the same maps."""
    assert set(own) == set(alone)
    for name in ("held_out", "loss"):
        assert np.nanmax(np.abs(own[name] / alone[name] - 1)) < bound, name
    assert np.nanmax(np.abs(own["held_out"][1:] / own["held_out"][0] - 1)) > 10 * bound
    for name in (name for name in alone if "weights/" in name):
        assert np.linalg.norm(own[name] - alone[name]) < 1e-3 * np.linalg.norm(alone[name]), name


def test_ranks_train_as_one_process(ends: dict[str, str], tmp_path: Path) -> None:
    """Twenty steps to 1e-4, with files on the first rank alone.

    A batch of three leaves one of two ranks more to do.
    """
    whole = case(ends, tmp_path, "whole", STEPS, apart=True)
    (first,) = found(tmp_path, 2, [whole])
    check(first, rank_jobs.training({**whole, "out": str(tmp_path / "alone")}))
    assert not np.load(tmp_path / "whole-1.npz")["wrote"]


@BY_HAND
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_kind_of_training(ends: dict[str, str], tmp_path: Path, count: int) -> None:
    """Of three ranks and four, one has no conversation of a batch, or is often without one."""
    plans: dict[str, Case] = {
        "two rates": {}, "mlp": {"kind": "mlp", "hidden": 6}, "mixed": {"norm": "sink_8"},
        "chosen": {"assignment": "r2", "nu": 2}, "stage 1": {"head_mixing": False},
    }  # fmt: skip
    cases = [case(ends, tmp_path, name, SHORT, plan=plan) for name, plan in plans.items()]
    cases.append(case(ends, tmp_path, "sweep", {**SHORT, "learning_rates": [1e-3, 1e-2, 1e-1],
                                                "sweep": True}))  # fmt: skip
    cases.append(case(ends, tmp_path, "by time", {**SHORT, "steps": 100, "seconds": 2.0}))
    for each, own in zip(cases, found(tmp_path, count, cases), strict=True):
        if each["name"] != "by time":
            check(own, rank_jobs.training({**each, "out": f"{each['out']}-alone"}))


@BY_HAND
def test_a_stopped_training_goes_on_with_other_ranks(ends: dict[str, str], tmp_path: Path) -> None:
    """In turn by two, one, three and two processes; each has what the first one kept."""
    recipe = {**STEPS, "steps": 16}
    each = case(ends, tmp_path, "t", recipe, keep_every=0.0, apart=True)
    alone = rank_jobs.training({**each, "out": str(tmp_path / "alone")})
    for count, stop in ((2, [1, 2]), (1, [0, 9]), (3, [2, 6]), (2, None)):
        now = {**each, "stop": stop}
        if count == 1:
            own = rank_jobs.training(now)
        else:
            (own,) = found(tmp_path, count, [now])
        assert ("stopped" in own) == (stop is not None)
    check(own, alone)


@BY_HAND
def test_ranks_that_part_are_told(ends: dict[str, str], tmp_path: Path) -> None:
    """Other steps on one rank; other data; other settings than the kept work's."""
    each = case(ends, tmp_path, "t", STEPS)
    done = start(tmp_path, 2, [{**each, "on": {"1": {"parts": True}}}])
    told = "rank 1 has another translator at step 5 than rank 0"
    assert done.stdout.count(told) == 2
    done = start(tmp_path, 2, [{**each, "on": {"1": {"data": "another"}}}])
    assert done.stdout.count("rank 1 has another data than rank 0") == 2
    done = start(tmp_path, 2, [{**each, "data": "another"}])
    assert done.stdout.count("holds a run with other settings") == 1
    shutil.rmtree(f"{each['out']}.partial")


@BY_HAND
def test_the_verb_and_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches all; the same command goes on, and the first rank reports."""
    record = {"messages": [{"role": "user", "content": "Who is there? " * 9},
                           {"role": "assistant", "content": "Nobody but you and me."}]}  # fmt: skip
    lines = [json.dumps({"messages": [{**record["messages"][0], "content": f"{n} who? " * 20},
                                      record["messages"][1]]}) for n in range(40)]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    words = ["train", "--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l", "--data",
             str(tmp_path / "data.jsonl"), "--out", str(out), "--batch-size", "2", "-c",
             "held_out=2", "-c", "val_every=2", "--steps", "40", "--lr", "1e-3", "--json",
             str(tmp_path / "r.json")]  # fmt: skip
    tool = launching(2, sys.executable, "-m", "kvlingo_mlx.cli")
    process = subprocess.Popen(
        [*tool, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    kept = tmp_path / "out.partial" / "stage2.safetensors"
    while not kept.exists():
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.2)
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=300)
    while subprocess.run(["pgrep", "-f", str(out)], capture_output=True).stdout:
        assert time.monotonic() - begun < 300
        time.sleep(0.2)
    assert kept.exists()
    done = launched(2, sys.executable, "-m", "kvlingo_mlx.cli", *words)
    assert "exited with code" not in done.stdout + done.stderr, done.stderr[-2000:]
    assert done.stdout.count("wrote") == 1 and (out / "translator_config.json").exists()
    assert len((tmp_path / "out.log.jsonl").read_text().splitlines()) == 21
    assert len((tmp_path / "r.json").read_text().splitlines()) == 1


def test_gradients_have_one_order_on_all_ranks(ends: dict[str, str]) -> None:
    """Their norm is summed in that order, and rounding would let ranks part: found with four."""
    models = [kv.load(ends[role]) for role in ("source", "target")]
    config = make_config(*models, TrainingPlan())
    made = MLXTranslator.from_arrays(config, drawn(config))
    names = list(made.tensors)
    made.learn({name: made.tensors[name] for name in reversed(names)})
    assert made.gather(Group(1, 2))
    assert list(made.gradients) == names
    for name, tensor in made.tensors.items():
        assert np.array_equal(np.array(made.gradients[name]), np.array(tensor))
