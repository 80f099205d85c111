"""Tiny models that stand for the paper's, where the zoo has none of that shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.format.atomic import replace_folder, temporary_beside

DEEPER = "-deeper"
COPIED = (1, 3)  # the layers that get a copy behind them
SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def deeper(name: str, room: Path) -> Path:
    """A zoo model with two more layers, which changes nothing that it says.

    The new layers copy the ones before them, and write nothing: their output projections are zero.
    So there is a trained pair of unequal depth whose heads are alike, as between Qwen3-0.6B and 8B.

    Args:
        name: The zoo model's name, followed by ``-deeper``.
        room: The folder in which models are kept.
    """
    folder = room / name
    if (folder / "config.json").exists():
        return folder
    base = zoo(name.removesuffix(DEEPER))
    room.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(folder)
    shutil.copytree(base, temporary, dirs_exist_ok=True)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    depth = config["num_hidden_layers"]
    order = sorted([*range(depth), *COPIED])
    config["num_hidden_layers"] = len(order)
    config["layer_types"] = [config["layer_types"][layer] for layer in order]
    (temporary / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    old = load_file(base / "model.safetensors")
    new = {key: array for key, array in old.items() if ".layers." not in key}
    for place, layer in enumerate(order):
        silent = place > 0 and order[place - 1] == layer
        start = f"model.layers.{layer}."
        for key in filter(lambda key: key.startswith(start), old):
            part = key.removeprefix(start)
            array = old[key] * 0 if silent and part in SILENT else old[key]
            new[f"model.layers.{place}.{part}"] = array
    save_file(new, temporary / "model.safetensors", metadata={"format": "mlx"})
    replace_folder(temporary, folder)
    return folder
