"""Fits and a training that several ranks of ``mlx.launch`` share, beside one process alone."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.group import Group
from kvlingo_mlx.timing.random_maps import random_maps
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from tests.support import hybrid_models, rank_jobs, tiny, two_tokenizers
from tests.support.ranks import launched, shared
from tests.support.two_tokenizers import TALK

MODULE = ("-m", "tests.support.rank_jobs")
TEXTS = [
    "The ferryman of the long river asks who pays. " * 3, "One and 23 is 24, is it not? " * 4,
    "The money is in the house, and the house is theirs. " * 3, "Summarise this, passenger. " * 5,
    "An unbelievably long prefix, and then another one. " * 3,
]  # fmt: skip


STEPS = {"steps": 20, "batch": 3, "learning_rates": [1e-2], "validate_every": 5}
Case = dict[str, Any]
Found = list[dict[str, Any]]  # a rank each


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """What is fitted, trained and told, by name."""
    root = tmp_path_factory.mktemp("fits")
    make: Callable[..., Path] = tiny.write_tiny_model
    small = {"layers": 3, "kv_heads": 1, "head_dim": 16}
    ends = {
        "plain": [make(root / "a", "qwen3", seed=1, **small),
                  make(root / "b", "qwen3_moe", seed=2, **{**small, "layers": 4})],
        "heads": [make(root / "c", "qwen3", seed=3, **{**small, "kv_heads": 2}),
                  make(root / "d", "qwen3", seed=4, **{**small, "kv_heads": 4})],
        "hybrid": [hybrid_models.write_hybrid_model(root / "i", "qwen3_5", num_hidden_layers=4),
                   hybrid_models.write_hybrid_model(root / "j", "qwen3_5", seed=2,
                                                    num_hidden_layers=4)],
        "two": [two_tokenizers.write_qwen(root / "g", **small),
                two_tokenizers.write_mistral(root / "h", **{**small, "layers": 2})],
    }  # fmt: skip
    talks = [{"text": text} for text in TEXTS] + [{"messages": TALK[:3]}]
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "plain", {}),
        ("attention", "plain", {"norm": "attention"}),
        ("passes", "plain", {"norm": "sink_8", "memory": 20_000}),
        ("chosen", "plain", {"assignment": "r2", "nu": 2, "memory": 40_000}),
        ("chosen twice", "plain", {"assignment": "greedy", "nu": 2, "norm": "attention"}),
        ("head-wise", "heads", {"head_mixing": False}),
        ("states", "hybrid", {"state_maps": True, "memory": 200_000}),
        ("two tokenizers", "two", {"ridge": 1e-3}),
        ("one sample", "plain", {}),
    ]
    own, other = map(str, ends["heads"])
    out = str(root / "out" / "t")
    trained = {"work": "training", "source": own, "target": other, "recipe": STEPS, "out": out}
    return {
        "talk": {"name": "talk", "work": "talk"},
        "training": {"name": "training", **trained},
    } | {
        name: {
            "name": name, "work": "fit", "source": str(ends[pair][0]),
            "target": str(ends[pair][1]), "options": options,
            "records": talks if pair == "two" else None,
            "samples": 1 if name == "one sample" else 7,
        }
        for name, pair, options in ways
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What each of two ranks found in each case, by one launch."""
    folder = tmp_path_factory.mktemp("job")
    job = {"folder": str(folder), "cases": list(cases.values())}
    (folder / "job.json").write_text(json.dumps(job))
    done = shared(2, *MODULE, str(folder / "job.json"))
    assert done.returncode == 0, done.stdout[-2000:]
    return {
        name: [dict(np.load(folder / f"{name}-{rank}.npz")) for rank in range(2)] for name in cases
    }


def test_ranks_make_the_fit_of_one_process(cases: dict[str, Case], found: dict[str, Found]) -> None:
    """Sums to 1e-9, whatever is fitted; all ranks have the same maps to the last bit."""
    for name, case in cases.items():
        if case["work"] != "fit":
            continue
        alone, every = rank_jobs.fit(case), found[name]
        for own in every:
            assert set(own) == set(alone), name
            for part, array in alone.items():
                assert part == "told" or np.array_equal(own[part], every[0][part]), name
                if part in ("counts", "reads"):
                    assert np.array_equal(own[part], array), (name, part)
                elif part != "told":
                    bound = 1e-6 if part.startswith("weights/") else 1e-9
                    error = np.linalg.norm(own[part] - array) / np.linalg.norm(array)
                    assert error <= bound, (name, part, error)
        assert any("/xx/" in part for part in alone)
        assert alone["counts"][0] >= case["samples"] - 1
        # The first rank tells of all samples.
        assert every[0]["told"][0] >= alone["told"][0] - 1 >= 0
        if name == "plain":  # of four layers' keys and values, which read three, 16 wide
            tiles = 2 * (3 * (16 * 16 + 16) + 4 * (16 * 16 + 16))
            assert [own["told"][1] for own in every] == [8 * tiles] * 2


def test_ranks_train_as_one_process(
    cases: dict[str, Case], found: dict[str, Found], tmp_path: Path
) -> None:
    """Twenty steps: the same curve, which moved, and nearly the same maps, written by one rank.

    A batch of three leaves one of two ranks more to do.
    """
    own, other = found["training"]
    alone = rank_jobs.training({**cases["training"], "out": str(tmp_path / "alone")})
    assert set(own) == set(alone) and not other["wrote"]
    for name in ("held_out", "loss"):
        assert np.nanmax(np.abs(own[name] / alone[name] - 1)) < 1e-4, name
    assert np.nanmax(np.abs(own["held_out"][1:] / own["held_out"][0] - 1)) > 1e-3
    for name in (name for name in alone if "weights/" in name):
        assert np.linalg.norm(own[name] - alone[name]) < 1e-3 * np.linalg.norm(alone[name]), name


def test_gradients_have_one_order_on_all_ranks(cases: dict[str, Case]) -> None:
    """Their norm is summed in that order, and rounding would let ranks part: found with four."""
    models = [kv.load(cases["training"][role]) for role in ("source", "target")]
    config = make_config(*models, TrainingPlan())
    made = MLXTranslator.from_arrays(config, random_maps(config))
    names = list(made.tensors)
    made.learn({name: made.tensors[name] for name in reversed(names)})
    assert made.gather(Group(1, 2))
    assert list(made.gradients) == names
    for name, tensor in made.tensors.items():
        assert np.array_equal(np.array(made.gradients[name]), np.array(tensor))


def test_what_ranks_tell_one_another(found: dict[str, Found]) -> None:
    """Against what each rank gives, added up here in another order."""
    every = found["talk"]
    packs = [sum(rank_jobs.given(rank, n) for rank in (1, 0)) for n in (5, 30, 1, 8)]
    for rank, own in enumerate(every):
        assert own["rank"].tolist() == [rank, 2]
        assert np.abs(own["packs"] - np.concatenate(packs)).max() < 1e-14
        assert np.array_equal(own["packs"], every[0]["packs"])
        assert own["lengths"].tolist() == [0, 70_000]
        assert np.array_equal(own["arrays"], [rank_jobs.given(r, 3) for r in range(2)])
        assert own["first"].tolist() == [0, *rank_jobs.given(0, 4)]


@pytest.mark.parametrize("usable", [7, 0])
def test_records_that_cannot_be_read_are_skipped_by_all_ranks(tmp_path: Path, usable: int) -> None:
    """The verb: where none is left one line says so, and no rank waits for another."""
    shape = {"layers": 2, "kv_heads": 1, "head_dim": 16}
    ends = [tiny.write_tiny_model(tmp_path / n, "qwen3", seed=1, **shape) for n in "ab"]
    for folder in ends:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        refusal = "{%- if 'boom' in messages[0].content -%}{{ raise_exception('no') }}{%- endif -%}"
        config["chat_template"] = refusal + config["chat_template"]
        path.write_text(json.dumps(config))
    record = {"messages": [{"role": "user", "content": "a long question " * 30}]}
    wrong = {"messages": [{"role": "user", "content": "boom"}]}
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, [*[record] * usable, wrong])))
    words = ["fit", "--source", str(ends[0]), "--target", str(ends[1]), "--data", str(data)]
    words += ["--out", str(tmp_path / "out"), "--tokens", "9999"]  # more than there are
    verb = f"import sys\nfrom kvlingo_mlx.cli import run\nsys.exit(run({words!r}))\n"
    (tmp_path / "verb.py").write_text(verb)
    done = launched(2, sys.executable, str(tmp_path / "verb.py"))
    told = done.stdout + done.stderr
    assert told.count("error:") == (not usable) and (tmp_path / "out").exists() == bool(usable)
    assert ("1 record is skipped" if usable else "no record of data.jsonl can be used") in told
