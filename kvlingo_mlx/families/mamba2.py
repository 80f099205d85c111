"""Granite 4 and Nemotron-H: layers of Mamba-2 among layers of attention.

A Mamba-2 layer's inputs are what its convolution reads (x, B and C), and its time steps. C has no
part in the state, but in the convolution's tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models.ssm import ssm_update

from kvlingo_mlx.families.base import Kept
from kvlingo_mlx.families.recurrent import Recurrent, slid
from kvlingo_mlx.format.geometry import Attention

KINDS = {"linear_attention": "mamba", "full_attention": "attention"}  # transformers' newer names


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """Granite 4: each block has a mixer of one of two kinds, each by its own name."""

    rule: Attention = "mamba2"
    sizes: tuple[str, ...] = (
        *("n_groups", "num_heads", "ssm_state_size", "head_dim", "conv_kernel_size"),
    )

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The rotation; what transformers takes where a config says nothing."""
        unset = {
            "position_embedding_type": "nope",
            "tie_word_embeddings": False,
            "time_step_limit": [0.0, math.inf],
        }
        return {**unset, **super().settings(text)}

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a config; the kinds of layers by the names that mlx-lm knows."""
        found = super().overrides(config)
        if kinds := config.get("layer_types"):
            found["layer_types"] = [KINDS.get(kind, kind) for kind in kinds]
        return found

    def mixer(self, block: nn.Module) -> nn.Module | None:
        return block.mamba if block.layer_type == "mamba" else block.self_attn

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return (module.in_proj,)

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        (projected,) = outputs
        first = module.intermediate_size
        _, mixed, steps = mx.split(projected, [first, first + module.conv_dim], axis=-1)
        return mixed, steps

    def followed(
        self, module: nn.Module, kept: Kept, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, ...]:
        """The tail and the state after a span; in the order in which mlx-lm computes them."""
        tail, state = kept
        batch, tokens, _ = keys.shape
        tail, whole = slid(tail, keys, module.conv_kernel_size)
        mixed = nn.silu(module.conv1d(whole))
        groups, width = module.n_groups, module.ssm_state_size
        first = module.intermediate_size
        x, b, c = mx.split(mixed, [first, first + groups * width], axis=-1)
        x = x.reshape(batch, tokens, module.num_heads, module.head_dim)
        b, c = (each.reshape(batch, tokens, groups, width) for each in (b, c))
        _, state = ssm_update(
            *(x, module.A_log, b, c, module.D.astype(x.dtype), values, module.dt_bias, state),
            module.time_step_limit,
        )
        return tail, state


@dataclass(frozen=True)
class NemotronH(Mamba2):
    """Nemotron-H: a block is a mixer, an MLP or experts, all by one name; no keys are rotated."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {"norm_topk_prob": True}  # as transformers takes it

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return Recurrent.overrides(self, config)

    def mixer(self, block: nn.Module) -> nn.Module | None:
        return block.mixer if block.block_type in "M*" else None


FAMILIES = {
    "granitemoehybrid": Mamba2("granitemoehybrid"),
    "nemotron_h": NemotronH("nemotron_h"),
}
