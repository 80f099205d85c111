"""Both models' keys and values over one corpus, layer by layer.

States are kept in memory, in the models' own dtype. They take tokens x (sum of all layers' key and
value widths) x 2 bytes for 16-bit models: 4.8 GB for 16,384 tokens of two models of 36 layers and
width 1024, beside the models' weights. Statistics read one layer at a time as float32 and compute
in float64. Sums of moments, computed while the models run, would need no states. But they take more
memory once every pair of layers is compared: 21 GB for the cross moments of that pair's CKA grids
alone. The MLP needs the states anyway.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

import numpy as np

from benchmarks.paper.analysis.corpus import Corpus
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.models.capture import move, prefill
from kvlingo_mlx.models.delta_rule import stepping_in_chunks
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.phases import counted


class Layers(Sequence[np.ndarray]):
    """One side of a model: layer i as (T, width) float32, converted from its dtype on access."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, layer):
        return np.array(self._arrays[layer].astype(mx.float32))


@dataclass(frozen=True)
class States:
    """A model's keys and values at one capture point: per cache layer (T, width)."""

    keys: Sequence[np.ndarray]
    values: Sequence[np.ndarray]

    def side(self, side: str) -> Sequence[np.ndarray]:
        """The layers of ``"keys"`` or ``"values"``."""
        return self.keys if side == "keys" else self.values


def check_memory(models: Sequence[LanguageModel], num_tokens: int) -> None:
    """Refuse (ValueError) states that would fill more than half of this machine's memory."""
    needed = num_tokens * sum(
        model.cache_dtype.size * (layer.width("keys") + layer.width("values"))
        for model in models
        for layer in model.geometry.layers
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory / 2:
        raise ValueError(
            f"the states of {num_tokens} tokens take {needed / 1e9:.1f} GB, more than half of "
            f"this machine's {memory / 1e9:.1f} GB; lower --tokens"
        )


def collect(model: LanguageModel, corpus: Corpus, capture: str) -> States:
    """Run a model over every document, each from an empty cache.

    Raises:
        ValueError: A token id is outside the model's vocabulary.
        KVLingoError: The model's states are not finite.
    """
    layers = len(model.attentions)
    parts: list[list[mx.array]] = [[] for _ in range(2 * layers)]
    for document in counted(f"reading the texts with {model.name}", corpus.documents):
        model.check_tokens(document)
        with contextlib.closing(prefill(model, document)) as spans:
            for span in stepping_in_chunks(spans):
                arrays = [array[0] for array in move(span, model, capture).arrays]
                mx.eval(arrays)
                for part, array in zip(parts, arrays, strict=True):
                    part.append(array)
    joined = [_join(parts[index]) for index in range(2 * layers)]
    keys, values = joined[:layers], joined[layers:]
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        _check_finite(model, layer, pair)
    return States(Layers(keys), Layers(values))


def _check_finite(model: LanguageModel, layer: int, pair: Sequence[mx.array]) -> None:
    """Refuse states that are not finite; the first such layer is named, as later ones read it."""
    for side, array in zip(SIDES, pair, strict=True):
        if not mx.isfinite(array).all().item():
            raise KVLingoError(
                f"the {side} of layer {layer} of {model.name} hold NaN or Inf; "
                "are its weights sound?"
            )


def _join(parts: list[mx.array]) -> mx.array:
    """A layer's spans as one array; the spans are released."""
    joined = mx.concatenate(parts)
    mx.eval(joined)
    parts.clear()
    return joined
