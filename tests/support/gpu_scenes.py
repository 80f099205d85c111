"""Targets of random weights, as switches on a GPU are timed on them."""

from __future__ import annotations

from typing import Any

import torch

from kvlingo_mlx.cuda import scene as scenes
from kvlingo_mlx.cuda.model import TorchModel


def made(name: str, dtype: Any = torch.float32, device: str = "cpu") -> TorchModel:
    torch.manual_seed(1)
    target = scenes.build_target(name, device, dtype, None)
    for attention in target.attentions:  # else norms of ones, or zeros, hide how they act
        torch.nn.init.normal_(attention.k_norm.weight, 0.3, 0.2)
    return target
