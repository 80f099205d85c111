"""Trainings into hybrids, of inputs and of states: gradients, the front door, what is refused."""

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
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.runtime import pair_of
from tests.support import hybrid_models, trainings
from tests.support.fixtures import Models, Printed

WIDER = {"linear_key_head_dim": 12, "linear_num_value_heads": 6, "linear_value_head_dim": 20}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {"num_hidden_layers": 4}),
    "wider": ("qwen3_5", {"num_hidden_layers": 4, **WIDER}),
    "nemotron_h": ("nemotron_h", {}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "lfm2": ("lfm2", {}),
    "other lfm2": ("lfm2", {"seed": 2}),
}
DELTA, MAMBA, CONVOLUTIONS = (
    ("qwen3_5", "wider"), ("nemotron_h", "granitemoehybrid"), ("lfm2", "other lfm2"),
)  # fmt: skip


@pytest.fixture(scope="module")
def hybrids(root: Path) -> Models:
    return {
        name: kv.load(hybrid_models.write_hybrid_model(root / name, kind, **m))
        for name, (kind, m) in TINY.items()
    }


@pytest.mark.parametrize(("nu", "native"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("pair", [DELTA, MAMBA], ids=str)
def test_gradients_of_maps_of_states(
    hybrids: Models, pair: tuple[str, str], nu: int, native: int
) -> None:
    """Of every tensor; what the maps make of states is held to the page in test_mapped_states."""
    plan = TrainingPlan(nu=nu, state_maps=True, native_layers=native)
    both, sample = pair_of(*(hybrids[name] for name in pair)), trainings.Random(60, 9).sample(1)
    with in_chunks():
        trainings.check_gradients(both, sample, plan, tolerance=2e-3)


@pytest.mark.parametrize(
    ("pair", "rate", "options"),
    [
        (DELTA, 3e-4, {}),
        (MAMBA, 1e-3, {}),
        (CONVOLUTIONS, 1e-3, {}),
        (DELTA, 3e-3, {"state_maps": True, "nu": 2}),
        (MAMBA, 3e-3, {"state_maps": True, "nu": 2, "native_layers": 1}),
    ],
    ids=str,
)
def test_the_loss_falls(
    hybrids: Models, tmp_path: Path, pair: tuple[str, str], rate: float,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Of held-out conversations; the best translator is kept, by mlx-lm's own recurrences."""
    stream = trainings.Random(different=2)
    trainings.training(hybrids, tmp_path / "t", (rate,), pair=pair, stream=stream, **options).run()
    losses = [line["held_out"][0] for line in trainings.log_of(tmp_path / "t")]
    assert len(losses) == 4 and min(losses) < 0.8 * losses[0]
    kept = kv.load_translator(tmp_path / "t")
    assert kept.config.state_maps == bool(options)
    ends, native = [hybrids[name] for name in pair], kept.config.native_layers
    found = [trainings.device_kl(*ends, kept, sample, native) for sample in stream.held_out(3)]
    assert np.mean(found) == pytest.approx(min(losses), rel=0.01)


def test_the_verb_trains_maps_of_states(hybrids: Models, tmp_path: Path, capsys: Any) -> None:
    source, target = (hybrids[name] for name in DELTA)
    data = tmp_path / "chats.jsonl"
    talk = [{"role": "user", "content": "is it on? " * 9}, {"role": "assistant", "content": "yes"}]
    data.write_text("\n".join(json.dumps({"messages": talk}) for _ in range(30)))
    words = ["train", "--source", str(source.path), "--target", str(target.path), "--data",
             str(data), "-c", "state_maps=true", "--steps", "2", "--batch-size", "1", "-c",
             "held_out=2", "-c", "fit_samples=8", "-c", "val_every=2", "--device",
             "mlx"]  # fmt: skip
    assert run([*words, "--out", str(tmp_path / "t")]) == 0
    config = translator_folder.read_config(tmp_path / "t")
    assert config.state_maps and config.provenance["stage"] == 2
    assert run(["show", str(tmp_path / "t")]) == 0
    assert "recurrent states mapped" in " ".join(capsys.readouterr().out.split())
    assert run(["verify", str(tmp_path / "t")]) == 0


@pytest.mark.parametrize("native", [0, 2])
def test_mlps_have_no_closed_form_of_states(native: int) -> None:
    with pytest.raises(ValueError, match="maps of states .* a translator of kind mlp has none"):
        TrainingPlan(kind="mlp", state_maps=True, native_layers=native)
    TrainingPlan(kind="linear_mlp", state_maps=True)


def test_pytorch_refuses_all_of_them(hybrids: Models, tmp_path: Path, capsys: Printed) -> None:
    """In a line that names the runtime that trains them, before anything is read."""
    known = {name: families.family_of(name) for name in families.known_families()}
    hybrid = [name for name, row in known.items() if isinstance(row, Recurrent)]
    for name in (*hybrid, "qwen3_5_text"):
        with pytest.raises(UnsupportedModelError, match=f"'{name}' cannot be .*; --device mlx"):
            family_of(name)
    assert len(hybrid) > 5
    source, target = (str(hybrids[name].path) for name in CONVOLUTIONS)
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps({"messages": chat}) for chat in lookback(20)))
    line = ["train", "--source", source, "--target", target, "--data", str(data)]
    assert run([*line, "--out", str(tmp_path / "t"), "--device", "cpu"]) == 2
    assert "'lfm2' cannot be trained on PyTorch; --device mlx" in capsys.readouterr().err
