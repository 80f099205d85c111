"""Two MLX models in a training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx import caches
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.evaluation import verification
from kvlingo_mlx.fitting.rows import DeviceRows
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import STATES
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.timing.random_maps import random_maps
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.on_mlx import gradients, memory
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.runtime import Pair
from kvlingo_mlx.translators import build


def _no_gradient(name: str, reason: str) -> str:
    return (
        f"no gradient reaches the cache of {name} on MLX ({reason}), so no translator into it can "
        "be distilled; --steps 0 keeps the closed form, which needs none"
    )


@dataclass(frozen=True)
class MLXPair(DeviceRows, Pair):
    """Two models on MLX."""

    runtime: ClassVar[str] = "mlx"
    gradients: ClassVar[Any] = gradients

    @property
    def versions(self) -> dict[str, str]:
        return {"mlx": version("mlx"), "mlx_lm": version("mlx-lm")}

    def trainable(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]
    ) -> MLXTranslator:
        return MLXTranslator.from_arrays(config, arrays)

    def check_gradients(self, sample: Sample, config: TranslatorConfig) -> None:
        made = self.trainable(config, random_maps(config))
        try:
            self.loss(made, self.read(sample, config), objective_named("kl"), 1.0)
        except (ValueError, RuntimeError) as problem:
            reason = str(problem).splitlines()[0]
            raise UnsupportedModelError(_no_gradient(self.target.name, reason)) from problem
        sides = (*SIDES, STATES) if config.state_maps else SIDES
        for side in sides:
            found = [g for name, g in made.gradients.items() if side in name or "joint" in name]
            if not any(mx.any(gradient != 0).item() for gradient in found):
                raise UnsupportedModelError(
                    _no_gradient(self.target.name, f"that of all {side} is 0")
                )

    def check_memory(
        self, config: TranslatorConfig, lengths: tuple[int, int], rates: int, plan: TrainingPlan
    ) -> str:
        return memory.check(self.source, self.target, config, lengths, rates, plan)

    def entry(
        self, layer: int, sides: Sequence[mx.array], capture: str, at: Any = None
    ) -> tuple[mx.array, ...]:
        keys, values = sides
        at = None if at is None else mx.array(at)
        return caches.entry(self.target, layer, keys, values, capture, positions=at)

    def receipt(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray], own: HeldOut | None = None
    ) -> dict[str, Any] | None:
        made = build(config, Weights.from_float32(dict(arrays), "float32"))
        layers = config.native_layers
        return verification.receipt(self.source, self.target, made, layers, own=own)
