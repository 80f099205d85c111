"""MiniCPM3: expanded latent attention; mlx-lm always rotates by LongRoPE's long factors."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.backend import nn

from kvlingo_mlx.families.latent import ExpandedFamily


@dataclass(frozen=True)
class MiniCPM3(ExpandedFamily):
    """Reads the scale under this family's own name."""

    def scale(self, attention: nn.Module) -> float:
        return attention.softmax_scale


FAMILY = MiniCPM3("minicpm3", traditional=False, rope_type="longrope")
