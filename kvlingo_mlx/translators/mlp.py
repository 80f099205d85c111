"""MLPs with one hidden layer, with or without a gate per target head.

Paper: appendix "Training protocol", paragraph "MLP translators".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.products import Group


@dataclass(frozen=True, repr=False)
class MLPTranslator(Translator):
    """One MLP per layer and side, head-mixing or head-wise."""

    def _map(self, group: Group, inputs: Sequence[mx.array]) -> mx.array:
        result = two_layers(group, inputs)
        return mx.sigmoid(group.vector("gate")) * result if "gate" in group.tensors else result


def two_layers(group: Group, inputs: Sequence[mx.array]) -> mx.array:
    """W2 gelu(W1 x + b1) + b2, GELU with erf: (G, B, H, T, D)."""
    product = group.project("w1", inputs)
    hidden = nn.gelu(product + group.vector("b1"))  # in float32, as the vectors are
    return group.project("w2", [hidden.astype(product.dtype)]) + group.vector("b2")
