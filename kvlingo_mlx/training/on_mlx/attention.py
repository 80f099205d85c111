"""What a target's attention gathers from its cache, and how a translation changes it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from kvlingo_mlx import caches
from kvlingo_mlx.fitting.attention import heard
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import working
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.runtime import check_entries, shapes


@dataclass(frozen=True)
class Attended:
    """Some queries of a text in one attention module."""

    queries: mx.array  # (1, Hq, M, D), normed and rotated
    shapes: Sequence[tuple[int, ...]]  # of the keys and values (1, H, T, D) that they gather from
    visible: mx.array  # (M, T)
    options: dict[str, Any]  # of mlx-lm's attention: scale and sinks

    def gathered(
        self, keys: mx.array, values: mx.array, visible: mx.array | None = None
    ) -> mx.array:
        """What the queries gather, (1, Hq, M, D) in float32; of other entries see ``visible``."""
        mask = self.visible if visible is None else visible
        given: Any = {"cache": None, "mask": mask, **self.options}
        found: mx.array = scaled_dot_product_attention(self.queries, keys, values, **given)
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
            options = {"scale": scale, "sinks": sinks}
            both = shapes((keys, values))
            found[layer].append(Attended(queries[:, :, at], both, visible, options))

    with heard(target, listener):
        yield found
    for each in found:
        mx.eval([own.queries for own in each])


def match(
    target: LanguageModel, translator: MLXTranslator, reading: Any, layer: int, scale: float,
    between: Any = None,
) -> float:  # fmt: skip
    """One layer's share; see :meth:`kvlingo_mlx.training.runtime.Pair.match`."""
    own, (states, native) = reading.attended[layer], reading.whole
    placed = partial(caches.entry, target, layer, capture=translator.config.capture)
    at, others, seen = (None, None, None) if between is None else map(mx.array, between)

    def error(tensors: dict[str, mx.array]) -> mx.array:
        mapped = translator.layer(layer, states, tensors, target.cache_dtype)
        entry = placed(*mapped, positions=at)
        right, errors = placed(native.keys[layer][0], native.values[layer][0]), []
        if between is not None:
            both = zip(entry, right, strict=True)
            entry = tuple(mx.concatenate([ours, its[:, :, others]], 2) for ours, its in both)
        for each in own:
            check_entries(target, right, each.shapes)
            wanted = each.gathered(*right)
            wrong = (each.gathered(*entry, seen) - wanted).square().sum()
            errors.append(wrong / wanted.square().sum())
        return mx.stack(errors).mean()

    with working():
        value, gradients = mx.value_and_grad(error)(translator.of_layer(layer))
        if scale != 0.0:
            translator.learn({name: scale * g for name, g in gradients.items()})
        return float(value.item())  # type: ignore[arg-type]
