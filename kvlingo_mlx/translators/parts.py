"""The part of a translator that writes what one rank holds of a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import TENSORS
from kvlingo_mlx.format.maps import Map, head_map_of, maps_of
from kvlingo_mlx.format.tensor_file import Made, Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.parts import Part


def of_part(
    config: TranslatorConfig, weights: Weights, part: Part, layers: tuple[LayerGeometry, ...]
) -> tuple[TranslatorConfig, Weights]:
    """The config and the tensors of only the maps to a rank's layers and heads.

    Args:
        config: The whole translator's config.
        weights: Its tensors.
        part: What the rank holds.
        layers: The geometry of the rank's cache layers.

    A tensor is cut when it is looked at, so that memory holds one whole tensor at a time.
    """
    sources: dict[str, tuple[str, Map, range]] = {}
    for m in maps_of(config):
        if m.layer in part.layers:
            place = part.layers.index(m.layer)
            own = f"{m.name.partition('.')[0]}.{place}"
            sources[own] = (m.name, m, part.heads[place])
    names = [(own, last) for own, (name, _, _) in sources.items() for last in TENSORS
             if f"{name}.{last}" in weights.arrays]  # fmt: skip

    def make(key: str) -> np.ndarray:
        own, _, last = key.rpartition(".")
        name, m, heads = sources[own]
        return _rows(config, weights.arrays[f"{name}.{last}"], m, last, heads)

    shapes = {f"{own}.{last}": make(f"{own}.{last}").shape for own, last in names}
    return _config(config, part, layers), Weights(weights.dtype, Made(shapes, make))


def _rows(
    config: TranslatorConfig, array: np.ndarray, m: Map, last: str, heads: range
) -> np.ndarray:
    """The rows of one of a map's tensors that belong to some of its target's KV heads."""
    first, layer = TENSORS[last].axes[0], config.target.layers[m.layer]
    if len(heads) == layer.kv_heads or (first in ("inputs", "hidden") and config.head_mixing):
        return array
    chosen = slice(heads.start, heads.stop)
    if first == "heads" or (not config.head_mixing and TENSORS[last].by_head):
        return array[chosen]
    found, start = [], 0
    for side in m.writes:  # rows of all heads of one side, then of the other
        width = layer.head_dim(side)
        found.append(array[start + heads.start * width : start + heads.stop * width])
        start += layer.width(side)
    return np.concatenate(found) if len(found) > 1 else found[0]


def _config(
    config: TranslatorConfig, part: Part, layers: tuple[LayerGeometry, ...]
) -> TranslatorConfig:
    own = slice(part.layers.start, part.layers.stop)
    sides: Mapping[str, tuple] = vars(config.assignment)
    assignment: Assignment = replace(
        config.assignment, **{side: tuple(sides[side][own]) for side in ("keys", "values")}
    )
    head_map = config.head_map
    if not config.head_mixing:
        whole = head_map_of(config)
        head_map = tuple(whole[head] for head in part.heads[0])
    target = replace(config.target, layers=layers)
    return replace(config, target=target, assignment=assignment, head_map=head_map)
