"""Stage 1: from second moments to maps, in float64. NumPy only.

Paper: section "Training the translator", equation (3.2); appendix "Qwen3-0.6B/8B and
Qwen3-1.7B/4B, pretrained", for the choice of source layers by R2 or greedily.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.format.maps import Map, first_readers, head_map_of, maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.bilinear import STATES

Eigen = tuple[np.ndarray, np.ndarray]

RELATIVE_TOLERANCE = 1e-8
SMALL = 256  # unknowns of the decomposition by which the time of larger ones is guessed
# Tokens per unknown of one regression; the unknowns are the input width of a map. Measured on the
# zoo without a ridge (paper/LOG.md, "how much data"): at one token per unknown a fit is worse
# than no cache at all, and below that it recalls nothing. At 32, recall equals that at 256, and
# most of the KL is gained.
FEWEST, ENOUGH = 1, 32
READ = 64  # tokens per unknown at which a fit stops to read: twice enough; 128 gain 0.02 of the KL
RIDGES = (0.0, *(10.0 ** (power / 2) for power in range(-12, 5)))
# Tokens of one text are alike, so a fit learns less from them than from as many independent ones.
# Taken as half as many, the ridge that is chosen is near the best in hindsight, from 1.5 tokens per
# unknown to 32 (paper/LOG.md, "a ridge").
ALIKE = 2
DAMPING = 1e-3  # by this share of their mean eigenvalues are raised to be divided by
EXACT = 1e-12  # the share of the squares that counts as no error
METHODS = ("r2", "greedy")  # by which source layers are chosen from data
# The paper gives no value for the ridge of the greedy choice; this share of the candidates' mean
# square breaks ties.
RIDGE = 1e-6


@dataclass(frozen=True)
class Moments:
    """Sums over tokens of w x x^T, w x y^T and, for each output, w y^2, for one map.

    x is a token's input (the states of the assigned source layers, concatenated), y is the target's
    own state, and w is the token's weight under the fitting norm (1 for Frobenius).
    """

    xx: np.ndarray  # (input, input), as all in float64
    xy: np.ndarray  # (input, output)
    yy: np.ndarray  # (output,)
    tokens: int
    x: np.ndarray | None = None  # (input,): the sum of w x, where it is known

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> Moments:
        """The moments of ``x`` (T, input), ``y`` (T, output) and ``weights`` (T,), or None."""
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        w = np.ones(len(x)) if weights is None else np.asarray(weights, np.float64)
        return cls((x.T * w) @ x, (x.T * w) @ y, w @ np.square(y), len(x), w @ x)

    @property
    def finite(self) -> bool:
        """Whether all sums of products are numbers."""
        return bool(np.isfinite(self.xx).all() and np.isfinite(self.xy).all())

    def errors(self, weight: np.ndarray) -> np.ndarray:
        """The weighted mean square error of a map (output, input), for each output."""
        left = self.yy - 2 * (weight * self.xy.T).sum(1) + ((weight @ self.xx) * weight).sum(1)
        return np.maximum(left, 0.0) / self.tokens

    def block(self, rows: np.ndarray, columns: Any = slice(None)) -> Moments:
        """The moments of a map that reads only ``rows`` of x and writes only ``columns`` of y."""
        xx, xy = self.xx[np.ix_(rows, rows)], self.xy[rows][:, columns]
        means = None if self.x is None else self.x[rows]
        return Moments(xx, xy, self.yy[columns], self.tokens, means)


@dataclass(frozen=True)
class Solution:
    """A fitted map."""

    weight: np.ndarray  # (output, input)
    rank: int  # the input directions that the data span
    ridge: float  # as a share of the inputs' mean square


def solve(
    moments: Moments,
    tolerance: float = RELATIVE_TOLERANCE,
    ridge: float | None = 0.0,
    eigen: Eigen | None = None,
) -> Solution:
    """The minimiser of E w |M x - y|^2 + ridge |M|^2; of least norm where that leaves a choice.

    Eigenvalues of E[x x^T] below ``tolerance`` times the largest count as zero
    (paper: appendix "Training protocol", paragraph "Stage 1"; it has no ridge).

    Args:
        ridge: As a share of the inputs' mean square; None chooses one by generalised
            cross-validation (Golub, Heath and Wahba, 1979).
        eigen: Eigenvalues and vectors of the inputs' moments, if they are known.

    Raises:
        ValueError: No token was added, or a moment is not finite.
    """
    if moments.tokens == 0:
        raise ValueError("no tokens to fit on: the data hold no usable prefix")
    if not moments.finite:
        raise ValueError("the moments hold NaN or Inf: a model's keys or values overflowed")
    eigenvalues, vectors = eigen or np.linalg.eigh(moments.xx)
    kept = eigenvalues > tolerance * max(eigenvalues[-1], 0.0)
    basis, found = vectors[:, kept], eigenvalues[kept]
    cross = moments.xy.T @ basis
    mean = float(np.trace(moments.xx)) / len(moments.xx)
    if ridge is None:
        squares, total = np.square(cross).sum(axis=0), float(moments.yy.sum())
        ridge = _chosen(found, squares, total, moments.tokens, mean)
    weight = cross / (found + ridge * mean) @ basis.T
    return Solution(weight, int(kept.sum()), ridge)


def _chosen(
    eigenvalues: np.ndarray, squares: np.ndarray, total: float, tokens: int, mean: float
) -> float:
    """The ridge of least generalised cross-validation error.

    ``eigenvalues`` are those of the sum of x x^T that count, ``mean`` that of all; ``squares`` are
    |sum of y x^T v|^2 for each of their eigenvectors v, and ``total`` is the sum of |y|^2.
    """
    best = np.inf, RIDGES[-1]
    for ridge in RIDGES:
        above = eigenvalues + ridge * mean
        error = max(0.0, total - float((squares * (2 / above - eigenvalues / above**2)).sum()))
        freedom = float((eigenvalues / above).sum())
        if error <= EXACT * total and freedom < tokens:
            return ridge  # the map is linear, and is determined
        if freedom < tokens / ALIKE:
            best = min(best, (error / (1 - ALIKE * freedom / tokens) ** 2, ridge))
    return best[1]


def white(moments: Moments, eigen: Eigen | None = None) -> np.ndarray:
    """The symmetric A for which A x is white: E[A x x^T A] = 1, but for what is nearly constant."""
    eigenvalues, vectors = eigen or np.linalg.eigh(moments.xx)
    found = np.maximum(eigenvalues, 0.0) / moments.tokens
    return (vectors / np.sqrt(found + DAMPING * max(found.mean(), EXACT))) @ vectors.T


def coordinates(
    parts: Sequence[Moments], solved: Sequence[Solution], eigen: Eigen | None, first: bool
) -> dict[str, np.ndarray]:
    """In which the blocks of a map learn; ``training.coordinates`` reads them by name.

    ``first`` says that no map before it reads the same states, whose white matrix it would share.
    """
    errors = np.sqrt([part.errors(each.weight) for part, each in zip(parts, solved, strict=True)])
    found = {"/size": errors}
    if first:
        found["/white"] = np.stack([white(part, eigen) for part in parts])
        found["/mean"] = np.stack([part.x / part.tokens for part in parts if part.x is not None])
    return {name: array.astype(np.float32) for name, array in found.items()}


def blocks_of(config: TranslatorConfig, m: Map) -> list[tuple[np.ndarray, np.ndarray]]:
    """The inputs and outputs of each block of a head-wise map, one for each target head."""
    blocks = []
    for head, source_head in enumerate(head_map_of(config)):
        rows, start = [], 0
        for side, s in m.reads:
            geometry = config.source.layers[s]
            dim = geometry.head_dim(side)
            rows.append(start + source_head * dim + np.arange(dim))
            start += geometry.width(side)
        blocks.append((np.concatenate(rows), head * m.outputs + np.arange(m.outputs)))
    return blocks


def unknowns(config: TranslatorConfig) -> int:
    """The unknowns per output of the map with the most inputs: its input width.

    A head-wise map reads one source head only.
    """
    return max(m.inputs for m in maps_of(config))


def solving_seconds(config: TranslatorConfig) -> float:
    """About how long one process solves all maps on this machine, by a small decomposition."""
    small = np.eye(SMALL)
    started = time.perf_counter()
    np.linalg.eigh(small + small[::-1])
    pace = (time.perf_counter() - started) / SMALL**3
    first = set(first_readers(config).values())  # whose decomposition others share
    return sum((m.heads or 1) * pace * m.inputs**3 for m in maps_of(config) if m.name in first)


def check_tokens(config: TranslatorConfig, tokens: int) -> None:
    """Refuse (ValueError) a fit on fewer tokens than unknowns, whose result is arbitrary."""
    wanted = unknowns(config)
    if tokens < FEWEST * wanted:
        raise ValueError(
            f"the data hold {tokens:,} tokens to fit on, and a map has {wanted:,} inputs, so the "
            f"fit would be arbitrary; give at least {ENOUGH * wanted:,} tokens"
        )


def shortage(config: TranslatorConfig, texts: int, tokens: int, rank: int) -> str | None:
    """A note for users about a fit on too little; None if there was enough.

    It was fitted on so many ``texts`` and ``tokens``; ``rank`` is the smallest number of input
    directions that the data of any map spanned.
    """
    wanted = unknowns(config)
    if tokens < ENOUGH * wanted:
        seen = f" (rank {rank:,})" if rank < min(m.inputs for m in maps_of(config)) else ""
        return (
            f"only {tokens:,} tokens for {wanted:,} inputs{seen}: give at least {ENOUGH * wanted:,}"
        )
    if config.state_maps and texts < STATES:
        return (
            f"{texts} texts are few for maps of states, which are made of one state of each text; "
            f"{STATES} would do"
        )
    return None


def r2(moments: Moments) -> float:
    """The share of a map's outputs that its inputs explain."""
    eigenvalues, vectors = np.linalg.eigh(moments.xx)
    kept = eigenvalues > RELATIVE_TOLERANCE * max(eigenvalues[-1], 0.0)
    whitened = vectors[:, kept] / np.sqrt(eigenvalues[kept])
    explained, total = np.square(whitened.T @ moments.xy).sum(), moments.yy.sum()
    return float(explained / total) if total else 1.0


def greedy(moments: Moments, columns: Mapping[int, np.ndarray], nu: int) -> list[int]:
    """``nu`` source layers, one after the other: each leaves the least residual beside the former.

    ``columns`` are the input columns of each candidate. Of equal ones the first is taken.
    """
    ridge = RIDGE * float(np.trace(moments.xx)) / len(moments.xx)
    taken: list[int] = []

    def residual(layer: int) -> float:
        """|Y - X B|^2 for (X^T X + ridge) B = X^T Y, without |Y|^2."""
        own = moments.block(np.concatenate([columns[j] for j in sorted([*taken, layer])]))
        solved = np.linalg.solve(own.xx + ridge * np.eye(len(own.xx)), own.xy)
        return -float(np.sum(solved * own.xy)) - ridge * float(np.sum(solved * solved))

    while len(taken) < min(nu, len(columns)):
        taken.append(min((i for i in sorted(columns) if i not in taken), key=residual))
    return taken
