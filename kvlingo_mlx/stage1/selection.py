"""Choose source layers from data: the R2 and greedy assignments.

Paper: appendix "Qwen3-0.6B/8B and Qwen3-1.7B/4B, pretrained", paragraphs of these names.

NumPy only; until they are solved, the sums may be another library's arrays. Both rules use second
moments that the closed form needs anyway, so the data are not read twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlingo_mlx.format.assignment import attention_groups
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.stage1.closed_form import RELATIVE_TOLERANCE, Moments

METHODS = ("r2", "greedy")
# The paper gives no value for its ridge; this share of the candidates' mean square breaks ties.
RIDGE = 1e-6
Candidates = Mapping[int, Sequence[int]]  # target layer -> the source layers that it may read


def candidates(
    source: Sequence[LayerGeometry], target: Sequence[LayerGeometry]
) -> dict[int, list[int]]:
    """For each target layer, all source layers of its kind of attention.

    Raises:
        IncompatibleTranslatorError: The source has no layer of one of these kinds.
    """
    return {t: theirs for theirs, ours in attention_groups(source, target) for t in ours}


@dataclass
class Tiles:
    """Second moments of one side, one tile per pair of layers, in float64.

    ``xx[i, j]`` (i <= j) is the sum over tokens of w x_i^T x_j for source layers, ``xy[i, t]`` that
    of w x_i^T y_t with a target layer, and ``yy[t]`` that of w y_t^2. The tiles cover all source
    layers of one kind of attention, so any choice of them can be solved. The ``xx`` tiles are kept
    when the data are read again for other target layers (:meth:`turn_to`).
    """

    reads: Candidates
    tokens: int = 0
    xx: dict[tuple[int, int], Any] = field(default_factory=dict)
    xy: dict[tuple[int, int], Any] = field(default_factory=dict)
    yy: dict[int, Any] = field(default_factory=dict)
    _settled: set[tuple[int, int]] = field(default_factory=set)
    _whitened: dict[int, np.ndarray] = field(default_factory=dict)

    def turn_to(self, reads: Candidates) -> None:
        """Drop the target layers' tiles before the same data are read for other target layers."""
        self.reads, self.tokens, self.xy, self.yy = reads, 0, {}, {}
        self._settled = set(self.xx)

    def tensors(self) -> dict[str, Any]:
        """All tiles by name, for a file."""
        found = {
            f"{'settled' if key in self._settled else 'xx'}/{key[0]}/{key[1]}": tile
            for key, tile in self.xx.items()
        }
        found |= {f"xy/{i}/{t}": tile for (i, t), tile in self.xy.items()}
        return found | {f"yy/{t}": tile for t, tile in self.yy.items()}

    @classmethod
    def restored(cls, tensors: Mapping[str, Any], tokens: int) -> Tiles:
        """The tiles that gave :meth:`tensors`, but for what they read."""
        made = cls({}, tokens)
        for name, tile in tensors.items():
            kind, *layers = name.split("/")
            key = tuple(map(int, layers))
            if kind == "yy":
                made.yy[key[0]] = tile
                continue
            (made.xy if kind == "xy" else made.xx)[key[0], key[1]] = tile
            if kind == "settled":
                made._settled.add((key[0], key[1]))
        return made

    def add(self, xs: Sequence[Any], ys: Sequence[Any], weights: Any = None) -> None:
        """Add tokens: (T, d) float64 of every source and target layer, weights (T,) or None."""
        self.tokens += len(xs[0])
        groups = {tuple(sources) for sources in self.reads.values()}
        weighted = [x if weights is None else x * weights[:, None] for x in xs]
        for group in groups:
            for place, i in enumerate(group):
                for j in group[place:]:
                    if (i, j) not in self._settled:
                        _add(self.xx, (i, j), weighted[i].T @ xs[j])
        for t, sources in self.reads.items():
            for i in sources:
                _add(self.xy, (i, t), weighted[i].T @ ys[t])
            squares = ys[t] * ys[t]
            _add(self.yy, t, (squares if weights is None else squares * weights[:, None]).sum(0))

    def moments(self, target: int, sources: Sequence[int]) -> Moments:
        """The moments of a map to a target layer from the concatenated ``sources``."""
        columns = [as_numpy(self.xy[i, target]) for i in sources]
        found = Moments(sum(len(c) for c in columns), columns[0].shape[1], self.tokens)
        found.xx = np.block([[self.gram(i, j) for j in sources] for i in sources])
        found.xy = np.concatenate(columns)
        found.yy = as_numpy(self.yy[target])
        return found

    def whitened(self, i: int) -> np.ndarray:
        """(d, rank) directions of a source layer, each scaled to a sum of squares of 1."""
        if i not in self._whitened or self._settled != set(self.xx):
            eigenvalues, vectors = np.linalg.eigh(self.gram(i, i))
            kept = eigenvalues > RELATIVE_TOLERANCE * max(eigenvalues[-1], 0.0)
            self._whitened[i] = vectors[:, kept] / np.sqrt(eigenvalues[kept])
        return self._whitened[i]

    def gram(self, i: int, j: int) -> np.ndarray:
        """The tile of two source layers, given in either order."""
        return as_numpy(self.xx[i, j]) if i <= j else as_numpy(self.xx[j, i]).T


def _add(sums: dict, key: Any, part: Any) -> None:
    if key in sums:
        sums[key] += part
    else:
        sums[key] = part


def as_numpy(array: Any) -> np.ndarray:
    """Sums of either runtime as a NumPy array."""
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def tile_bytes(
    source: Sequence[LayerGeometry], reads: Candidates, side: str
) -> tuple[int, dict[int, int]]:
    """The bytes of the tiles between source layers, and at most of those of each target layer."""
    widths = [layer.width(side) for layer in source]
    groups = {tuple(sources) for sources in reads.values()}
    between = sum(
        widths[i] * widths[j] for group in groups for n, i in enumerate(group) for j in group[n:]
    )
    widest = max(widths)
    return 8 * between, {t: 8 * sum(widths[i] for i in s) * widest for t, s in reads.items()}


def choose(tiles: Tiles, method: str, nu: int) -> dict[int, tuple[int, ...]]:
    """The ``nu`` source layers of every target layer, in layer order.

    ``r2`` takes the source layers whose single-layer fits explain most. ``greedy`` adds one source
    layer at a time: the one that, beside those already taken, leaves the least residual when the
    map is solved anew.

    Raises:
        ValueError: No such method, no tokens, or fewer source layers than ``nu``.
    """
    if method not in METHODS:
        raise ValueError(f"assignment is {method!r}; it must be one of {', '.join(METHODS)}")
    largest = max(len(sources) for sources in tiles.reads.values())
    if not 1 <= nu <= largest:
        raise ValueError(f"nu is {nu}; it must be 1 to {largest}, the source's layers of one kind")
    if tiles.tokens == 0:
        raise ValueError("no tokens to choose source layers by: the data hold no usable prefix")
    rule = _best_alone if method == "r2" else _greedily
    chosen = rule(tiles, nu)
    return {t: tuple(sorted(sources)) for t, sources in chosen.items()}


def r2_scores(tiles: Tiles) -> dict[tuple[int, int], float]:
    """The share of each target layer explained by each source layer alone, by (source, target)."""
    scores = {}
    for i in sorted({i for sources in tiles.reads.values() for i in sources}):
        whitened = tiles.whitened(i)
        for t in (t for t, sources in tiles.reads.items() if i in sources):
            explained = np.square(whitened.T @ as_numpy(tiles.xy[i, t])).sum()
            total = as_numpy(tiles.yy[t]).sum()
            scores[i, t] = float(explained / total) if total else 1.0
    return scores


def _best_alone(tiles: Tiles, nu: int) -> dict[int, list[int]]:
    scores = r2_scores(tiles)
    return {
        t: sorted(sources, key=lambda i: (-scores[i, t], i))[:nu]
        for t, sources in tiles.reads.items()
    }


def _greedily(tiles: Tiles, nu: int) -> dict[int, list[int]]:
    chosen: dict[int, list[int]] = {}
    for t, sources in tiles.reads.items():
        grams = [tiles.gram(i, i) for i in sources]
        ridge = RIDGE * sum(np.trace(g) for g in grams) / sum(len(g) for g in grams)
        taken: list[int] = []
        while len(taken) < min(nu, len(sources)):
            left = [i for i in sources if i not in taken]
            taken.append(min(left, key=lambda i: (residual(tiles, t, [*taken, i], ridge), i)))
        chosen[t] = taken
    return chosen


def residual(tiles: Tiles, target: int, sources: Sequence[int], ridge: float) -> float:
    """r(S): the share of a target layer that the ridge map from ``sources`` does not explain."""
    moments = tiles.moments(target, sources)
    total = float(moments.yy.sum())
    if not total:
        return 0.0
    solved = np.linalg.solve(moments.xx + ridge * np.eye(len(moments.xx)), moments.xy)
    # This is |Y - X B|^2 for (X^T X + ridge) B = X^T Y.
    explained = float(np.sum(solved * moments.xy)) + ridge * float(np.sum(solved * solved))
    return 1.0 - explained / total
