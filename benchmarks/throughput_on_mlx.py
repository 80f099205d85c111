"""The MLX side of `training_throughput.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models.cache import make_prompt_cache

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.timing.geometries import make, unmade_model
from kvlingo_mlx.models.hidden import hidden_states, logits_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample

CHUNK = 2048  # tokens that mlx-lm reads at once


class Side:
    """See :class:`training_throughput.Side`; passes are those of stock mlx-lm."""

    def __init__(self, args: argparse.Namespace, sample: Sample) -> None:
        names = enumerate((args.source, args.target))
        made = make([unmade_model(name, args.layers, args.dtype, seed) for seed, name in names])
        self.ends, self.sample = (made[0], made[1]), sample
        spec, count = made[1].geometry.layers[0], len(sample.prefix) - 1
        shape = (1, spec.kv_heads, count, spec.key_dim)
        self._native = [
            [mx.random.normal(shape, made[1].cache_dtype) for _ in range(2)]
            for _ in made[1].geometry.layers
        ]
        mx.eval(self._native)

    def read(self, model: LanguageModel) -> None:
        tokens, cache = self.sample.prefix[:-1], make_prompt_cache(model.model)
        for first in range(0, len(tokens), CHUNK):
            model.model(mx.array([tokens[first : first + CHUNK]]), cache=cache)
            mx.eval([each.state for each in cache])

    def continue_(self, *, backward: bool) -> None:
        target, sample = self.ends[1], self.sample
        tokens = (sample.prefix[-1], *sample.continuation[:-1])
        labels = mx.array(sample.continuation)

        def loss(entries: list[list[mx.array]]) -> mx.array:
            cache: list[Any] = make_prompt_cache(target.model)
            for each, (keys, values) in zip(cache, entries, strict=True):
                each.keys, each.values, each.offset = keys, values, keys.shape[2]
            logits = logits_of(target, hidden_states(target, tokens, cache))
            return nn.losses.cross_entropy(logits, labels, reduction="mean")

        mx.eval(mx.value_and_grad(loss)(self._native) if backward else loss(self._native))

    def timed(self, action: Callable[[], object]) -> float:
        return measure.seconds(action)

    def facts(self) -> dict[str, Any]:
        found = {"peak_bytes": mx.get_peak_memory()}
        if mx.default_device() == mx.gpu:
            found["gpu"] = mx.device_info()["device_name"]
        return found
