"""Sources and targets of random weights, as switches on a GPU are timed on them."""

from typing import Any

import torch

from benchmarks.paper.gpu.switch import build_target, source_spec
from benchmarks.paper.timing.widths import ends_of, shape_of
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.format.translator_config import ModelSpec

__all__ = ["ends_of", "made", "read"]


def read(name: str) -> ModelSpec:
    """What a translator knows of a source of these widths."""
    return source_spec(name, shape_of(name))


def made(name: str, dtype: Any = torch.float32, device: str = "cpu") -> TorchModel:
    torch.manual_seed(1)
    target = build_target(name, shape_of(name), device, dtype)
    for attention in target.attentions:  # else norms of ones, or zeros, hide how they act
        torch.nn.init.normal_(attention.k_norm.weight, 0.3, 0.2)
    return target
