"""What `train` writes every other verb takes for the same models, in whatever dtype it ran."""

import hashlib
import json
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
import safetensors

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.evaluation import verification
from kvlingo_mlx.loading.grading import Agreement, Receipt
from tests.support import tiny
from tests.support.fixtures import Patch, Printed
from tests.support.opened import quantised
from tests.support.translator_folders import exact

DTYPES = ("float32", "bfloat16", "float16")
SEEDS = {"source": 1, "target": 2}
CONFIG = "translator_config.json"


def written(root: Path, role: str, stored: str) -> Path:
    """A tiny model whose files hold a dtype, or 4 bits."""
    dtype = stored if stored in DTYPES else "float32"
    folder = tiny.write_tiny_model(
        root / role, "qwen3", seed=SEEDS[role], layers=2, kv_heads=2, head_dim=32, dtype=dtype
    )
    return folder if stored in DTYPES else quantised(kv.load(folder), root / f"{role}-few").path


def stored_norms(folder: Path) -> str:
    """The fingerprint by the format's page: NumPy alone."""
    (file,) = folder.glob("model*.safetensors")
    kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    norms = {}
    for name, entry in safetensors.deserialize(file.read_bytes()):
        if name.endswith("norm.weight"):
            dtype = kinds[entry["dtype"]]
            bits = np.uint16 if dtype == "bfloat16" else dtype
            norms[name[:-7]] = exact(np.frombuffer(entry["data"], bits), dtype)
    assert len(norms) == 9
    digest = hashlib.sha256()
    for name in sorted(norms):
        digest.update(norms[name].astype("<f4").tobytes())
    return digest.hexdigest()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [
        {"messages": [{"role": "user", "content": f"I am Ann{n}, of house {n * 7}. And you?"},
                      {"role": "assistant", "content": f"House {n * 7} is a fine place, Ann{n}."}]}
        for n in range(40)
    ]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(autouse=True)
def nothing_decoded(monkeypatch: Patch) -> None:
    """Without the conversations that `verify` would decode."""
    found = Agreement(Receipt(0.03, 0.95, 0, 0.5), 8, 65)
    monkeypatch.setattr(verification, "agreement", lambda *_, **options: found)


def ends_of(source: Path, target: Path) -> list[str]:
    return ["--source", str(source), "--target", str(target)]


def uses(folder: Path, ends: list[str]) -> list[list[str]]:
    """The commands that a translator was made for."""
    words = ["--translator", str(folder), "--prompt", "hello there", "--max-tokens", "2"]
    return [
        ["import", str(folder), *ends, "--force"],
        ["verify", str(folder), *ends],
        ["generate", *ends, *words],
        ["list", *ends],
    ]


def fingerprints(folder: Path) -> list[str]:
    config = json.loads((folder / CONFIG).read_text())
    return [config[role]["fingerprint"]["norms"] for role in ("source", "target")]


@pytest.mark.parametrize(
    ("device", "stored", "more"),
    [
        ("cpu", "bfloat16", ()),
        *(("mlx", stored, ()) for stored in ("bfloat16", "4 bits")),
        ("mlx", "float32", ("--dtype", "bfloat16")),
    ],
)
def test_from_train_to_generate(
    tmp_path: Path, data: Path, capsys: Printed, device: str, stored: str, more: tuple[str, ...]
) -> None:
    """Nobody refuses it, and its fingerprints are those of the files."""
    if device == "cpu":
        pytest.importorskip("torch")
    models = [written(tmp_path, role, stored) for role in ("source", "target")]
    ends, out = ends_of(*models), tmp_path / "made"
    steps = ["--steps", "0", "--fit-samples", "4", "--data", str(data), "--out", str(out)]
    assert run(["train", *ends, *steps, "--device", device, *more]) == 0
    told = capsys.readouterr().err
    assert "held-out" not in told and "learning rate" not in told  # nothing is chosen
    assert fingerprints(out) == [stored_norms(folder) for folder in models]
    for command in uses(out, ends):
        assert run(command) == 0, command
        said = capsys.readouterr()
        assert "fingerprint" not in said.err
    assert out.name not in said.out and "source" in said.out  # `list` takes the imported one


def test_pytorch_refuses_4_bits_in_a_line(tmp_path: Path, data: Path, capsys: Printed) -> None:
    pytest.importorskip("torch")
    models = [written(tmp_path, role, "4 bits") for role in ("source", "target")]
    words = ["--steps", "0", "--data", str(data), "--out", str(tmp_path / "made")]
    assert run(["train", *ends_of(*models), *words, "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "4-bit weights of mlx-lm" in line
    assert "--device mlx" in line


def test_norms_that_a_user_rounded(tmp_path: Path) -> None:
    """A loaded model stays itself in another dtype; without its folder nothing can be said."""
    model = kv.load(written(tmp_path, "source", "float32"))
    model.model.set_dtype(mx.bfloat16)
    assert model.norms_fingerprint == stored_norms(model.path)
    assert kv.LanguageModel(model.model, model.tokenizer, model.config, "m").norms_fingerprint != (
        model.norms_fingerprint
    )
