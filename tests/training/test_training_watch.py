"""A training watches itself: what its curve says, and which of its steps is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.training.watch import complaints
from tests.support.trainings import die_after, log_of, training

Curve = list[dict[str, Any]]


def curve(held_out: list[float], train: list[float]) -> Curve:
    lines: Curve = [{"step": 0, "held_out": [held_out[0]]}]
    for index, (held, kl) in enumerate(zip(held_out[1:], train, strict=True), start=1):
        lines.append({"step": 250 * index, "held_out": [held], "train_kl": [kl]})
    return lines


HEALTHY = [0.5, 0.3, 0.2, 0.15, 0.14], [0.33, 0.22, 0.14, 0.13]


@pytest.mark.parametrize(
    ("held_out", "train", "name", "text"),
    [
        # The numbers of the fault that this was made for: loss to 0.006, held-out standing still.
        ([0.31, 0.30, 0.29, 0.30], [0.2, 0.03, 0.006], "by heart",
         "step 750: the KL on the training conversations, 0.0060, is far below that on held-out "
         "ones, 0.3000"),
        ([0.31, 0.30, 0.29], [0.25, 0.05], None, ""),  # one look alone may be chance
        ([0.5, 0.3, 0.31, 0.32, 0.3, 0.31], [0.3] * 5, "stalled",
         "has not fallen since step 250 (0.3000, now 0.3100)"),
        ([0.5, 0.6], [0.6], "worse", "0.6000, worse than the 0.5000"),
        *((HEALTHY[0][:n], HEALTHY[1][: max(0, n - 1)], None, "") for n in range(1, 6)),
    ],
)  # fmt: skip
def test_what_a_curve_is_complained_of(
    held_out: list[float], train: list[float], name: str | None, text: str
) -> None:
    found = complaints(curve(held_out, train))
    assert list(found) == ([] if name is None else [name])
    assert text in "".join(found.values()) and complaints([]) == {}


def test_the_leading_rate_is_judged() -> None:
    lines = [
        {"step": 0, "held_out": [0.5, 0.5]},
        {"step": 1, "held_out": [None, 0.4], "train_kl": [None, 0.35]},
        {"step": 2, "held_out": [math.inf, 0.3], "train_kl": [math.nan, 0.25]},
    ]
    assert complaints(lines) == {}
    lines[1]["train_kl"], lines[2]["train_kl"] = [0.3, 0.1], [0.3, 0.1]
    assert list(complaints(lines)) == ["by heart"]


WILD = (3.0,)  # a learning rate that ruins any translator


def test_the_best_step_is_kept_stage_1_included(
    torch_models: dict[str, TorchModel],
    tmp_path: Path,
) -> None:
    first = training(torch_models, tmp_path / "first", steps=0).run()
    said: list[str] = []
    out = training(torch_models, tmp_path / "t", WILD, warn=said.append).run()
    config, weights = translator_folder.read(out)
    facts, log = config.provenance, log_of(tmp_path / "t.log.jsonl")
    assert log[-1]["held_out"][0] > log[0]["held_out"][0], "it was ruined"
    assert (facts["best_step"], facts["held_out_kl"]) == (0, log[0]["held_out"][0])
    stage1 = translator_folder.read(first)[1].arrays
    assert all(np.array_equal(array, stage1[name]) for name, array in weights.arrays.items())
    assert any("worse than the" in text for text in said)
    assert facts["complaints"] and all(isinstance(text, str) for text in facts["complaints"])


def test_a_step_in_the_middle_is_kept_and_survives_a_kill(
    torch_models: dict[str, TorchModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two good steps, then the rate is raised until all is ruined, and the process killed."""
    from kvlingo_mlx.training.recipe import Recipe

    monkeypatch.setattr(Recipe, "rate_factor", lambda self, step: 1e-3 if step < 2 else 3000.0)
    options: dict[str, Any] = {"learning_rates": (1.0,)}
    whole = training(torch_models, tmp_path / "whole", **options).run()
    log = log_of(tmp_path / "whole.log.jsonl")
    values = [line["held_out"][0] for line in log]
    assert values.index(min(values)) == 1 and log[1]["step"] == 2
    assert translator_folder.read_config(whole).provenance["best_step"] == 2
    with monkeypatch.context() as patch:
        die_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            training(torch_models, tmp_path / "t", **options).run()
    rest = training(torch_models, tmp_path / "t", **options).run()
    kept = [translator_folder.read(folder)[1].arrays for folder in (whole, rest)]
    assert all(np.array_equal(array, kept[1][name]) for name, array in kept[0].items())
    lines = [json.loads(line) for line in (tmp_path / "t.log.jsonl").read_text().splitlines()]
    assert [line.get("train_kl") for line in lines] == [line.get("train_kl") for line in log]
