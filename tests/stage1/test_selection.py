"""Source layers chosen from data, against least squares on the raw states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.stage1 import passes
from kvlingo_mlx.stage1.selection import RIDGE, choose, r2_scores, residual
from kvlingo_mlx.stage1.tiles import Regression, Tiles, batches
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny

TOKENS = 400


def planted(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Five source layers and three target layers whose sources are known.

    Source 3 is source 2 with a little noise: alone it is the second best for target 1, beside
    source 2 it adds next to nothing.
    """
    rng = np.random.default_rng(seed)
    xs = [rng.standard_normal((TOKENS, width)) for width in (4, 5, 6, 6, 3)]
    xs[3] = xs[2] + 0.05 * rng.standard_normal(xs[2].shape)
    mix = [rng.standard_normal((x.shape[1], 7)) for x in xs]
    noise = 0.01 * rng.standard_normal((3, TOKENS, 7))
    ys = [
        xs[4] @ mix[4] + 0.3 * (xs[0] @ mix[0]) + noise[0],
        xs[2] @ mix[2] + 0.4 * (xs[1] @ mix[1]) + noise[1],
        xs[0] @ mix[0] + xs[1] @ mix[1] + noise[2],
    ]
    return xs, ys


def summed(xs: list[np.ndarray], ys: list[np.ndarray], weights: np.ndarray | None = None) -> Tiles:
    """The tiles of planted layers, whose states and maps are named by the numbers alone."""
    reads = tuple(("", i) for i in range(len(xs)))
    tiles = Tiles({str(t): Regression(reads, (("", t),)) for t in range(len(ys))})
    for span in (slice(0, 150), slice(150, TOKENS)):
        tiles.add(
            lambda state: xs[state[1]][span],  # noqa: B023
            lambda state: ys[state[1]][span],  # noqa: B023
            None if weights is None else weights[None, span],
        )
    return tiles


def chosen_layers(tiles: Tiles, method: str, nu: int) -> dict[int, tuple[int, ...]]:
    found = choose(tiles, method, nu)
    return {int(name): tuple(i for _, i in states) for name, states in found.items()}


CUT = 1e-4  # of the largest singular value: 1e-8 of the largest eigenvalue


def unexplained(x: np.ndarray, y: np.ndarray, ridge: float = 0.0) -> float:
    """The residual of a ridge fit on raw rows, by an extended least-squares problem."""
    rows = np.concatenate([x, np.sqrt(ridge) * np.eye(x.shape[1])])
    goal = np.concatenate([y, np.zeros((x.shape[1], y.shape[1]))])
    found = np.linalg.lstsq(rows, goal, rcond=0.0 if ridge else CUT)[0]
    return float(np.square(y - x @ found).sum() / np.square(y).sum())


def test_scores_are_those_of_single_fits() -> None:
    xs, ys = planted()
    for weights in (None, np.random.default_rng(1).uniform(0.5, 8, TOKENS)):
        root = np.ones(TOKENS) if weights is None else np.sqrt(weights)
        scores = r2_scores(summed(xs, ys, weights))
        for i, x in enumerate(xs):
            for t, y in enumerate(ys):
                expected = 1 - unexplained(root[:, None] * x, root[:, None] * y)
                assert scores[i, str(t)] == pytest.approx(expected, abs=1e-9)


def test_residuals_are_those_of_ridge_fits() -> None:
    xs, ys = planted()
    tiles = summed(xs, ys)
    for ridge in (1e-6, 50.0):
        for sources in ([0], [3, 1], [4, 2, 0]):
            x = np.concatenate([xs[i] for i in sources], axis=1)
            found = residual(tiles, "1", [("", i) for i in sources], ridge)
            assert found == pytest.approx(unexplained(x, ys[1], ridge), abs=1e-9)


def test_r2_keeps_twins_and_greedy_does_not() -> None:
    tiles = summed(*planted())
    assert chosen_layers(tiles, "r2", 2) == {0: (0, 4), 1: (2, 3), 2: (0, 1)}
    assert chosen_layers(tiles, "greedy", 2) == {0: (0, 4), 1: (1, 2), 2: (0, 1)}
    assert chosen_layers(tiles, "r2", 1) == chosen_layers(tiles, "greedy", 1)


def test_greedy_equals_a_plain_search() -> None:
    xs, ys = planted(seed=3)
    mean = sum(np.square(x).sum() for x in xs) / sum(x.shape[1] for x in xs)
    for t, chosen in chosen_layers(summed(xs, ys), "greedy", 3).items():
        taken: list[int] = []
        for _ in range(3):
            left = [i for i in range(len(xs)) if i not in taken]
            scores = {
                i: unexplained(np.concatenate([xs[s] for s in [*taken, i]], 1), ys[t], RIDGE * mean)
                for i in left
            }
            taken.append(min(scores, key=scores.__getitem__))
        assert chosen == tuple(sorted(taken))


def data(count: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(tuple(rng.integers(5, 280, 90).tolist()), tuple(rng.integers(5, 280, 7).tolist()))
        for _ in range(count)
    ]


def states(model: LanguageModel, samples: Sequence[Sample], side: str) -> list[np.ndarray]:
    """A side of every cache layer over all prefixes, (tokens, width), float64."""
    spans = [next(capture.prefill(model, s.prefix)).side(side) for s in samples]
    return [
        np.concatenate([np.array(span[i].astype(mx.float32))[0] for span in spans]).astype(float)
        for i in range(len(spans[0]))
    ]


@pytest.mark.parametrize("memory", [passes.MEMORY, 200_000])
@pytest.mark.parametrize("method", ["r2", "greedy"])
def test_fit_chooses_and_solves(models: dict[str, LanguageModel], method: str, memory: int) -> None:
    """One pass over the data or many, the maps are least squares of the layers chosen."""
    source, target, samples = models["dense"], models["moe"], data(4)
    seen: list[int] = []
    solved: list[tuple[int, int | None]] = []
    translator = kv.fit(
        source, target, samples, assignment=method, nu=2, memory=memory, ridge=0.0,
        progress=lambda done, total: seen.append(total),
        solving=lambda done, total: solved.append((done, total)),
    )  # fmt: skip
    maps = 2 * len(target.attentions)
    assert solved == [(number, maps) for number in range(1, maps + 1)]
    rounds = 1 if memory == passes.MEMORY else 2 * len(target.attentions)
    assert seen[0] == 4 * rounds
    assert translator.config.provenance["assignment"] == method
    weights = translator.to_weights().arrays
    for side in ("keys", "values"):
        xs, ys = (states(model, samples, side) for model in (source, target))
        alone = np.array([[unexplained(x, y) for x in xs] for y in ys])
        for t, chosen in enumerate(translator.config.assignment.side(side)):
            if method == "r2":
                assert set(chosen) == set(np.argsort(alone[t], kind="stable")[:2].tolist())
            else:
                best = int(alone[t].argmin())
                pairs = {i: unexplained(np.concatenate([xs[best], xs[i]], 1), ys[t])
                         for i in range(len(xs)) if i != best}  # fmt: skip
                assert set(chosen) == {best, min(pairs, key=pairs.__getitem__)}
            x = np.concatenate([xs[i] for i in chosen], axis=1)
            expected = np.linalg.lstsq(x, ys[t], rcond=CUT)[0].T
            found = weights[f"{side}.{t}.weight"]
            assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("norm", ["sink_8", "attention_mass"])
def test_chosen_layers_under_other_norms(models: dict[str, LanguageModel], norm: str) -> None:
    """The maps are those of the same assignment given explicitly."""
    source, target, samples = models["dense"], models["moe"], data(3)
    chosen = kv.fit(source, target, samples, assignment="r2", nu=2, norm=norm)
    given = kv.fit(source, target, samples, assignment=chosen.config.assignment, norm=norm)
    a, b = chosen.to_weights().arrays, given.to_weights().arrays
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)
    assert given.config.provenance["assignment"] == "explicit"


def test_little_memory_changes_nothing(models: dict[str, LanguageModel]) -> None:
    source, target, samples = models["dense"], models["moe"], data(3)
    totals: list[int | None] = []
    once = kv.fit(source, target, samples, nu=2)
    solved: list[int] = []
    often = kv.fit(source, target, iter(samples), nu=2, memory=1,
                   progress=lambda done, total: totals.append(total),
                   solving=lambda done, total: solved.append(done))  # fmt: skip
    assert solved == list(range(1, 2 * len(target.attentions) + 1))
    assert totals[-1] == 3 * 2 * len(target.attentions)
    a, b = once.to_weights().arrays, often.to_weights().arrays
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert once.config.provenance == often.config.provenance


def alive(batch: dict[str, Regression], width: int) -> int:
    """The bytes of all tiles of a batch, counted one by one."""
    pairs = {
        tuple(sorted((i, j))) for m in batch.values() for i in m.reads for j in m.reads
    }  # fmt: skip
    outputs = sum(len(m.reads) * len(m.writes) for m in batch.values())
    return 8 * width * width * (len(pairs) + outputs)


@pytest.mark.parametrize("nu", [1, 2, 36])
def test_the_papers_depths_fit_a_small_machine(nu: int) -> None:
    """36 layers of width 1024 on both sides: what is alive at once stays below the limit."""
    maps = {}
    for side in ("keys", "values"):
        for t in range(36):
            start = min(t, 36 - nu)
            reads = tuple((side, i) for i in range(start, start + nu))
            maps[f"{side}.{t}"] = Regression(reads, ((side, t),))
    found = batches(maps, lambda state: 1024, lambda state: 1024, passes.MEMORY)
    assert sorted(name for batch in found for name in batch) == sorted(maps)
    assert all(alive(batch, 1024) <= passes.MEMORY for batch in found)
    assert (len(found) == 1) == (alive(maps, 1024) <= passes.MEMORY) == (nu < 36)
    if nu == 36:  # half of the memory holds what lies between source layers, made once a side
        assert {name.split(".")[0] for name in found[0]} == {"keys"}
        assert all(len(batch) > 1 for batch in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assignment": "best"}, "assignment is 'best'; it must be relative_depth, r2 or greedy"),
        ({"assignment": "r2", "nu": 4}, "nu is 4; it must be 1 to 3"),
        ({"assignment": Assignment(((0,),), ((0,),))}, "assignment.keys has 1 lists for 4 target"),
        ({"assignment": Assignment(((9,),) * 4, ((0,),) * 4)}, "expected an integer 0 to 2"),
    ],
)
def test_bad_assignments(models: dict[str, LanguageModel], options: dict, message: str) -> None:
    with pytest.raises((ValueError, KVLingoError), match=message):
        kv.fit(models["dense"], models["moe"], data(1), **options)


def test_the_verb_takes_a_file(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_attention_kinds_stay_apart(tmp_path: Path) -> None:
    model_type, options = tiny.FAMILIES["gemma3"]
    model = kv.load(tiny.write_tiny_model(tmp_path / "g", model_type, **options))
    found = kv.fit(model, model, data(3), assignment="greedy", nu=3).config.assignment
    assert found.keys[2] == found.values[2] == (2,)  # the only global layer
    for side in (found.keys, found.values):
        assert all(len(side[t]) == 3 and 2 not in side[t] for t in (0, 1, 3, 4))
