"""How well a map of one source layer explains a target layer on held-out documents: R2.

Paper: appendix "Cache linearity and rank, per layer".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.paper.analysis.network import Recipe, fit_network
from benchmarks.paper.analysis.statistics import fit_linear, r2


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
    """The R2 of one side, averaged over target layers (table "linearity").

    Attributes:
        linear: The mean of the linear maps' R2.
        affine: The mean of the affine maps'.
        mlp: The mean of the MLPs'; this and the next three are None without MLPs.
        extra: What the MLPs add to the linear maps.
        rho: The mean over layers of linear / mlp, and not the quotient of their means: only so do
            the table's columns agree. NaN if an MLP explains nothing.
        irreducible: What the MLPs leave unexplained.
    """

    linear: float
    affine: float
    mlp: float | None = None
    extra: float | None = None
    rho: float | None = None
    irreducible: float | None = None


def summarise(fits: Sequence[LayerFit]) -> Summary:
    """The means of one side's layers."""
    linear, affine = (np.array([getattr(f, kind) for f in fits]) for kind in ("linear", "affine"))
    means = float(linear.mean()), float(affine.mean())
    if fits[0].mlp is None:
        return Summary(*means)
    mlp = np.array([f.mlp for f in fits], np.float64)
    rho = float((linear / mlp).mean()) if (mlp > 0).all() else float("nan")
    top = float(mlp.mean())
    return Summary(*means, top, top - means[0], rho, 1 - top)


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
