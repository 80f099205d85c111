"""What every translator kind offers. A kind is one file and one line in the table."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from kvlingo_mlx import checkpoint
from kvlingo_mlx.states import KVStates, TranslatedStates
from kvlingo_mlx.tensor_file import DType, Weights
from kvlingo_mlx.translator_config import TranslatorConfig


@dataclass(frozen=True)
class Translator(ABC):
    """Maps a source's keys and values to a target's, token by token (equation "map").

    Attributes:
        config: Who can use it, what it computes, where it came from.
        dtype: The dtype its weights are stored in on disk.
    """

    config: TranslatorConfig
    dtype: DType

    @abstractmethod
    def __call__(self, states: KVStates) -> TranslatedStates:
        """Translate a span, keys taken at ``config.capture``; nothing is evaluated."""

    @abstractmethod
    def to_weights(self) -> Weights:
        """The tensors as the format stores them."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Numbers in all maps."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes the maps take in memory."""

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations per token (appendix "Computational gains")."""
        return 2 * self.num_parameters

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a translator folder, all of it or nothing.

        Raises:
            ValueError: ``folder`` exists and is not a translator of ours.
        """
        return checkpoint.write(folder, self.config, self.to_weights())
