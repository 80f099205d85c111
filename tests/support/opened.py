"""Models that are loaded, and copies of them in few bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvlingo_mlx.backend import mx, nn

from mlx_lm.utils import save_config

import kvlingo_mlx as kv
from kvlingo_mlx.models.language_model import LanguageModel

Opener = Callable[[str], LanguageModel]


def quantised(model: LanguageModel, folder: Path, bits: int = 4) -> LanguageModel:
    """A copy of a model in few bits, through a folder as a user would have it."""
    copy = kv.load(model.path)
    nn.quantize(copy.model, group_size=32, bits=bits)
    made = written(copy, folder)
    config = {**copy.config, "quantization": {"group_size": 32, "bits": bits}}
    save_config(config, made / "config.json")
    return kv.load(made)


def cast(model: LanguageModel, folder: Path, dtype: mx.Dtype) -> LanguageModel:
    """A copy of a model whose weights are of another dtype, through a folder."""
    copy = kv.load(model.path)
    copy.model.set_dtype(dtype)
    return kv.load(written(copy, folder))


def written(model: LanguageModel, folder: Path) -> Path:
    """A folder of a model's weights as they are now, beside its other files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.path.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    model.model.save_weights(str(folder / "model.safetensors"))
    return folder
