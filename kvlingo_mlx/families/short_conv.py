"""LFM2: layers of a gated convolution over three tokens among layers of attention.

Such a layer keeps the last products of two of its inputs. These two are its "keys" and "values".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.families.base import Finish, Kept
from kvlingo_mlx.families.recurrent import Recurrent, slid
from kvlingo_mlx.format.geometry import Attention, Recurrence


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """LFM2, dense or with experts."""

    rule: Attention = "short_conv"

    def mixer(self, block: nn.Module) -> nn.Module:
        return block.self_attn if block.is_attention_layer else block.conv

    def recurrence(self, module: nn.Module) -> Recurrence | None:
        if "conv" not in module:
            return None
        return Recurrence(
            key_heads=0,
            value_heads=1,
            key_dim=0,
            value_dim=module.args.hidden_size,
            kernel=module.L_cache,
        )

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return (module.in_proj,)

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        (projected,) = outputs
        b, _, x = mx.split(projected, 3, axis=-1)
        return b, x

    def followed(
        self, module: nn.Module, kept: Kept, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, ...]:
        """The tail after a span."""
        tail, _ = slid(kept[0], keys * values, module.L_cache)
        return (tail,)

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation; keys have a norm by another name."""
        found = super().finish(attention, facts)
        norm = attention.get("k_layernorm")
        if norm is None:
            return found
        return dataclasses.replace(found, norm_weight=norm.weight, norm_eps=norm.eps)

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        batch, tokens, _ = projected.shape
        heads = projected.reshape(batch, tokens, -1, self.key_dim(attention))
        normed = attention.q_layernorm(heads).transpose(0, 2, 1, 3)
        return attention.rope(normed, offset=offset)


FAMILIES = {"lfm2": ShortConv("lfm2"), "lfm2_moe": ShortConv("lfm2_moe")}
