"""Weights that the format allows and no training makes: refused by import, load and verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.store.importing import import_translator
from tests.support.translator_folders import LAYOUTS, TENSORS, arrays_of, config_json, to_config

CASES: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray], str]] = {
    "huge": ("mixing", "values.1.weight", lambda a: a * 1e6, "expected at most 10000"),
    "one huge": ("mixing", "keys.0.weight", lambda a: np.where(a == a.max(), -2e4, a), "2e+04"),
    "zero map": ("mixing", "keys.1.weight", np.zeros_like, "keys.1.weight is all zero"),
    "zero MLP": ("mlp-gated", "keys.1.w2", np.zeros_like, "keys.1.w2 is all zero"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "change", "text"), CASES.values(), ids=CASES)
def test_what_no_training_makes(
    tmp_path: Path, store: Path, name: str, tensor: str, change: Callable, text: str
) -> None:
    arrays = arrays_of(LAYOUTS[name])
    arrays[tensor] = np.ascontiguousarray(change(arrays[tensor]), np.float32)
    config = to_config(config_json(LAYOUTS[name]))
    folder = translator_folder.write(tmp_path / "t", config, Weights("float32", arrays))
    for use in (import_translator, kv.load_translator):
        with pytest.raises(kv.MalformedTranslatorError) as caught:
            use(str(folder))
        assert text in str(caught.value) and str(folder / TENSORS) in str(caught.value)
    assert not store.exists()


def test_what_a_training_does_make(tmp_path: Path) -> None:
    """A gate at its largest, an MLP beside a linear map that adds nothing yet."""
    name = "linear-mlp-head-wise"
    arrays = arrays_of(LAYOUTS[name])
    arrays |= {n: np.zeros_like(a) for n, a in arrays.items() if n.endswith((".w2", ".b2"))}
    config = to_config(config_json(LAYOUTS[name]))
    translator_folder.write(tmp_path / "t", config, Weights("float32", arrays))
    kv.load_translator(tmp_path / "t")
