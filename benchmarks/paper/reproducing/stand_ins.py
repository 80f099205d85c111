"""Tiny models that stand for the paper's, where the zoo has none of that shape."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.embedded.dialogues import for_fitting
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.atomic import replace_folder, temporary_beside

DEEPER, LATENTS = "-deeper", "-latents"
CONVERT = Path(__file__).parents[3] / "tools" / "convert_mla.py"
NARROW = "--rank 96 --rotary 64 --sequences 12 --length 256".split()
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


def can_be_made(name: str) -> bool:
    """Whether a zoo model of latents is asked for, and there is what its tool needs."""
    needed = ("torch", "transformers")
    return name.endswith(LATENTS) and all(map(importlib.util.find_spec, needed))


def latent(name: str, room: Path) -> Path:
    """A zoo model turned into latents by the tool that makes the paper's, but not recovered.

    Args:
        name: The zoo model's name, followed by ``-latents``.
        room: The folder in which models are kept.

    Raises:
        KVLingoError: The tool failed; the message is its own.
    """
    folder = room / name
    if (folder / "config.json").exists():
        return folder
    room.mkdir(parents=True, exist_ok=True)
    data = room / "calibration.jsonl"
    talks = ({"messages": talk.conversation()} for talk in for_fitting(200))
    data.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks), encoding="utf-8")
    model = zoo(name.removesuffix(LATENTS))
    words = [sys.executable, CONVERT, model, folder, "--data", data, *NARROW]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if done.returncode:
        raise KVLingoError(f"{CONVERT.name} failed:\n{done.stderr}")
    return folder


MAKERS = {DEEPER: deeper, LATENTS: latent}
