"""A fit that several ranks of ``mlx.launch`` share, beside one process that makes all of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import hybrid_models, rank_jobs, tiny, two_tokenizers
from tests.support.ranks import launched, shared
from tests.support.two_tokenizers import TALK

MODULE = ("-m", "tests.support.rank_jobs")
TEXTS = [
    "The ferryman of the long river asks who pays. " * 3, "One and 23 is 24, is it not? " * 4,
    "The money is in the house, and the house is theirs. " * 3, "Summarise this, passenger. " * 5,
    "An unbelievably long prefix, and then another one. " * 3,
]  # fmt: skip


def job(folder: Path, count: int, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank found in each case."""
    (folder / "job.json").write_text(json.dumps({"folder": str(folder), "cases": cases}))
    done = shared(count, *MODULE, str(folder / "job.json"))
    assert done.returncode == 0, done.stdout[-2000:]
    return [
        [dict(np.load(folder / f"{case['name']}-{rank}.npz")) for rank in range(count)]
        for case in cases
    ]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("fits")
    make: Callable[..., Path] = tiny.write_tiny_model
    small = {"layers": 3, "kv_heads": 1, "head_dim": 16}
    ends = {
        "plain": [make(root / "a", "qwen3", seed=1, **small),
                  make(root / "b", "qwen3_moe", seed=2, **{**small, "layers": 4})],
        "heads": [make(root / "c", "qwen3", seed=3, **{**small, "kv_heads": 2}),
                  make(root / "d", "qwen3", seed=4, **{**small, "kv_heads": 4})],
        "latent": [make(root / name, "deepseek_v3", seed=5 + n, **{**small, "kv_heads": 4})
                   for n, name in enumerate("ef")],
        "hybrid": [hybrid_models.write_hybrid_model(root / "i", "qwen3_5", num_hidden_layers=4),
                   hybrid_models.write_hybrid_model(root / "j", "qwen3_5", seed=2,
                                                    num_hidden_layers=4)],
        "two": [two_tokenizers.write_qwen(root / "g", **small),
                two_tokenizers.write_mistral(root / "h", **{**small, "layers": 2})],
    }  # fmt: skip
    talks = [{"text": text} for text in TEXTS] + [{"messages": TALK[:3]}]
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "plain", {}),
        ("ridge", "plain", {"ridge": 1e-3, "nu": 2}),
        ("attention", "plain", {"norm": "attention"}),
        ("passes", "plain", {"norm": "sink_8", "memory": 20_000}),
        ("chosen", "plain", {"assignment": "r2", "nu": 2, "memory": 40_000}),
        ("chosen twice", "plain", {"assignment": "greedy", "nu": 2, "norm": "attention"}),
        ("head-wise", "heads", {"head_mixing": False}),
        ("latent", "latent", {}),
        ("states", "hybrid", {"state_maps": True, "memory": 200_000}),
        ("two tokenizers", "two", {"ridge": 1e-3}),
        ("one sample", "plain", {}),
    ]
    return [
        {
            "name": name, "work": "fit", "source": str(ends[pair][0]),
            "target": str(ends[pair][1]), "options": options,
            "records": talks if pair == "two" else None,
            "samples": 1 if name == "one sample" else 7,
        }
        for name, pair, options in ways
    ]  # fmt: skip


def test_ranks_make_the_fit_of_one_process(cases: list[dict[str, Any]], tmp_path: Path) -> None:
    """Sums to 1e-9, whatever is fitted; all ranks have the same maps to the last bit."""
    talk = {"name": "talk", "work": "talk"}
    count = 2
    said, *found = job(tmp_path, count, [talk, *cases])
    _check_talk(said)
    for case, every in zip(cases, found, strict=True):
        alone = rank_jobs.fit(case)
        for own in every:
            assert set(own) == set(alone), case["name"]
            for name, array in alone.items():
                assert name == "told" or np.array_equal(own[name], every[0][name]), case["name"]
                if name.startswith("weights/"):
                    bound = 1e-6
                elif name in ("counts", "reads", "told"):
                    assert np.array_equal(own[name], array) or name == "told", (case["name"], name)
                    continue
                else:
                    bound = 1e-9
                error = np.linalg.norm(own[name] - array) / np.linalg.norm(array)
                assert error <= bound, (case["name"], name, error)
        sums = [name for name in alone if "/xx/" in name]
        assert sums and alone["counts"][0] >= case["samples"] - 1
        # The first rank tells of all samples.
        assert every[0]["told"][0] >= alone["told"][0] - 1 >= 0
        if case["name"] == "plain":  # of four layers' keys and values, which read three, 16 wide
            tiles = 2 * (3 * 16 * 16 + 4 * (16 * 16 + 16))
            assert [own["told"][1] for own in every] == [8 * tiles] * count


def _check_talk(every: list[dict[str, Any]]) -> None:
    """Against what each rank gives, added up here in another order."""
    count = len(every)
    packs = [
        sum(rank_jobs.given(rank, n) for rank in reversed(range(count))) for n in (5, 30, 1, 8)
    ]
    for rank, own in enumerate(every):
        assert own["rank"].tolist() == [rank, count]
        assert np.abs(own["packs"] - np.concatenate(packs)).max() < 1e-14
        assert np.array_equal(own["packs"], every[0]["packs"])
        assert own["lengths"].tolist() == [70_000 * r for r in range(count)]
        assert np.array_equal(own["arrays"], [rank_jobs.given(r, 3) for r in range(count)])
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
