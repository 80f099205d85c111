"""Linear maps, head-mixing or head-wise, as batched matmuls that write head-major output.

Both variants are one product: (G, B, 1 or H, T, in) @ (G, 1, H, in, D). A head-mixing
map broadcasts a token's whole width over the target heads; a head-wise one hands each
target head its own source head. Either way the result is laid out as caches store it,
so no transpose follows.

How the product is cut depends on the machine, and only ``plan`` knows:

- On a GPU all target layers of equal shape go through one matmul, the source layers of
  each concatenated: separate matmuls would be launch-bound.
- On a CPU each layer and each of its source layers has a matmul of its own, summed in
  place: stacking the inputs costs more than launching (benchmarks/LOG.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvlingo_mlx.backend import mx, on_gpu

import numpy as np

from kvlingo_mlx.states import KVStates, LayerGroup, TranslatedStates
from kvlingo_mlx.tensor_file import Weights
from kvlingo_mlx.translator_config import SIDES, TranslatorConfig, head_map_of
from kvlingo_mlx.translators.base import Translator


@dataclass(frozen=True)
class _Term:
    """One matmul: for each of G layers, the source layers read, and (G, 1, H, D, in)."""

    sources: tuple[tuple[int, ...], ...]
    weight: mx.array


@dataclass(frozen=True)
class _Group:
    """Target layers that share their matmuls; the terms' products are summed."""

    layers: tuple[int, ...]
    terms: tuple[_Term, ...]
    bias: mx.array | None  # (G, 1, H, 1, D)


@dataclass(frozen=True)
class LinearTranslator(Translator):
    """The paper's translator family (section 3.1): one linear map a layer and side."""

    groups: dict[str, tuple[_Group, ...]]

    @classmethod
    def build(
        cls, config: TranslatorConfig, weights: Weights, *, batched: bool | None = None
    ) -> LinearTranslator:
        """Lay the weights out for this machine (``batched``: as on a GPU)."""
        batched = on_gpu() if batched is None else batched
        groups = {side: plan(config, weights, side, batched) for side in SIDES}
        arrays = [t.weight for side in SIDES for g in groups[side] for t in g.terms]
        mx.eval(arrays)
        return cls(config, weights.dtype, groups)

    def __call__(self, states: KVStates) -> TranslatedStates:
        keys, values = (self._translate(side, states.side(side)) for side in SIDES)
        return TranslatedStates(keys, values, states.capture, states.start)

    def _translate(self, side: str, arrays: Sequence[mx.array]) -> tuple[LayerGroup, ...]:
        return tuple(
            LayerGroup(group.layers, self._project(side, group, arrays))
            for group in self.groups[side]
        )

    def _project(self, side: str, group: _Group, arrays: Sequence[mx.array]) -> mx.array:
        result: mx.array | None = None
        for term in group.terms:
            inputs = [
                _join([self._heads(side, s, arrays[s]) for s in sources])
                for sources in term.sources
            ]
            stacked = mx.stack(inputs) if len(inputs) > 1 else inputs[0][None]
            weight = term.weight.swapaxes(-1, -2)
            result = stacked @ weight if result is None else mx.addmm(result, stacked, weight)
        assert result is not None  # every group has a term
        result = result.astype(mx.float32)
        return result if group.bias is None else result + group.bias

    def _heads(self, side: str, layer: int, array: mx.array) -> mx.array:
        """(B, T, Hs * d) as (B, 1, T, Hs * d), or each target head's own (B, H, T, d)."""
        if self.config.head_mixing:
            return array[:, None]
        batch, tokens, _ = array.shape
        heads = self.config.source.layers[layer].kv_heads
        split = array.reshape(batch, tokens, heads, -1).swapaxes(1, 2)
        return split if self._head_index is None else mx.take(split, self._head_index, axis=1)

    @cached_property
    def _head_index(self) -> mx.array | None:
        head_map = head_map_of(self.config)
        sources = self.config.source.layers[0].kv_heads
        return None if head_map == tuple(range(sources)) else mx.array(head_map)

    def to_weights(self) -> Weights:
        out: dict[str, np.ndarray] = {}
        for side in SIDES:
            for group in self.groups[side]:
                joined = _join([term.weight for term in group.terms]).astype(mx.float32)
                for index, layer in enumerate(group.layers):
                    matrix = np.array(joined[index, 0])  # (H, D, in)
                    if self.config.head_mixing:
                        matrix = matrix.reshape(-1, matrix.shape[-1])
                    out[f"{side}.{layer}.weight"] = matrix
                    if group.bias is not None:
                        out[f"{side}.{layer}.bias"] = np.array(group.bias[index]).reshape(-1)
        return Weights.from_float32(out, self.dtype)

    @property
    def num_parameters(self) -> int:
        return sum(array.size for array in self._arrays())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> list[mx.array]:
        groups = [group for side in SIDES for group in self.groups[side]]
        weights = [term.weight for group in groups for term in group.terms]
        return weights + [group.bias for group in groups if group.bias is not None]


def plan(
    config: TranslatorConfig, weights: Weights, side: str, batched: bool
) -> tuple[_Group, ...]:
    """Cut one side's maps into groups and terms."""
    alike: dict[tuple, list[int]] = defaultdict(list)
    for layer, geometry in enumerate(config.target.layers):
        inputs = tuple(
            config.source.layers[s].width(side) for s in config.assignment.side(side)[layer]
        )
        shape = (geometry.kv_heads, geometry.head_dim(side), geometry.window, inputs)
        alike[shape if batched else (layer,)].append(layer)
    return tuple(_group(config, weights, side, layers, batched) for layers in alike.values())


def _group(
    config: TranslatorConfig, weights: Weights, side: str, layers: list[int], batched: bool
) -> _Group:
    heads = config.target.layers[layers[0]].kv_heads
    dim = config.target.layers[layers[0]].head_dim(side)
    sources = [config.assignment.side(side)[layer] for layer in layers]
    stacked = np.stack([weights.arrays[f"{side}.{layer}.weight"] for layer in layers])
    stacked = stacked.reshape(len(layers), 1, heads, dim, -1)
    bias = None
    if f"{side}.0.bias" in weights.arrays:
        rows = [weights.as_float32(f"{side}.{layer}.bias") for layer in layers]
        bias = mx.array(np.stack(rows).reshape(len(layers), 1, heads, 1, dim))
    if batched:
        return _Group(tuple(layers), (_Term(tuple(sources), _device(stacked, weights)),), bias)
    geometry = [config.source.layers[s] for s in sources[0]]
    widths = [g.width(side) if config.head_mixing else g.head_dim(side) for g in geometry]
    parts = np.split(stacked, np.cumsum(widths)[:-1], axis=-1)
    terms = [_Term(((s,),), _device(p, weights)) for s, p in zip(sources[0], parts, strict=True)]
    return _Group(tuple(layers), tuple(terms), bias)


def _device(array: np.ndarray, weights: Weights) -> mx.array:
    """To MLX; 16-bit weights become float32 on a CPU, where 16-bit matmuls are slow."""
    out = mx.array(np.ascontiguousarray(array))
    if weights.dtype == "bfloat16":
        out = out.view(mx.bfloat16)
    return out if on_gpu() else out.astype(mx.float32)


def _join(arrays: Sequence[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=-1)


def identity(config: TranslatorConfig) -> LinearTranslator:
    """The translator of a model to itself: what must decode exactly as the model does."""
    out: dict[str, np.ndarray] = {}
    for layer, geometry in enumerate(config.target.layers):
        for side in SIDES:
            if config.head_mixing:
                matrix = np.eye(geometry.width(side), dtype=np.float32)
            else:
                eye = np.eye(geometry.head_dim(side), dtype=np.float32)
                matrix = np.repeat(eye[None], geometry.kv_heads, axis=0)
            out[f"{side}.{layer}.weight"] = matrix
    return LinearTranslator.build(config, Weights("float32", out))
