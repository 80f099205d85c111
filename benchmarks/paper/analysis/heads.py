"""The alignment of source heads with target heads.

Paper: appendix "Head alignment in released Qwen3 pairs".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.paper.analysis.states import States
from benchmarks.paper.analysis.statistics import HeadAlignment, head_alignment
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.phases import counted
from kvlingo_mlx.stage1.closed_form import Moments, solve
from kvlingo_mlx.translators.base import Translator


def closed_form_alignment(
    source: States,
    target: States,
    source_layers: Sequence[int],
    heads: tuple[int, int],
    seed: int,
) -> dict[str, HeadAlignment]:
    """The alignment of the closed-form joint map [K; V] fitted on all tokens, by side.

    Args:
        source: The source's states.
        target: The target's states, over the same tokens.
        source_layers: The source layer that each target layer reads.
        heads: The numbers of KV heads of the source and of the target.
        seed: The seed of the null's permutations.
    """
    maps: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
    for layer, source_layer in enumerate(counted("aligning heads", source_layers)):
        x = [source.side(side)[source_layer] for side in SIDES]
        y = [target.side(side)[layer] for side in SIDES]
        moments = Moments(x[0].shape[1] + x[1].shape[1], y[0].shape[1] + y[1].shape[1])
        moments.add(np.concatenate(x, axis=1), np.concatenate(y, axis=1))
        weight = solve(moments).weight
        keys_in, keys_out = x[0].shape[1], y[0].shape[1]
        maps["keys"].append(weight[:keys_out, :keys_in])
        maps["values"].append(weight[keys_out:, keys_in:])
    return {side: head_alignment(maps[side], *heads, seed=seed) for side in SIDES}


def translator_alignment(
    translator: Translator, heads: tuple[int, int], seed: int
) -> dict[str, HeadAlignment]:
    """The alignment of a head-mixing translator's own maps, by side.

    The block of a source head holds its columns of every layer read.
    """
    weights, config = translator.to_weights(), translator.config
    found: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
    for m in maps_of(config):
        weight = weights.as_float32(f"{m.name}.weight")
        widths = [config.source.layers[s].width(side) for side, s in m.reads]
        parts = np.split(weight, np.cumsum(widths)[:-1], axis=1)
        by_head = [part.reshape(len(weight), heads[0], -1) for part in parts]
        (side,) = m.writes
        found[side].append(np.concatenate(by_head, axis=2).reshape(weight.shape))
    return {side: head_alignment(maps, *heads, seed=seed) for side, maps in found.items()}
