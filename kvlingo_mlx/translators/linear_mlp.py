"""Linear maps with a parallel MLP branch (paper: appendix "Dense-to-MoE cache translation",
paragraph "A non-linear translator").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.mlp import two_layers
from kvlingo_mlx.translators.products import Group


@dataclass(frozen=True, repr=False)
class LinearMLPTranslator(Translator):
    """The sum of a linear map and an MLP, for each layer and side."""

    def _map(self, group: Group, inputs: Sequence[mx.array]) -> mx.array:
        return group.project("weight", inputs) + two_layers(group, inputs)
