"""Models that are loaded, and copies of them in few bits."""

import shutil
from pathlib import Path

from kvlingo_mlx.backend import mx, nn

from mlx_lm.utils import save_config

import kvlingo_mlx as kv
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import hybrid_models, plain_models, tiny

ALIASES = dict.fromkeys(("kimi_k2", "joyai_llm_flash"), "deepseek_v3")  # run by its file


class Families(dict[str, LanguageModel]):
    """A tiny model by its family's name, or its 4-bit copy, written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, name: str) -> LanguageModel:
        folder = self.root / name
        if name.endswith(" 4-bit"):
            self[name] = quantised(self[name.removesuffix(" 4-bit")], folder)
            return self[name]
        if name in ALIASES:
            shutil.copytree(self[ALIASES[name]].path, folder)
            tiny.amend(folder / "config.json", model_type=name)
        elif name in hybrid_models.CONFIGS:
            hybrid_models.write_hybrid_model(folder, name)
        elif name in tiny.FAMILIES:
            model_type, options = tiny.FAMILIES[name]
            tiny.write_tiny_model(folder, model_type, **options)
        else:
            plain_models.write_plain_model(folder, name)
        self[name] = kv.load(folder)
        return self[name]


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
