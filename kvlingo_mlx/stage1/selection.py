"""Choose source layers from data: the R2 and greedy assignments.

Paper: appendix "Qwen3-0.6B/8B and Qwen3-1.7B/4B, pretrained", paragraphs of these names.

NumPy only. Both rules use second moments that the closed form needs anyway, so the data are not
read twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvlingo_mlx.format.assignment import attention_groups
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.stage1.closed_form import RELATIVE_TOLERANCE
from kvlingo_mlx.stage1.tiles import Regression, State, Tiles

METHODS = ("r2", "greedy")
# The paper gives no value for its ridge; this share of the candidates' mean square breaks ties.
RIDGE = 1e-6
Candidates = Mapping[int, Sequence[int]]  # target layer -> the source layers that it may read


def candidates(
    source: Sequence[LayerGeometry], target: Sequence[LayerGeometry]
) -> dict[int, list[int]]:
    """For each target layer, all source layers of its kind, or all that it can read without them.

    Raises:
        IncompatibleTranslatorError: The source has no layer that a target layer can read.
    """
    return {t: theirs for theirs, ours in attention_groups(source, target) for t in ours}


def choose(tiles: Tiles, method: str, nu: int) -> dict[str, tuple[State, ...]]:
    """The states of ``nu`` source layers for every map, in layer order.

    ``r2`` takes the source layers whose single-layer fits explain most. ``greedy`` adds one source
    layer at a time: the one that, beside those already taken, leaves the least residual when the
    map is solved anew.

    Raises:
        ValueError: No such method, no tokens, or fewer source layers than ``nu``.
    """
    if method not in METHODS:
        raise ValueError(f"assignment is {method!r}; it must be one of {', '.join(METHODS)}")
    largest = max(len(_layers(m)) for m in tiles.maps.values())
    if not 1 <= nu <= largest:
        raise ValueError(
            f"nu is {nu}; it must be 1 to {largest}, the source layers that a target layer can read"
        )
    if tiles.tokens == 0:
        raise ValueError("no tokens to choose source layers by: the data hold no usable prefix")
    rule = _best_alone if method == "r2" else _greedily
    return {
        name: _states(tiles.maps[name], sorted(chosen)) for name, chosen in rule(tiles, nu).items()
    }


def r2_scores(tiles: Tiles) -> dict[tuple[int, str], float]:
    """The share of each map's outputs explained by each source layer alone, by (layer, map)."""
    scores = {}
    for reads in sorted({_states(m, [i]) for m in tiles.maps.values() for i in _layers(m)}):
        layer = reads[0][1]
        alike = [name for name, m in tiles.maps.items() if _states(m, [layer]) == reads]
        whitened = _whitened(tiles.moments(alike[0], reads).xx)
        for name in alike:
            moments = tiles.moments(name, reads)
            explained, total = np.square(whitened.T @ moments.xy).sum(), moments.yy.sum()
            scores[layer, name] = float(explained / total) if total else 1.0
    return scores


def _layers(m: Regression) -> list[int]:
    """The source layers that a map may read."""
    return sorted({layer for _, layer in m.reads})


def _states(m: Regression, layers: Sequence[int]) -> tuple[State, ...]:
    """What a map reads of some layers: one state of each, or two of those of another kind."""
    return tuple(state for layer in layers for state in m.reads if state[1] == layer)


def _whitened(gram: np.ndarray) -> np.ndarray:
    """(d, rank) directions of a layer's states, each scaled to a sum of squares of 1."""
    eigenvalues, vectors = np.linalg.eigh(gram)
    kept = eigenvalues > RELATIVE_TOLERANCE * max(eigenvalues[-1], 0.0)
    return vectors[:, kept] / np.sqrt(eigenvalues[kept])


def _best_alone(tiles: Tiles, nu: int) -> dict[str, list[int]]:
    scores = r2_scores(tiles)
    return {
        name: [i for _, i in sorted((-scores[i, name], i) for i in _layers(m))][:nu]
        for name, m in tiles.maps.items()
    }


def _greedily(tiles: Tiles, nu: int) -> dict[str, list[int]]:
    chosen: dict[str, list[int]] = {}
    for name, m in tiles.maps.items():
        grams = [tiles.gram(i, i) for i in m.reads]
        ridge = RIDGE * sum(np.trace(g) for g in grams) / sum(len(g) for g in grams)
        layers, taken = _layers(m), list[int]()
        while len(taken) < min(nu, len(layers)):
            left = [i for i in layers if i not in taken]
            left.sort(key=lambda i: (residual(tiles, name, _states(m, [*taken, i]), ridge), i))
            taken.append(left[0])
        chosen[name] = taken
    return chosen


def residual(tiles: Tiles, name: str, reads: Sequence[State], ridge: float) -> float:
    """r(S): the share of a map's outputs that the ridge map from ``reads`` does not explain."""
    moments = tiles.moments(name, reads)
    total = float(moments.yy.sum())
    if not total:
        return 0.0
    solved = np.linalg.solve(moments.xx + ridge * np.eye(len(moments.xx)), moments.xy)
    # This is |Y - X B|^2 for (X^T X + ridge) B = X^T Y.
    explained = float(np.sum(solved * moments.xy)) + ridge * float(np.sum(solved * solved))
    return 1.0 - explained / total
