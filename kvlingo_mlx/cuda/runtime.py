"""How a training on PyTorch opens its models and joins its processes."""

from __future__ import annotations

from typing import Any

import torch

from kvlingo_mlx.cuda import model
from kvlingo_mlx.cuda.distributed import join, leave, local_device

__all__ = ["DTYPES", "check_device", "facts", "join", "leave", "load", "load_as_stored"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load(name: str, dtype: str | None, device: str) -> model.TorchModel:
    """A model on this process's device, in bfloat16 unless ``dtype`` says otherwise."""
    return model.load(name, dtype=DTYPES[dtype or "bfloat16"], device=local_device(device))


def load_as_stored(name: str, device: str) -> model.TorchModel:
    """A model on this process's device, in the precision of its files."""
    return model.load(name, dtype="auto", device=local_device(device))


def facts(name: str) -> tuple[int, Any]:
    """A model's context in tokens, and its tokenizer."""
    config, tokenizer = model.read_config(name)
    return config["max_position_embeddings"], tokenizer


def check_device(device: str) -> None:
    """Refuse (ValueError) a GPU that is not there."""
    gpus, place = torch.cuda.device_count(), local_device(device)
    if place != "cpu" and int(place.removeprefix("cuda:")) >= gpus:
        raise ValueError(
            f"--device is {place}, but PyTorch finds {gpus} CUDA GPUs here; use --device mlx or "
            "cpu, or a CUDA build of PyTorch where there is a GPU"
        )
