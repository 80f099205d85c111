"""How well a map of one source layer explains a target layer on held-out documents: R2.

Paper: appendix "Cache linearity and rank, per layer".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvlingo_mlx.backend import mx

import numpy as np

from benchmarks.paper.analysis.corpus import Corpus
from benchmarks.paper.analysis.network import Recipe, fit_network
from benchmarks.paper.analysis.states import States
from benchmarks.paper.analysis.statistics import (
    SignTest,
    Spearman,
    cka,
    fit_linear,
    r2,
    sign_test,
    spearman,
)
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.phases import counted
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
        mlp: Of the two-layer MLP that starts as the linear map, or of the linear map if that scores
            higher, so it is never below ``linear``. None if not asked for.
        network: Of the MLP, even if that is lower than ``linear``.
        epochs: The epochs of training that were kept; 0 if none helped on the stopping set, so
            that the MLP is the linear map.
    """

    linear: float
    affine: float
    mlp: float | None = None
    network: float | None = None
    epochs: int | None = None


@dataclass(frozen=True)
class Summary:
    """The R2 of one side, averaged over target layers (table "linearity"), and its trend.

    Attributes:
        linear: The mean of the linear maps' R2.
        affine: The mean of the affine maps'.
        mlp: The mean of the MLPs'; this and the next three are None without MLPs.
        extra: What the MLPs add to the linear maps.
        rho: The mean over layers of linear / mlp, and not the quotient of their means: only so do
            the table's columns agree. NaN if an MLP explains nothing.
        irreducible: What the MLPs leave unexplained.
        depth: The rank correlation of a layer's depth with its linear R2.
    """

    linear: float
    affine: float
    mlp: float | None
    extra: float | None
    rho: float | None
    irreducible: float | None
    depth: Spearman


def summarise(fits: Sequence[LayerFit]) -> Summary:
    """The means and the trend of one side's layers, from the first to the last."""
    linear, affine = (np.array([getattr(f, kind) for f in fits]) for kind in ("linear", "affine"))
    means = float(linear.mean()), float(affine.mean())
    depth = spearman(np.arange(len(fits)), linear)
    if fits[0].mlp is None:
        return Summary(*means, None, None, None, None, depth)
    mlp = np.array([f.mlp for f in fits], np.float64)
    rho = float((linear / mlp).mean()) if (mlp > 0).all() else float("nan")
    top = float(mlp.mean())
    return Summary(*means, top, top - means[0], rho, 1 - top, depth)


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
    network = fit_network(x_fit, y_fit, recipe)
    # The map that it starts from was fitted on fewer tokens, so untrained it is left out.
    score = r2(network(x_new), y_new, mean) if network.epochs else plain
    return LayerFit(plain, shifted, max(score, plain), score, network.epochs)


def translator_r2(
    translator: Translator, source: States, target: States, scored: np.ndarray
) -> dict[str, list[float]]:
    """The R2 of a translator's own maps on the ``scored`` tokens, by side and target layer.

    Self-distilled maps may score far below zero and still decode well: they were trained on the
    target's predictions from its cache, not on the cache.
    """

    def rows(layers: Sequence[np.ndarray]) -> tuple[mx.array, ...]:
        return tuple(mx.array(x[scored])[None] for x in layers)

    read = KVStates(rows(source.keys), rows(source.values), translator.config.capture, 0, {})
    written = translator.in_full()(read)
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
class Change:
    """The linear R2 of a range of positions minus that of the first one, by target layer.

    Attributes:
        test: The sign test, paired by layer.
        thirds: The mean difference of the first, middle and last third of the layers; NaN for a
            third without any.
    """

    test: SignTest
    thirds: list[float]


@dataclass(frozen=True)
class Bucket:
    """Maps refitted and scored within a range of positions.

    Attributes:
        start: The first position.
        stop: The position after the last one.
        available: The number of tokens in this range that could be fitted on.
        fitted: The number of them that were used, equal for all buckets with a score.
        scored: The number of tokens to score.
        linearity: By side, for each target layer; None, as what follows, if there are too few
            tokens.
        summary: By side.
        cka: CKA with the source layer that each target layer reads, on the fitted tokens; by side.
        change: Against the first bucket with a score, by side; None for that one.
    """

    start: int
    stop: int
    available: int
    fitted: int
    scored: int
    linearity: dict[str, list[LayerFit]] | None = None
    summary: dict[str, Summary] | None = None
    cka: dict[str, list[float]] | None = None
    change: dict[str, Change] | None = None


def by_position(
    source: States,
    target: States,
    corpus: Corpus,
    source_layers: Sequence[int],
    recipe: Recipe | None,
    seed: int,
) -> list[Bucket]:
    """R2 by position in the document (paragraph "Depth x position").

    Every bucket is fitted on the same number of randomly drawn tokens, the number in the scarcest
    bucket: otherwise a map that saw more tokens would score higher at any position. Buckets beyond
    the longest document are left out; buckets with too few tokens have no score. A bucket that
    alone has a score gets no MLPs: they would be compared with nothing.
    """
    widest = max(source.side(side)[s].shape[1] for side in SIDES for s in set(source_layers))
    spans = [(a, b) for a, b in pairwise(POSITIONS) if a <= corpus.positions.max()]
    inside = [(corpus.positions >= a) & (corpus.positions < b) for a, b in spans]
    fitted = [np.flatnonzero(rows & ~corpus.scored) for rows in inside]
    scored = [np.flatnonzero(rows & corpus.scored) for rows in inside]
    buckets = [
        Bucket(*span, len(f), 0, len(s)) for span, f, s in zip(spans, fitted, scored, strict=True)
    ]
    enough = [
        i
        for i, b in enumerate(buckets)
        if b.available >= TOKENS_PER_WIDTH * widest and b.scored >= FEWEST_SCORED
    ]
    fewest = min((len(fitted[i]) for i in enough), default=0)
    recipe = recipe if len(enough) > 1 else None
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(f)[:fewest] for f in fitted]
    first: Bucket | None = None
    for i in counted("fitting by position", enough):
        empty = replace(buckets[i], fitted=fewest)
        rows = chosen[i], scored[i]
        buckets[i] = _fill(empty, (source, target), source_layers, rows, recipe)
        first = first or buckets[i]
        if first is not buckets[i]:
            change = {side: _change(buckets[i], first, side) for side in SIDES}
            buckets[i] = replace(buckets[i], change=change)
    return buckets


def _fill(
    bucket: Bucket,
    pair: tuple[States, States],
    source_layers: Sequence[int],
    rows: tuple[np.ndarray, np.ndarray],
    recipe: Recipe | None,
) -> Bucket:
    """The bucket with its maps, fitted on the first of ``rows`` and scored on the second."""
    tokens = np.concatenate(rows)
    scored = np.arange(len(tokens)) >= len(rows[0])
    fits: dict[str, list[LayerFit]] = {side: [] for side in SIDES}
    alike: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in SIDES:
        for layer, source_layer in enumerate(source_layers):
            x = pair[0].side(side)[source_layer][tokens]
            y = pair[1].side(side)[layer][tokens]
            fits[side].append(fit_layer(x, y, scored, recipe))
            alike[side].append(cka(x[~scored], y[~scored]))
    summary = {side: summarise(fits[side]) for side in SIDES}
    return replace(bucket, linearity=fits, summary=summary, cka=alike)


def _change(bucket: Bucket, first: Bucket, side: str) -> Change:
    here, there = (np.array([f.linear for f in (b.linearity or {})[side]]) for b in (bucket, first))
    thirds = [part.mean() if len(part) else np.nan for part in np.array_split(here - there, 3)]
    return Change(sign_test(here - there), [float(mean) for mean in thirds])
