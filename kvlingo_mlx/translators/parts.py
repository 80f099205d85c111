"""The part of a translator that writes what one rank holds of a target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import TENSORS
from kvlingo_mlx.format.maps import Map, head_map_of, maps_of
from kvlingo_mlx.format.tensor_file import Weights
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
    """
    arrays = {}
    for m in maps_of(config):
        if m.layer not in part.layers:
            continue
        place = part.layers.index(m.layer)
        side = m.name.partition(".")[0]
        for last in TENSORS:
            if (array := weights.arrays.get(f"{m.name}.{last}")) is not None:
                own = _rows(config, array, m, last, part.heads[place])
                arrays[f"{side}.{place}.{last}"] = own
    return _config(config, part, layers), Weights(weights.dtype, arrays)


def _rows(
    config: TranslatorConfig, array: np.ndarray, m: Map, last: str, heads: range
) -> np.ndarray:
    """The rows of one of a map's tensors that belong to some of its target's KV heads."""
    first, layer = TENSORS[last].axes[0], config.target.layers[m.layer]
    if len(heads) == layer.kv_heads or (first == "hidden" and config.head_mixing):
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
    assignment = Assignment(config.assignment.keys[own], config.assignment.values[own])
    head_map = config.head_map
    if not config.head_mixing:
        whole = head_map_of(config)
        head_map = tuple(whole[head] for head in part.heads[0])
    target = replace(config.target, layers=layers)
    return replace(config, target=target, assignment=assignment, head_map=head_map)
