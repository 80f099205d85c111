"""MiniCPM3: latent attention, expanded; mlx-lm rotates by LongRoPE's long factors throughout."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.backend import nn

from kvlingo_mlx.families.latent import ExpandedFamily


@dataclass(frozen=True)
class MiniCPM3(ExpandedFamily):
    """The scale has a name of its own."""

    def scale(self, attention: nn.Module) -> float:
        """What the products of queries and keys are multiplied by."""
        return attention.softmax_scale


FAMILY = MiniCPM3("minicpm3", traditional=False, rope_type="longrope")
