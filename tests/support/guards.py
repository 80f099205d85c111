"""Receipts that say what is usual, and predictions by plain calls of a model in float64."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

USUAL = {"tokens": 32, "mean": 0.5, "spread": 0.1}


def with_receipt(translator: Translator, **provenance: Any) -> Translator:
    """A copy whose receipt says what is usual."""
    receipt = {"prompts": "dialogues-1", "kl": 0.1, "top1": 1.0, "hidden_kl": 2.0, "guard": USUAL}
    facts = {"receipt": receipt, **provenance}
    config = dataclasses.replace(translator.config, provenance=facts)
    return build(config, translator.to_weights())


def logs(model: LanguageModel, cache: list[Any] | None, tokens: Sequence[int]) -> np.ndarray:
    """Log probabilities (T, vocabulary) after each of some tokens, in float64."""
    logits = np.array(model.model(mx.array([list(tokens)]), cache=cache)[0].astype(mx.float32))
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
