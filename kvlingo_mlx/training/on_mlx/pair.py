"""Two MLX models in a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np

from kvlingo_mlx.evaluation import verification
from kvlingo_mlx.fitting.aligned import aligned_states
from kvlingo_mlx.fitting.rows import Rows
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.capture import whole
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import Loss, Objective
from kvlingo_mlx.training.on_mlx import gradients
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.translators import build


@dataclass(frozen=True)
class Pair(Rows):
    """See :class:`kvlingo_mlx.training.runtime.Pair`."""

    runtime: ClassVar[str] = "mlx"

    @property
    def versions(self) -> dict[str, str]:
        return {"mlx": version("mlx"), "mlx_lm": version("mlx-lm")}

    def trainable(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]
    ) -> MLXTranslator:
        return MLXTranslator.from_arrays(config, arrays)

    def read(self, sample: Sample, config: TranslatorConfig) -> gradients.Reading:
        ends = self.source, self.target
        return gradients.read(*ends, sample, config.capture, config.native_layers)

    def loss(
        self,
        translator: MLXTranslator,
        reading: gradients.Reading,
        objective: Objective,
        scale: float = 0.0,
    ) -> Loss:
        return gradients.conversation_loss(self.target, translator, reading, objective, scale=scale)

    def states(self, sample: Sample, capture: str) -> tuple[KVStates, KVStates]:
        if sample.aligned is not None:
            return aligned_states(self.source, self.target, sample.aligned, capture)
        read = whole(self.source, sample.prefix, capture)
        if self.source is self.target:
            return read, read
        return read, whole(self.target, sample.prefix, capture)

    def reconstruction(
        self, translator: MLXTranslator, states: tuple[KVStates, KVStates], scale: float = 0.0
    ) -> float:
        return gradients.reconstruction_loss(translator, *states, scale=scale)

    def receipt(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]
    ) -> dict[str, Any] | None:
        translator = build(config, Weights.from_float32(dict(arrays), "float32"))
        layers = config.native_layers
        return verification.receipt(self.source, self.target, translator, layers)
