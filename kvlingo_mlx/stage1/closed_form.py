"""Stage 1: from second moments to maps, in float64. NumPy only.

Paper: section "Training the translator", equation (3.2).

The MLX and the CUDA path fill the same ``Moments``, so their results cannot drift apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvlingo_mlx.format.maps import head_map_of, maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.bilinear import STATES

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
EXACT = 1e-12  # the share of the squares that counts as no error


@dataclass
class Moments:
    """Sums over tokens of w x x^T, w x y^T and, for each output, w y^2, for one map.

    x is a token's input (the states of the assigned source layers, concatenated), y is the target's
    own state, and w is the token's weight under the fitting norm (1 for Frobenius).
    """

    input_width: int
    output_width: int
    tokens: int = 0
    xx: np.ndarray = field(init=False)
    xy: np.ndarray = field(init=False)
    yy: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.xx = np.zeros((self.input_width, self.input_width))
        self.xy = np.zeros((self.input_width, self.output_width))
        self.yy = np.zeros(self.output_width)

    def add(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add tokens: ``x`` (T, input), ``y`` (T, output), ``weights`` (T,) or None.

        Products are taken in float64: float32 sums leave noise of 1e-7 of the largest eigenvalue,
        which is above the tolerance at which eigenvalues count as zero.
        """
        x64 = np.asarray(x, np.float64)
        y64 = np.asarray(y, np.float64)
        weighted = x64 if weights is None else x64 * np.asarray(weights, np.float64)[:, None]
        self.tokens += len(x64)
        self.xx += weighted.T @ x64
        self.xy += weighted.T @ y64
        squares = np.square(y64)
        self.yy += squares.sum(axis=0) if weights is None else np.asarray(weights) @ squares

    @property
    def finite(self) -> bool:
        """Whether all sums of products are numbers."""
        return bool(np.isfinite(self.xx).all() and np.isfinite(self.xy).all())

    def block(self, rows: np.ndarray, columns: np.ndarray) -> Moments:
        """The moments of a map that reads only ``rows`` of x and writes only ``columns`` of y."""
        part = Moments(len(rows), len(columns), self.tokens)
        part.xx = self.xx[np.ix_(rows, rows)]
        part.xy = self.xy[np.ix_(rows, columns)]
        part.yy = self.yy[columns]
        return part


@dataclass(frozen=True)
class Solution:
    """A fitted map.

    Attributes:
        weight: (output, input).
        rank: The number of input directions that the data span.
        ridge: The ridge, as a share of the inputs' mean square.
    """

    weight: np.ndarray
    rank: int
    ridge: float = 0.0


def checked_ridge(ridge: float | None) -> float | None:
    """A ridge that :func:`solve` takes.

    Raises:
        ValueError: It is negative, or not finite.
    """
    if ridge is not None and not 0 <= ridge < np.inf:
        raise ValueError(
            f"ridge is {ridge!r}; give 0 or more, or leave it out, and one is chosen for each map"
        )
    return ridge


def solve(
    moments: Moments,
    tolerance: float = RELATIVE_TOLERANCE,
    ridge: float | None = 0.0,
    eigh: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] = np.linalg.eigh,
) -> Solution:
    """The minimiser of E w |M x - y|^2 + ridge |M|^2; of least norm where that leaves a choice.

    Eigenvalues of E[x x^T] below ``tolerance`` times the largest count as zero
    (paper: appendix "Training protocol", paragraph "Stage 1"; it has no ridge).

    Args:
        moments: The sums over all tokens.
        tolerance: The eigenvalue that counts as zero, as a share of the largest.
        ridge: As a share of the inputs' mean square; None chooses one by generalised
            cross-validation (Golub, Heath and Wahba, 1979).
        eigh: Decomposes the moments of the inputs, as :func:`numpy.linalg.eigh` does.

    Raises:
        ValueError: No token was added, or a moment is not finite.
    """
    if moments.tokens == 0:
        raise ValueError("no tokens to fit on: the data hold no usable prefix")
    if not moments.finite:
        raise ValueError("the moments hold NaN or Inf: a model's keys or values overflowed")
    eigenvalues, vectors = eigh(moments.xx)
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

    Args:
        eigenvalues: Those of the sum of x x^T that count.
        squares: |sum of y x^T v|^2 for each of their eigenvectors v.
        total: The sum of |y|^2.
        tokens: The number of tokens.
        mean: The mean of all eigenvalues.
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


class Decomposed:
    """Eigenvalues and vectors of the latest matrix; equal ones are not decomposed again.

    Maps that read the same source layers under one norm have the same moments of their inputs: all
    of them where every source layer is read, and those at both ends of a band.
    """

    def __init__(self) -> None:
        self._latest: tuple[np.ndarray, tuple[np.ndarray, np.ndarray]] | None = None

    def __call__(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._latest is None or not np.array_equal(self._latest[0], matrix):
            values, vectors = np.linalg.eigh(matrix)
            self._latest = matrix, (values, vectors)
        return self._latest[1]


def solve_maps(
    config: TranslatorConfig,
    moments: Iterable[tuple[str, Moments]],
    solved: Callable[[], None] = lambda: None,
    ridge: float | None = 0.0,
) -> tuple[dict[str, np.ndarray], list[Solution]]:
    """Solve every map; return the tensors by their names in the format, and the solutions.

    ``solved`` is called after each map, to report progress: wide maps take long.

    Raises:
        ValueError: No token was added, or a sum is not finite; the message names the map.
    """
    weights: dict[str, np.ndarray] = {}
    found: list[Solution] = []
    eigh = Decomposed()
    for name, sums in moments:
        blocks = _blocks(config, name)
        if not sums.finite:
            raise ValueError(
                f"the sums for the map {name} hold NaN or Inf: the keys or values that it reads of "
                f"{config.source.name}, or those of {config.target.name}, overflowed"
            )
        parts = [sums if block is None else sums.block(*block) for block in blocks]
        solutions = [solve(part, ridge=ridge, eigh=eigh) for part in parts]
        matrices = [solution.weight for solution in solutions]
        weights[f"{name}.weight"] = matrices[0] if config.head_mixing else np.stack(matrices)
        found += solutions
        solved()
    return weights, found


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
    return sum(len(_blocks(config, m.name)) * pace * m.inputs**3 for m in maps_of(config))


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

    Args:
        config: The fitted translator's config.
        texts: The number of texts it was fitted on.
        tokens: The number of tokens in them.
        rank: The smallest number of input directions that the data of any map spanned.
    """
    wanted = unknowns(config)
    if tokens >= ENOUGH * wanted:
        if not config.state_maps or texts >= STATES:
            return None
        return (
            f"{texts} texts are few for maps of states, which are made of one state of each text; "
            f"{STATES} would do"
        )
    least = min(m.inputs for m in maps_of(config))
    seen = f" (rank {rank:,})" if rank < least else ""
    return f"only {tokens:,} tokens for {wanted:,} inputs{seen}: give at least {ENOUGH * wanted:,}"


def _blocks(config: TranslatorConfig, name: str) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """The inputs and outputs of each block of a map: one block (None), or one per target head."""
    if config.head_mixing:
        return [None]
    (m,) = (m for m in maps_of(config) if m.name == name)
    blocks: list[tuple[np.ndarray, np.ndarray] | None] = []
    for head, source_head in enumerate(head_map_of(config)):
        rows, start = [], 0
        for side, s in m.reads:
            geometry = config.source.layers[s]
            dim = geometry.head_dim(side)
            rows.append(start + source_head * dim + np.arange(dim))
            start += geometry.width(side)
        dim = m.outputs
        blocks.append((np.concatenate(rows), head * dim + np.arange(dim)))
    return blocks
