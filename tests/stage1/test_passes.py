"""Closed forms over several passes: against least squares on the raw states, in float64."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.models import capture
from kvlingo_mlx.stage1.closed_form import RIDGE
from kvlingo_mlx.stage1.passes import MEMORY, grouped
from kvlingo_mlx.tokenization.samples import Sample
from tests.support.fixtures import Folders, Models, Printed

CUT = 1e-4  # of the largest singular value: 1e-8 of the largest eigenvalue


def unexplained(x: np.ndarray, y: np.ndarray, ridge: float = 0.0) -> float:
    """The residual of a ridge fit on raw rows, by an extended least-squares problem."""
    rows = np.concatenate([x, np.sqrt(ridge) * np.eye(x.shape[1])])
    goal = np.concatenate([y, np.zeros((x.shape[1], y.shape[1]))])
    found = np.linalg.lstsq(rows, goal, rcond=0.0 if ridge else CUT)[0]
    return float(np.square(y - x @ found).sum() / np.square(y).sum())


def test_layers_are_those_of_a_plain_search(models: Models) -> None:
    """By R2 those that explain most alone, greedily the best beside those taken; in one pass over
    the data, and in many."""
    ends, samples, found = (models["narrow"], models["narrow_moe"]), data(8), {}
    states = [[capture.whole(end, s.prefix, "pre_norm") for s in samples] for end in ends]

    def rows(end: int, side: str, layer: int) -> np.ndarray:
        own = [np.array(each.side(side)[layer][0], np.float64) for each in states[end]]
        return np.concatenate(own)

    for method, memory in itertools.product(("r2", "greedy"), (MEMORY, 1)):
        made = kv.fit(*ends, [*samples, Sample((), (7,))], assignment=method, nu=2, memory=memory)
        found[method] = made.config.assignment
        for side in ("keys", "values"):
            xs = [rows(0, side, i) for i in range(len(ends[0].attentions))]
            mean = sum(np.square(x).sum() for x in xs) / sum(x.shape[1] for x in xs)
            for t, chosen in enumerate(found[method].side(side)):
                y, taken = rows(1, side, t), list[int]()
                for _ in range(2):
                    own: Mapping[int, float] = {
                        i: unexplained(x, y) if method == "r2" else unexplained(
                            np.concatenate([xs[j] for j in [*taken, i]], 1), y, RIDGE * mean)
                        for i, x in enumerate(xs) if i not in taken
                    }  # fmt: skip
                    taken.append(min(own, key=own.__getitem__))
                assert chosen == tuple(sorted(taken))
    assert found["r2"] != found["greedy"]


@pytest.mark.parametrize("memory", [1, 100, 1000])
def test_groups_fit_into_memory(memory: int) -> None:
    """All items in their order; a group is one item, or small enough, and has no room for more."""
    sizes = np.random.default_rng(memory).integers(1, 90, 60).tolist()
    shared = 20  # which each group takes once

    def size(item: int, before: Sequence[int]) -> int:
        return sizes[item] + (0 if before else shared)

    found = grouped(range(60), size, memory)
    assert [item for group in found for item in group] == list(range(60))
    taken = [shared + sum(sizes[item] for item in group) for group in found]
    for group, held, after in zip(found, taken, [*found[1:], [0]], strict=True):
        assert held <= memory or len(group) == 1
        assert held + sizes[after[0]] > memory or group is found[-1]


def data(count: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(tuple(rng.integers(5, 280, 90).tolist()), tuple(rng.integers(5, 280, 7).tolist()))
        for _ in range(count)
    ]


def test_chosen_layers_under_other_norms(models: Models) -> None:
    """The maps are those of the same assignment given explicitly; little memory changes nothing."""
    source, target, samples = models["dense"], models["moe"], data(3)
    chosen = kv.fit(source, target, samples, assignment="r2", nu=2, norm="attention")
    reads: list[tuple[int, int]] = []
    given = kv.fit(
        source, target, iter(samples), assignment=chosen.config.assignment, norm="attention",
        memory=1, progress=lambda *numbers: reads.append(numbers),
    )  # fmt: skip
    assert len(reads) > 3 and all(done <= total for done, total in reads)
    assert chosen.config.provenance["samples"] == given.config.provenance["samples"] == 3
    a, b = chosen.to_weights().arrays, given.to_weights().arrays
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert given.config.provenance["assignment"] == "explicit"


def test_the_verb_takes_a_file(folders: Folders, tmp_path: Path, capsys: Printed) -> None:
    records, file = tmp_path / "d.jsonl", tmp_path / "a.json"
    records.write_text(json.dumps({"text": "the you and use is of an other " * 25}) + "\n")
    lists = {"keys": [[2], [0], [1], [0]], "values": [[0, 1], [1, 2], [0, 2], [2, 1]]}
    file.write_text(json.dumps(lists))
    arguments = ["fit", "--source", str(folders["dense"]), "--target", str(folders["moe"]),
                 "--data", str(records), "--out", str(tmp_path / "t")]  # fmt: skip
    assert run([*arguments, "--assignment", str(file)]) == 0
    assert kv.load_translator(tmp_path / "t").config.assignment.to_json() == lists
    file.write_text('{"keys": [[0]]}')
    assert run([*arguments[:-1], str(tmp_path / "u"), "--assignment", str(file)]) == 2
    assert "a.json" in capsys.readouterr().err and not (tmp_path / "u").exists()
    assert run([*arguments[:-1], str(tmp_path / "u"), "--assignment", "absent.json"]) == 2
    assert "--assignment absent.json cannot be read" in capsys.readouterr().err
    assert run([*arguments[:-1], str(tmp_path / "u"), "--memory-gb", "0"]) == 2
    assert "--memory-gb is 0" in capsys.readouterr().err


def test_attention_kinds_stay_apart(families: Models) -> None:
    model = families["gemma3"]
    found = kv.fit(model, model, data(3), assignment="greedy", nu=3).config.assignment
    assert found.keys[2] == found.values[2] == (2,)  # the only global layer
    for side in (found.keys, found.values):
        assert all(len(side[t]) == 3 and 2 not in side[t] for t in (0, 1, 3, 4))
