"""The null: a model's architecture with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx.utils import tree_flatten, tree_unflatten

from kvlingo_mlx.models.language_model import LanguageModel

DEFAULT_STD = 0.02  # the default of Hugging Face's configs


def randomly_initialised(model: LanguageModel, seed: int) -> LanguageModel:
    """The same architecture and tokenizer, with weights drawn as before a pretraining.

    Matrices are normal with the config's ``initializer_range``, biases are zero, norms are one.
    They have the dtype of the model's cache; the weights of a quantised model are not quantised
    again.
    """
    architecture: Any = type(model.model)
    fresh = architecture(model.model.args)
    std = model.config.get("initializer_range", DEFAULT_STD)
    parameters = sorted(dict(tree_flatten(fresh.parameters())).items())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    drawn = []
    for (name, old), key in zip(parameters, keys, strict=True):
        if old.ndim > 1:
            drawn.append((name, std * mx.random.normal(old.shape, key=key)))
        elif name.endswith("bias"):
            drawn.append((name, mx.zeros_like(old)))
    fresh.update(tree_unflatten(drawn))
    fresh.set_dtype(model.cache_dtype)
    fresh.eval()
    return replace(model, model=fresh, revision=None, path=None)
