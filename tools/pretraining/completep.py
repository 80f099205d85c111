"""CompleteP (Dey et al., 2025, "Don't be lazy"): what is set for a base model, for a wider or
deeper one.

With m_N the width and m_L the depth over the base model's, and alpha = 1:

| what | embeddings | matrices of a layer | norms |
|---|---|---|---|
| standard deviation at the start | std | std / sqrt(m_N) | (all ones) |
| learning rate | rate | rate / m_N | rate |
| weight decay | decay | decay * m_N | 0 |
| AdamW's epsilon | eps / (m_N m_L) | eps / (m_N m_L) | eps / (m_N m_L) |

A block's output is multiplied by 1 / m_L before it is added to the residual stream, and the
logits by 1 / m_N. Heads keep their width, so the scale of attention stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

BRANCHES = ("o_proj", "down_proj")  # what ends a block
MATRICES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", *BRANCHES)


@dataclass(frozen=True)
class CompleteP:
    """How much wider (m_N) and deeper (m_L) than the base model a model of Qwen3's kind is.

    Both multipliers of the forward pass go into weights in the end, so that the model is a plain
    one: 1 / m_L into the matrices that end a block, 1 / m_N into the last norm.
    """

    width: float
    depth: float

    @classmethod
    def of(cls, config: Any, base: tuple[int, int]) -> CompleteP:
        """The multipliers of a config over a base model's width and depth."""
        return cls(config.hidden_size / base[0], config.num_hidden_layers / base[1])

    def initialise(self, model: torch.nn.Module, std: float) -> None:
        """Draw all weights anew."""
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                torch.nn.init.ones_(parameter)
            else:
                wide = math.sqrt(self.width) if _part(name) in MATRICES else 1.0
                torch.nn.init.normal_(parameter, std=std / wide)

    def groups(self, model: torch.nn.Module, recipe: Any) -> list[dict[str, Any]]:
        """AdamW's parameter groups; ``scale`` multiplies the learning rate."""
        named = list(model.named_parameters())
        matrices = [p for n, p in named if _part(n) in MATRICES]
        norms = [p for _, p in named if p.dim() < 2]
        inner = {id(p) for p in (*matrices, *norms)}
        embeddings = [p for _, p in named if id(p) not in inner]
        decay, eps = recipe.weight_decay, recipe.eps / (self.width * self.depth)
        rows = (
            (embeddings, decay, 1.0),
            (matrices, decay * self.width, 1 / self.width),
            (norms, 0.0, 1.0),
        )
        return [{"params": p, "weight_decay": d, "scale": s, "eps": eps} for p, d, s in rows]

    def attach(self, model: torch.nn.Module) -> None:
        """Multiply what blocks put out, and the logits, from now on."""
        for name, factor in self._multipliers(model).items():
            model.get_submodule(name).register_forward_hook(
                lambda _module, _inputs, output, factor=factor: output * factor
            )

    def plain(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The weights of the plain model that computes the same."""
        weights = model.state_dict()
        for name, factor in self._multipliers(model).items():
            weights[f"{name}.weight"] = weights[f"{name}.weight"] * factor
        return weights

    def load(self, model: torch.nn.Module, plain: Mapping[str, torch.Tensor]) -> None:
        """Take over a plain model's weights; those that are not given stay."""
        weights = dict(plain)
        for name, factor in self._multipliers(model).items():
            weights[f"{name}.weight"] = weights[f"{name}.weight"] / factor
        model.load_state_dict(weights, strict=False)

    def _multipliers(self, model: torch.nn.Module) -> dict[str, float]:
        names = (name for name, _ in model.named_modules())
        ends = {name: 1 / self.depth for name in names if name.endswith(BRANCHES)}
        return {**ends, "model.norm": 1 / self.width}


def _part(name: str) -> str:
    """The module that a parameter's name ends in."""
    return name.split(".")[-2]
