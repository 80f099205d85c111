"""Statistics of caches, computed with NumPy in float64.

Paper: appendix "Motivating measurements: layer correspondence, linearity and rank". Keys or values
of a layer are (T, d): T tokens, all heads side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.phases import counted

RIDGE = 1e-3  # relative to the mean diagonal of the inputs' Gram matrix (paragraph "Protocol")


# ---- layer correspondence ---------------------------------------------------------------


def cka_grid(source: Sequence[np.ndarray], target: Sequence[np.ndarray]) -> np.ndarray:
    """Linear centred kernel alignment of each target layer (rows) with each source layer (columns).

    Of point clouds X and Y over the same tokens it is ||X^T Y||_F^2 / (||X^T X||_F ||Y^T Y||_F),
    both centred. It is 1 for clouds that differ by an orthogonal map and a scale, and NaN if a
    cloud is a single point. Only one layer of each side is in float64 at a time.
    """
    own = np.array([_gram_norm(_centred(x)) for x in source])
    rows = []
    for y in map(_centred, counted("comparing layers", target)):
        cross = np.array([np.linalg.norm(_centred(x).T @ y) ** 2 for x in source])
        with np.errstate(divide="ignore", invalid="ignore"):
            rows.append(cross / (own * _gram_norm(y)))
    return np.array(rows)


def _gram_norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.T @ x))


def diagonal_of(rows: int, columns: int) -> np.ndarray:
    """The column at each row's relative depth, which is the row itself for equal depths."""
    return np.array([layers[0] for layers in relative_depth(columns, rows).keys])


@dataclass(frozen=True)
class Correspondence:
    """A grid summarised by two numbers (figure "Diagonal contrast").

    Attributes:
        contrast: The mean on the diagonal minus the mean off it.
        offset: The mean distance of each row's largest entry from the diagonal, in layers.
    """

    contrast: float
    offset: float


def correspondence(grid: np.ndarray) -> Correspondence:
    """How strongly a grid of layers peaks on its relative-depth diagonal."""
    diagonal = diagonal_of(*grid.shape)
    on = np.zeros(grid.shape, bool)
    on[np.arange(len(grid)), diagonal] = True
    off = grid[~on].mean() if (~on).any() else np.nan
    offsets = np.abs(np.nanargmax(grid, axis=1) - diagonal)
    return Correspondence(float(grid[on].mean() - off), float(offsets.mean()))


# ---- rank -------------------------------------------------------------------------------


def spectrum(x: np.ndarray) -> np.ndarray:
    """The eigenvalues of the tokens' covariance, largest first; negative ones are set to 0."""
    x = _centred(x)
    values = np.linalg.eigvalsh(x.T @ x / len(x))[::-1]
    return np.maximum(values, 0.0)


def effective_rank(eigenvalues: np.ndarray) -> float:
    """The effective rank of Roy and Vetterli: e to the entropy of the normalised spectrum."""
    share = eigenvalues[eigenvalues > 0] / eigenvalues.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def top_share(eigenvalues: np.ndarray) -> float:
    """The share of the variance along the first direction."""
    return float(eigenvalues.max() / eigenvalues.sum())


# ---- linearity --------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearFit:
    """A ridge least-squares map: y = x @ weight + bias, weight (in, out)."""

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.float64) @ self.weight + self.bias


def fit_linear(x: np.ndarray, y: np.ndarray, *, affine: bool = False) -> LinearFit:
    """Fit by least squares with the diagnostic's small ridge, with or without an intercept."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if affine:
        fit = fit_linear(x - x.mean(axis=0), y - y.mean(axis=0))
        return LinearFit(fit.weight, y.mean(axis=0) - x.mean(axis=0) @ fit.weight)
    gram = x.T @ x
    ridge = RIDGE * np.trace(gram) / len(gram)
    weight = np.linalg.solve(gram + ridge * np.eye(len(gram)), x.T @ y)
    return LinearFit(weight, np.zeros(y.shape[1]))


def r2(predicted: np.ndarray, y: np.ndarray, mean: np.ndarray) -> float:
    """The explained share of the variance around ``mean`` (the mean of the fitting tokens)."""
    y = np.asarray(y, np.float64)
    return float(1.0 - ((y - predicted) ** 2).sum() / ((y - mean) ** 2).sum())


# ---- differences ------------------------------------------------------------------------


@dataclass(frozen=True)
class SignTest:
    """Paired differences, and whether one sign is more frequent than chance makes it.

    Attributes:
        above: The number of differences above zero.
        below: The number of differences below zero.
        ties: The number of differences that are zero; the test leaves them out.
        mean: The mean difference, ties included.
        p: The two-sided exact p, of as many throws of a fair coin as there are without ties.
    """

    above: int
    below: int
    ties: int
    mean: float
    p: float


def sign_test(differences: Sequence[float] | np.ndarray) -> SignTest:
    """The exact two-sided sign test of paired differences, of layers or of a table's cells.

    ``mean`` and ``p`` are NaN where a difference is NaN, which counts as neither sign nor tie.

    Raises:
        ValueError: There is no difference.
    """
    found = np.asarray(differences, np.float64)
    if not found.size:
        raise ValueError("a sign test needs at least one difference; none was given")
    above, below, ties = (int(flags.sum()) for flags in (found > 0, found < 0, found == 0))
    throws = above + below
    ways = sum(math.comb(throws, k) for k in range(min(above, below) + 1))
    p = math.nan if np.isnan(found).any() else min(1.0, 2 * ways / 2**throws)
    return SignTest(above, below, ties, float(found.mean()), p)


# ---- heads ------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadAlignment:
    """The target heads to which source heads' maps go.

    Paper: appendix "Head alignment in released Qwen3 pairs".

    Attributes:
        grid: (source heads, target heads), rows sum to one.
        diagonal: The mean diagonal of the grid.
        null: The mean diagonal under random permutations of the target heads, as mean and standard
            deviation.
        p: The share of permutations whose diagonal is at least as large.
    """

    grid: np.ndarray
    diagonal: float
    null: tuple[float, float]
    p: float


def head_alignment(
    maps: Sequence[np.ndarray],
    source_heads: int,
    target_heads: int,
    *,
    permutations: int = 100_000,
    seed: int = 0,
) -> HeadAlignment:
    """The Frobenius norms of a map's head-to-head blocks, averaged over layers.

    Args:
        maps: The map (out, in) of each layer, as the format stores it, from one source layer.
        source_heads: The number of blocks into which the columns are cut.
        target_heads: The number of blocks into which the rows are cut.
        permutations: The number of permutations for the null.
        seed: The seed of the permutations.
    """
    norms = [_block_norms(m, source_heads, target_heads) for m in maps]
    grid = np.mean(norms, axis=0)
    grid = grid / grid.sum(axis=1, keepdims=True)
    count = min(grid.shape)
    rows, rng = np.arange(count), np.random.default_rng(seed)
    orders = rng.permuted(np.tile(np.arange(target_heads), (permutations, 1)), axis=1)
    null = grid[rows, orders[:, :count]].mean(axis=1)
    diagonal = float(grid[rows, rows].mean())
    # The tolerance covers rounding of equal sums in different orders, and of blocks that should be
    # zero. Rows sum to 1.
    p = float((null >= diagonal - 1e-12).mean())
    return HeadAlignment(grid, diagonal, (float(null.mean()), float(null.std())), p)


def _block_norms(weight: np.ndarray, source_heads: int, target_heads: int) -> np.ndarray:
    """The Frobenius norms of an (out, in) map's blocks, (source heads, target heads)."""
    width = weight.shape[1] // source_heads
    blocks = np.asarray(weight, np.float64).reshape(target_heads, -1, source_heads, width)
    return np.linalg.norm(blocks, axis=(1, 3)).T


def _centred(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x - x.mean(axis=0)
