"""LFM2: layers of a gated convolution over three tokens among layers of attention.

Such a layer keeps the last products of two of its inputs. These two are its "keys" and "values".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.families.base import Kept
from kvlingo_mlx.families.recurrent import Recurrent, slid
from kvlingo_mlx.format.geometry import Attention, Recurrence


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """LFM2, dense or with experts."""

    rule: Attention = "short_conv"
    mark: str = "conv"

    def mixer(self, block: nn.Module) -> nn.Module:
        return block.self_attn if block.is_attention_layer else block.conv

    def recurrence(self, module: nn.Module) -> Recurrence | None:
        if self.mark not in module:
            return None
        return Recurrence(0, 1, 0, module.args.hidden_size, module.L_cache)

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


FAMILIES = {"lfm2": ShortConv("lfm2"), "lfm2_moe": ShortConv("lfm2_moe")}
