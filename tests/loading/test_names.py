"""What a loaded model is called, and what is said of a name that is almost one."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny


def test_a_model_is_shown_in_a_line(
    models: dict[str, LanguageModel], quantised_models: dict[str, LanguageModel], tmp_path: Path
) -> None:
    """What one wants to know of it; the numbers are those with which it was written."""
    options = {"seed": 1, "layers": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float16"}
    folder = tiny.write_tiny_model(tmp_path / "m", "gemma3_text", **options)
    expected = "gemma3_text, 2 cache layers, KV heads 1 x 16, float16, context 512>"
    assert repr(kv.load(folder)) == f"<LanguageModel {folder}: {expected}"
    assert ", 4 bits, " in repr(quantised_models["dense"])
    assert all("\n" not in repr(m) and len(repr(m)) < 250 for m in models.values())


@pytest.mark.parametrize("name", ["tiny_qwen3_s", "tiny-qwen-s", "Tiny-qwen3-s"])
def test_an_embedded_models_name_misspelt(name: str) -> None:
    with pytest.raises(kv.MissingModelError, match=r"did you mean tiny-qwen3-s\?\); give a"):
        kv.load(name)


def test_a_folders_name_misspelt(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder beside it that holds a model is named, and no other one."""
    right = tmp_path / "models" / "my-qwen-4b"
    right.parent.mkdir()
    right.symlink_to(folders["dense"])
    (right.parent / "my_qwen_4c").mkdir()  # empty
    with pytest.raises(kv.MissingModelError, match=rf"did you mean {right}\?\); give"):
        kv.load(right.parent / "my_qwen_4b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(kv.MissingModelError, match=r"did you mean models/my-qwen-4b\?\), and"):
        kv.load("models/my-qwen-4")  # it could be a Hub id as well
    for far in ("models/entirely-else", "entirely-else"):
        with pytest.raises(kv.MissingModelError) as caught:
            kv.load(far)
        assert "did you mean" not in str(caught.value)
