"""A loaded model with its tokenizer and the facts that translation needs about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvlingo_mlx.checkpoint import probe
from kvlingo_mlx.families import family_of
from kvlingo_mlx.families.base import Family, Finish
from kvlingo_mlx.geometry import (
    CacheGeometry,
    norms_fingerprint,
    vocabulary_fingerprint,
)
from kvlingo_mlx.projections import Sketch, sketch
from kvlingo_mlx.threads import unit
from kvlingo_mlx.translator_config import ModelSpec

NORMS = ("RMSNorm", "LayerNorm", "LayerNorm1P")  # how the classes of norms are called


@dataclass(frozen=True)
class LanguageModel:
    """An mlx-lm model and its tokenizer; what ``load`` returns and ``generate`` takes twice.

    Attributes:
        model: The mlx-lm module, unchanged.
        tokenizer: mlx-lm's tokenizer.
        config: The model's ``config.json``, as mlx-lm reads it.
        name: Path or Hub id it was loaded from.
        revision: Commit hash where known.
        path: The folder it was loaded from, or None.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    name: str
    revision: str | None = None
    path: Path | None = None

    @cached_property
    def family(self) -> Family:
        """The adapter of this model's family."""
        return family_of(self.config["model_type"])

    @cached_property
    def attentions(self) -> list[nn.Module]:
        """The attention modules that own a cache, in cache order."""
        return self.family.attentions(self.model)

    @cached_property
    def geometry(self) -> CacheGeometry:
        """What this model's cache looks like."""
        return self.family.geometry(self.model, self.config)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The config of the text model, whatever wraps it."""
        return self.family.facts(self.model, self.config)

    @cached_property
    def finishes(self) -> list[Finish]:
        """What happens to each cache layer's keys and values after their projections."""
        return [self.family.finish(a, self.facts) for a in self.attentions]

    @cached_property
    def cache_dtype(self) -> mx.Dtype:
        """The dtype this model's own keys have; nothing is computed to learn it."""
        cache = make_prompt_cache(self.model)
        self.model(mx.array([[0]]), cache=cache)
        return cache[0].keys.dtype

    @property
    def bits(self) -> int | None:
        """Bits of quantised weights, by the first projection of keys; None for floats."""
        return getattr(self._projections[0], "bits", None)

    @property
    def precision(self) -> str:
        """What those weights are held in: ``bfloat16``, say, or ``4 bits``."""
        if self.bits is not None:
            return f"{self.bits} bits"
        return str(self._projections[0].weight.dtype).rsplit(".", 1)[-1]

    @cached_property
    @unit
    def projections(self) -> Sketch | None:
        """Numbers that tell this model from its fine-tuned copies; None for quantised weights."""
        weights = [module.weight for module in self._projections]
        if self.bits is not None or any(weight.ndim != 2 for weight in weights):
            return None
        # No matmul: on some GPUs those of float32 are of fewer digits.
        outputs = [(w * mx.array(probe(w.shape[1]), mx.float32)).sum(axis=-1) for w in weights]
        return sketch([np.array(output) for output in outputs])

    @cached_property
    def _projections(self) -> list[nn.Module]:
        """The modules that put out every cache layer's keys and values."""
        return [module for a in self.attentions for module in self.family.taps(a)]

    @property
    def context_length(self) -> int:
        """Most tokens the model was made for."""
        return self.facts["max_position_embeddings"]

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Sha256 of the vocabulary."""
        return vocabulary_fingerprint(self.tokenizer.get_vocab())

    @cached_property
    @unit
    def norms_fingerprint(self) -> str:
        """Sha256 of the weights of all norms; it survives quantisation."""
        norms = {
            name: module.weight
            for name, module in self.model.named_modules()
            if type(module).__name__.endswith(NORMS) and "weight" in module
        }
        return norms_fingerprint(
            np.array(norms[name].astype(mx.float32)).tobytes() for name in sorted(norms)
        )

    def spec(self) -> ModelSpec:
        """The description of this model that a translator carries."""
        return ModelSpec(
            name=self.name,
            revision=self.revision,
            model_type=self.geometry.model_type,
            fingerprint={
                "geometry": self.geometry.fingerprint,
                "norms": self.norms_fingerprint,
                "tokenizer": self.tokenizer_fingerprint,
            },
            layers=self.geometry.layers,
        )

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse token ids without an embedding row: MLX would read out of bounds.

        Raises:
            ValueError: An id is negative or too large, or there are more tokens than
                the model's context.
        """
        rows = self.geometry.embedding_rows
        if len(tokens) and (min(tokens) < 0 or max(tokens) >= rows):
            bad = next(t for t in tokens if not 0 <= t < rows)
            raise ValueError(f"token id {bad} is outside the {rows} ids of {self.name}")
        if len(tokens) > self.context_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, the context of {self.name} "
                f"is {self.context_length}; shorten the prompt"
            )
