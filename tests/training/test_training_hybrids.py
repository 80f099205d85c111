"""Trainings into hybrids, by the front door: the loss falls, and an interrupted one goes on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import kvlingo_mlx as kv
from kvlingo_mlx import families
from kvlingo_mlx.cli import run
from kvlingo_mlx.cuda.families import family_of
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.recurrent import Recurrent
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from kvlingo_mlx.training.runtime import pair_of
from tests.support import hybrid_models, trainings

TINY = {
    "qwen3_5": ("qwen3_5", {"num_hidden_layers": 4}),
    "other": ("qwen3_5", {"num_hidden_layers": 4, "seed": 3}),
    "nemotron_h": ("nemotron_h", {}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "lfm2": ("lfm2", {}),
    "other lfm2": ("lfm2", {"seed": 2}),
}
PAIRS = ("qwen3_5", "other"), ("nemotron_h", "granitemoehybrid"), ("lfm2", "other lfm2")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    root, write = tmp_path_factory.mktemp("hybrids"), hybrid_models.write_hybrid_model
    return {name: kv.load(write(root / name, kind, **m)) for name, (kind, m) in TINY.items()}


def curve(out: Path) -> list[dict[str, Any]]:
    return trainings.log_of(out.with_name(f"{out.name}.log.jsonl"))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_loss_falls(
    hybrids: dict[str, LanguageModel], tmp_path: Path, pair: tuple[str, str]
) -> None:
    """Of held-out conversations, and the translator that was kept is the best one."""
    stream, rate = trainings.Random(different=2), 3e-4 if pair[1] == "other" else 1e-3
    trainings.training(hybrids, tmp_path / "t", (rate,), pair=pair, stream=stream).run()
    losses = [line["held_out"][0] for line in curve(tmp_path / "t")]
    assert len(losses) == 4 and min(losses) < 0.7 * losses[0]
    source, target = (hybrids[name] for name in pair)
    kept = kv.load_translator(tmp_path / "t")
    found = [trainings.device_kl(source, target, kept, sample) for sample in stream.held_out(2)]
    assert np.mean(found) < 0.8 * losses[0]  # decoded by mlx-lm's own recurrences


def test_an_interrupted_training_has_the_same_curve(
    hybrids: dict[str, LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two rates, above a native recurrent layer; and the same maps, bit by bit."""
    options: dict[str, Any] = {
        "pair": PAIRS[1],
        "native_layers": 1,
        "stream": trainings.Random(different=2),
    }
    rates, outs = (1e-3, 3e-4), [tmp_path / "whole", tmp_path / "cut"]
    trainings.training(hybrids, outs[0], rates, **options).run()
    with monkeypatch.context() as patch:
        trainings.die_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            trainings.training(hybrids, outs[1], rates, keep_every=0.0, **options).run()
    steps: list[int] = []
    trainings.training(hybrids, outs[1], rates, seen=steps, **options).run()
    assert steps == [4, 5, 6]
    assert curve(outs[0]) == curve(outs[1])
    whole, cut = (translator_folder.read(out)[1].arrays for out in outs)
    assert all(np.array_equal(array, cut[name]) for name, array in whole.items())


def test_reconstruction(hybrids: dict[str, LanguageModel]) -> None:
    """The squared error of a recurrence's inputs, by hand, and a gradient for each map."""
    source, target = (hybrids[name] for name in PAIRS[1])
    pair, sample = pair_of(source, target), trainings.Random().sample(0)
    config = make_config(source, target, TrainingPlan())
    made = pair.trainable(config, trainings.random_arrays(config, 3))
    states = pair.states(sample, config.capture)
    found, wanted = pair.reconstruction(made, states, 1.0), 0.0
    for side in ("keys", "values"):
        for t, (s,) in enumerate(config.assignment.side(side)):
            x, y = (np.array(each.side(side)[n][0]) for each, n in zip(states, (s, t), strict=True))
            error = x @ made.arrays()[f"{side}.{t}.weight"].T - y
            if f"{side}.{t}.bias" in made.tensors:
                error = error + made.arrays()[f"{side}.{t}.bias"]
            wanted += float(np.square(error, dtype=np.float64).sum())
    assert found == pytest.approx(wanted, rel=1e-4)
    assert all(np.abs(np.array(each)).max() > 0 for each in made.gradients.values())
    assert set(made.gradients) == set(made.tensors)


def test_pytorch_refuses_all_of_them(
    hybrids: dict[str, LanguageModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line that names the runtime that trains them, before anything is read."""
    known = {name: families.family_of(name) for name in families.known_families()}
    hybrid = [name for name, row in known.items() if isinstance(row, Recurrent)]
    for name in (*hybrid, "qwen3_5_text"):
        with pytest.raises(UnsupportedModelError, match=f"'{name}' cannot be .*; --device mlx"):
            family_of(name)
    assert len(hybrid) > 5
    source, target = (str(hybrids[name].path) for name in PAIRS[2])
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps({"messages": chat}) for chat in lookback(20)))
    line = ["train", "--source", source, "--target", target, "--data", str(data)]
    assert run([*line, "--out", str(tmp_path / "t"), "--device", "cpu"]) == 2
    assert "'lfm2' cannot be trained on PyTorch; --device mlx" in capsys.readouterr().err
