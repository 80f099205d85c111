"""A room and its models may move: what was asked or trained is known again by its content."""

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("lm_eval")

from benchmarks.paper.commands import run
from benchmarks.paper.reproducing import decoding
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.evaluation.lineup import identity_of
from kvlingo_mlx.training.on_mlx.pair import MLXPair

NAMES = "tiny-qwen3-s", "tiny-qwen3-l"


def change(folder: Path, layer: int) -> None:
    """Other weights of an MLP, which no translator's check of its models looks at."""
    file = folder / "model.safetensors"
    arrays = load_file(file)
    arrays[f"model.layers.{layer}.mlp.down_proj.weight"] *= 1.01
    save_file(arrays, file, metadata={"format": "mlx"})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with models and, under the names of a run's own, the package's translators."""
    home = tmp_path / "here"
    for name, other in (NAMES, NAMES[::-1]):
        shutil.copytree(zoo(name), home / "models" / name)
        for form in ("mixing--42", "closed"):
            ends = f"{name}--{other}"
            shutil.copytree(TRANSLATORS / ends, home / "given" / f"{ends}--{form}")
    return home


def asked(home: Path) -> int:
    """How many answers a run of a label adds to its room."""
    kept = home / "room" / "tiny" / "responses.jsonl"
    before = len(kept.read_text().splitlines()) if kept.exists() else 0
    folders = {name: str(home / name) for name in ("models", "room")}
    words = [word for name, place in folders.items() for word in (f"--{name}", place)]
    words += ["--translators", str(home / "given"), "--items", "1", "--seeds", "1"]
    assert run(["reproduce", "tab:cothandoff", "--tiny", *words]) == 0
    return len(kept.read_text().splitlines()) - before


def test_nothing_is_asked_again_where_files_are_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three benchmarks by five readers, of whom two translators are one by content, and the traces.
    assert asked(home) == 18
    moved = home.rename(tmp_path / "there")
    monkeypatch.chdir(moved)
    change(moved / "models" / "tiny-qwen3-s", 3)  # which is the target
    # By relative paths, and not what the source said alone: answers and traces.
    assert asked(Path()) == 12


def test_each_runtime_answers_for_itself(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folders = [str(zoo(NAMES[0])), str(shutil.copytree(zoo(NAMES[0]), tmp_path / "copy"))]
    told = [[identity_of(decoding.load(at, f, f)[0]) for f in folders] for at in ("mlx", "cpu")]
    assert told[0][0] == told[0][1] != told[1][0] == told[1][1]


def test_a_translator_is_of_its_models_files(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MLXPair, "receipt", lambda *rest: None)  # which takes longer than the rest
    words = ["reproduce", "app:fig:norms", "--tiny", "--steps", "1", "--room"]
    assert run([*words, str(home / "room"), "--models", str(home / "models")]) == 0
    made = sorted((home / "room").rglob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in made]
    moved = home.rename(tmp_path / "there")
    again = [*words, str(moved / "room"), "--models", str(moved / "models")]
    assert run(again) == 0
    assert made and times == [
        file.stat().st_mtime_ns for file in sorted((moved / "room").rglob("*.safetensors"))
    ]
    assert run([word if word != "1" else "2" for word in again]) == 2  # of other steps
    change(moved / "models" / "tiny-qwen3-s", 0)
    assert run(again) == 2
    assert "was trained with other models" in capsys.readouterr().err
