"""What a target's attention gathers from its cache."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from kvlingo_mlx.fitting.attention import heard
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.training.runtime import Attended, shapes


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, visible: Any, **options: Any
) -> mx.array:
    """What queries gather, (1, Hq, M, D); ``options`` are scale and sinks."""
    given = {"cache": None, "mask": mx.array(visible), **options}
    found: mx.array = scaled_dot_product_attention(queries, keys, values, **given)
    return found.astype(mx.float32)


@contextlib.contextmanager
def attended(target: LanguageModel, places: np.ndarray) -> Iterator[list[list[Attended]]]:
    """For each cache layer, what its attention modules gather in the one pass over a text.

    A recurrent layer has none. ``places`` are those of the queries, the text's last one among them.
    """
    at, tokens = mx.array(places), int(places[-1]) + 1
    behind = at[:, None] - mx.arange(tokens)
    layers = target.geometry.layers
    found: list[list[Attended]] = [[] for _ in layers]

    def listener(
        layer: int, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> None:
        if keys.shape[2] == tokens:
            visible = (behind >= 0) & (behind < (layers[layer].reach or tokens))
            attend = partial(_attend, scale=scale, sinks=sinks)
            both = shapes((keys, values))
            found[layer].append(Attended(queries[:, :, at], both, visible, attend))

    with heard(target, listener):
        yield found
    for each in found:
        mx.eval([own.queries for own in each])
