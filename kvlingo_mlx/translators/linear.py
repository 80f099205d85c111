"""Linear maps, head-mixing or head-wise: the paper's translator family.

Paper: section "Linear translator family", equation (3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_states, state_maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.translators.base import LinearMap, Translator
from kvlingo_mlx.translators.products import Group


@dataclass(frozen=True, repr=False)
class LinearTranslator(Translator):
    """One linear map per layer and side."""

    def _map(self, group: Group, inputs: Sequence[mx.array]) -> mx.array:
        return group.project("weight", inputs)

    def linear_map(self, side: str, layer: int) -> LinearMap:
        """The layer's matrices and bias; they share memory with this translator."""
        group = next(group for group in self.groups[side] if layer in group.layers)
        index = group.layers.index(layer)
        bias = group.vector("bias")[index, 0, :, 0] if "bias" in group.tensors else None
        reads = tuple(cut[index] for cut in group.cuts)
        return LinearMap(reads, group.layer_matrices(layer, "weight"), bias)


def identity(config: TranslatorConfig) -> LinearTranslator:
    """The translator of a model to itself, which must decode exactly as the model does."""
    out: dict[str, np.ndarray] = {}
    for m in state_maps_of(config):
        for name, shape in m.shapes.items():
            out[f"{m.name}.{name}"] = np.tile(np.eye(shape[-1], dtype=np.float32), (shape[0], 1, 1))
    for layer, geometry in enumerate(config.target.layers):
        for side in () if maps_states(config, layer) else SIDES:
            if config.head_mixing:
                matrix = np.eye(geometry.width(side), dtype=np.float32)
            else:
                eye = np.eye(geometry.head_dim(side), dtype=np.float32)
                matrix = np.repeat(eye[None], geometry.kv_heads, axis=0)
            out[f"{side}.{layer}.weight"] = matrix
    return LinearTranslator.build(config, Weights("float32", out))
