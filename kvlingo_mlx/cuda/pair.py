"""Two PyTorch models in a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch

from kvlingo_mlx.cuda import gradients
from kvlingo_mlx.cuda.aligned import paired_states
from kvlingo_mlx.cuda.attention import attention_mass
from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.cuda.receipt import receipt
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.training.objectives import Loss, Objective


@dataclass(frozen=True)
class Pair:
    """See :class:`kvlingo_mlx.training.runtime.Pair`."""

    runtime: ClassVar[str] = "torch"

    source: TorchModel
    target: TorchModel

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "transformers": version("transformers")}

    def trainable(
        self, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]
    ) -> TorchTranslator:
        return TorchTranslator.from_arrays(config, arrays, self.target.device)

    def read(self, sample: Sample, config: TranslatorConfig) -> gradients.TorchReading:
        ends = self.source, self.target
        return gradients.read(*ends, sample, config.capture, config.native_layers)

    def loss(
        self,
        translator: TorchTranslator,
        reading: gradients.TorchReading,
        objective: Objective,
        scale: float = 0.0,
    ) -> Loss:
        return gradients.conversation_loss(self.target, translator, reading, objective, scale=scale)

    def check_gradients(self, sample: Sample, config: TranslatorConfig) -> None:
        """PyTorch has every gradient of the families that it opens."""

    def check_memory(
        self, config: TranslatorConfig, lengths: tuple[int, int], rates: int, hidden: int
    ) -> str:
        """Nothing is known here of what a GPU's allocator takes."""
        return ""

    @torch.no_grad()
    def states(self, sample: Sample, capture: str) -> tuple[States, States]:
        return paired_states(self.source, self.target, sample, capture)

    def spans(self, sample: Sample, capture: str) -> Iterator[tuple[States, States]]:
        yield self.states(sample, capture)

    def reconstruction(
        self, translator: TorchTranslator, states: tuple[States, States], scale: float = 0.0
    ) -> float:
        return gradients.reconstruction_loss(translator, *states, scale=scale)

    def rows(self, states: States, side: str, layer: int) -> torch.Tensor:
        return states.side(side)[layer].to(self.target.device)

    def wide(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.double()

    def joined(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        return arrays[0] if len(arrays) == 1 else torch.cat(list(arrays), dim=1)

    def array(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array).to(self.target.device)

    def attention_mass(self, sample: Sample) -> np.ndarray:
        return attention_mass(self.target, sample).cpu().numpy()

    def receipt(
        self,
        config: TranslatorConfig,
        arrays: Mapping[str, np.ndarray],
        own: HeldOut | None = None,
    ) -> dict[str, Any] | None:
        return receipt(self.source, self.target, self.trainable(config, arrays), own)
