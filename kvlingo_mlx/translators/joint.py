"""Linear maps over keys and values together: each layer has one map from [K; V] to [K; V].

The upper rows of the map write keys and the lower rows write values. So on the device it is held as
two linear maps that both read keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.translators.linear import LinearTranslator


@dataclass(frozen=True, repr=False)
class JointTranslator(LinearTranslator):
    """One linear, head-mixing map per layer over stacked keys and values."""

    @classmethod
    def build(
        cls,
        config: TranslatorConfig,
        weights: Weights,
        *,
        batched: bool | None = None,
        bits: int | None = None,
    ) -> Self:
        apart: dict[str, np.ndarray] = {}
        for name, array in weights.arrays.items():
            _, layer, last = name.split(".")
            rows = np.split(array, [config.target.layers[int(layer)].key_width])
            apart |= {f"{side}.{layer}.{last}": r for side, r in zip(SIDES, rows, strict=True)}
        apart_weights = Weights(weights.dtype, apart)
        return super().build(config, apart_weights, batched=batched, bits=bits)

    def to_weights(self) -> Weights:
        apart = super().to_weights()
        together = {}
        for name in apart.arrays:
            side, layer, last = name.split(".")
            if side == SIDES[0]:
                rows = [apart.arrays[f"{s}.{layer}.{last}"] for s in SIDES]
                together[f"joint.{layer}.{last}"] = np.concatenate(rows)
        return Weights(apart.dtype, together)
