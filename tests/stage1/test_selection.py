"""The choice of source layers through ``fit``: files, refusals, kinds of attention."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from tests.support import tiny


def data(count: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(tuple(rng.integers(5, 280, 90).tolist()), tuple(rng.integers(5, 280, 7).tolist()))
        for _ in range(count)
    ]


def test_chosen_layers_under_other_norms(models: dict[str, LanguageModel]) -> None:
    """The maps are those of the same assignment given explicitly; little memory changes nothing."""
    source, target, samples = models["dense"], models["moe"], data(3)
    chosen = kv.fit(source, target, samples, assignment="r2", nu=2, norm="attention")
    given = kv.fit(
        source, target, iter(samples), assignment=chosen.config.assignment, norm="attention",
        memory=1,
    )  # fmt: skip
    a, b = chosen.to_weights().arrays, given.to_weights().arrays
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert given.config.provenance["assignment"] == "explicit"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assignment": "best"}, "assignment is 'best'; it must be relative_depth, r2 or greedy"),
        ({"assignment": "r2", "nu": 4}, "nu is 4; it must be 1 to 3"),
        ({"assignment": Assignment(((0,),), ((0,),))}, "assignment.keys has 1 lists for 4 target"),
        (
            {"assignment": Assignment(((9,),) * 4, ((0,),) * 4)},
            "expected distinct layers, 0 to 2",
        ),
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
