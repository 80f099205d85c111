"""The part of a translator that writes what one rank holds of a target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.kinds import TENSORS
from kvlingo_mlx.format.maps import Map, head_map_of, maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel


def of_part(
    config: TranslatorConfig,
    weights: Weights,
    target: LanguageModel,
    source: LanguageModel | None = None,
) -> tuple[TranslatorConfig, Weights]:
    """The config and the tensors of only the maps to a rank's layers and heads.

    Args:
        config: The whole translator's config.
        weights: Its tensors, which are looked at one after the other.
        target: What the rank holds of the target.
        source: What it holds of the source, if the maps read these heads only; None: all heads.
    """
    part = target.part
    assert part is not None
    arrays = {}
    for m in (m for m in maps_of(config) if m.layer in part.layers):
        place = part.layers.index(m.layer)
        for last in TENSORS:
            if (array := weights.arrays.get(f"{m.name}.{last}")) is not None:
                own = _rows(config, array, m, last, part.heads[place])
                # A copy, since a slice would keep the whole tensor in memory.
                name = f"{m.name.partition('.')[0]}.{place}.{last}"
                arrays[name] = own if own is array else np.array(own)
    held, first = slice(part.layers.start, part.layers.stop), 0
    ends = [config.source, replace(config.target, layers=target.geometry.layers)]
    if source is not None and source.part is not None:
        ends[0] = replace(config.source, layers=source.geometry.layers)
        first = source.part.heads[0].start
    head_map = config.head_map
    if not config.head_mixing:
        head_map = tuple(head_map_of(config)[head] - first for head in part.heads[0])
    reads = Assignment(config.assignment.keys[held], config.assignment.values[held])
    own_config = replace(
        config, source=ends[0], target=ends[1], assignment=reads, head_map=head_map
    )
    return own_config, Weights(weights.dtype, arrays)


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
