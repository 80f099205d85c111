"""How well a map of one source layer explains a target layer on held-out documents: R2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.analysis.corpus import Corpus
from kvlingo_mlx.analysis.network import Recipe, fit_correction
from kvlingo_mlx.analysis.states import States
from kvlingo_mlx.analysis.statistics import fit_linear, r2
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.translators.base import Translator

POSITIONS = (0, 256, 1024, 4096, 16_384)  # bucket edges (paragraph "Depth x position")
# The map of a bucket has, per output, as many unknowns as its input is wide.
TOKENS_PER_WIDTH, FEWEST_SCORED = 4, 64


@dataclass(frozen=True)
class LayerFit:
    """The R2 of one side of a target layer on held-out documents, by kind of map.

    Attributes:
        linear: Of the linear map without intercept.
        affine: Of the linear map with intercept.
        mlp: Of the linear map with a two-layer MLP beside it, or of the linear map alone if that
            scores higher, so it is never below ``linear``. None if not asked for.
        network: Of the linear map with the MLP, even if that is lower than ``linear``.
        epochs: The epochs of training that were kept; 0 if the MLP did not help on the stopping
            set.
    """

    linear: float
    affine: float
    mlp: float | None = None
    network: float | None = None
    epochs: int | None = None


def fit_layer(x: np.ndarray, y: np.ndarray, scored: np.ndarray, recipe: Recipe | None) -> LayerFit:
    """Fit on the tokens that are not ``scored``, and score on the others.

    Args:
        x: (T, in) states of the source layer.
        y: (T, out) states of the target layer.
        scored: (T,) flags.
        recipe: The recipe of the MLP; None leaves the MLP out.
    """
    x_fit, y_fit, x_new, y_new = x[~scored], y[~scored], x[scored], y[scored]
    mean = y_fit.mean(axis=0, dtype=np.float64)
    linear, affine = fit_linear(x_fit, y_fit), fit_linear(x_fit, y_fit, affine=True)
    plain, shifted = (r2(fit(x_new), y_new, mean) for fit in (linear, affine))
    if recipe is None:
        return LayerFit(plain, shifted)
    correction = fit_correction(x_fit, y_fit - linear(x_fit), recipe)
    network = r2(linear(x_new) + correction(x_new), y_new, mean)
    return LayerFit(plain, shifted, max(network, plain), network, correction.epochs)


def translator_r2(
    translator: Translator, source: States, target: States, scored: np.ndarray
) -> dict[str, list[float]]:
    """The R2 of a translator's own maps on the ``scored`` tokens, by side and target layer.

    Self-distilled maps may score far below zero and still decode well: they were trained on the
    target's predictions from its cache, not on the cache.
    """

    def rows(layers: Sequence[np.ndarray]) -> tuple[mx.array, ...]:
        return tuple(mx.array(x[scored])[None] for x in layers)

    read = KVStates(rows(source.keys), rows(source.values), translator.config.capture, 0)
    written = translator(read)
    scores = {}
    for side, groups in zip(SIDES, (written.keys, written.values), strict=True):
        found = {}
        for group in groups:
            for layer, heads in zip(group.layers, group.states, strict=True):
                y = target.side(side)[layer]
                tokens = np.array(heads[0].swapaxes(0, 1).astype(mx.float32))
                mean = y[~scored].mean(axis=0, dtype=np.float64)
                found[layer] = r2(tokens.reshape(y[scored].shape), y[scored], mean)
        scores[side] = [found[layer] for layer in sorted(found)]
    return scores


@dataclass(frozen=True)
class Bucket:
    """The linear map, refitted and scored within a range of positions.

    Attributes:
        start: The first position.
        stop: The position after the last one.
        available: The number of tokens in this range that could be fitted on.
        fitted: The number of them that were used, equal for all buckets with a score.
        scored: The number of tokens to score.
        r2: By side, for each target layer; None if there are too few tokens.
    """

    start: int
    stop: int
    available: int
    fitted: int
    scored: int
    r2: dict[str, list[float]] | None


def by_position(
    source: States,
    target: States,
    corpus: Corpus,
    source_layers: Sequence[int],
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Bucket]:
    """The linear R2 (no intercept) by position in the document.

    Every bucket is fitted on the same number of randomly drawn tokens, the number in the scarcest
    bucket: otherwise a map that saw more tokens would score higher at any position. Buckets beyond
    the longest document are left out; buckets with too few tokens have no score.
    """
    widest = max(source.side(side)[s].shape[1] for side in SIDES for s in set(source_layers))
    spans = [(a, b) for a, b in pairwise(POSITIONS) if a <= corpus.positions.max()]
    inside = [(corpus.positions >= a) & (corpus.positions < b) for a, b in spans]
    fitted = [np.flatnonzero(rows & ~corpus.scored) for rows in inside]
    scored = [np.flatnonzero(rows & corpus.scored) for rows in inside]
    enough = [
        len(f) >= TOKENS_PER_WIDTH * widest and len(s) >= FEWEST_SCORED
        for f, s in zip(fitted, scored, strict=True)
    ]
    fewest = min((len(f) for f, kept in zip(fitted, enough, strict=True) if kept), default=0)
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(f)[:fewest] for f in fitted]
    scores: list[dict[str, list[float]]] = [{side: [] for side in SIDES} for _ in spans]
    for side in SIDES:
        for layer, source_layer in enumerate(source_layers):
            x, y = source.side(side)[source_layer], target.side(side)[layer]
            for index in np.flatnonzero(enough):
                scores[index][side].append(_r2_on(x, y, chosen[index], scored[index]))
            progress()
    return [
        Bucket(*span, len(f), fewest if kept else 0, len(s), score if kept else None)
        for span, f, s, kept, score in zip(spans, fitted, scored, enough, scores, strict=True)
    ]


def _r2_on(x: np.ndarray, y: np.ndarray, fitted: np.ndarray, scored: np.ndarray) -> float:
    fit = fit_linear(x[fitted], y[fitted])
    return r2(fit(x[scored]), y[scored], y[fitted].mean(axis=0, dtype=np.float64))
