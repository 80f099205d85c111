"""Choose source layers from data: the R2 and greedy assignments. NumPy only.

Paper: appendix "Qwen3-0.6B/8B and Qwen3-1.7B/4B, pretrained", paragraphs of these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvlingo_mlx.format.assignment import attention_groups
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.stage1.closed_form import RELATIVE_TOLERANCE, Moments

METHODS = ("r2", "greedy")
# The paper gives no value for its ridge; this share of the candidates' mean square breaks ties.
RIDGE = 1e-6


def candidates(
    source: Sequence[LayerGeometry], target: Sequence[LayerGeometry]
) -> dict[int, list[int]]:
    """For each target layer, all source layers of its kind, or all that it can read without them.

    Raises:
        IncompatibleTranslatorError: The source has no layer that a target layer can read.
    """
    return {t: theirs for theirs, ours in attention_groups(source, target) for t in ours}


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
    outputs = np.arange(moments.output_width)
    while len(taken) < min(nu, len(columns)):
        left = [i for i in sorted(columns) if i not in taken]
        residuals = [
            residual(
                moments.block(np.concatenate([columns[j] for j in sorted([*taken, i])]), outputs),
                ridge,
            )
            for i in left
        ]
        taken.append(left[int(np.argmin(residuals))])
    return taken


def residual(moments: Moments, ridge: float) -> float:
    """The share of a map's outputs that the ridge map does not explain."""
    total = float(moments.yy.sum())
    if not total:
        return 0.0
    solved = np.linalg.solve(moments.xx + ridge * np.eye(len(moments.xx)), moments.xy)
    # This is |Y - X B|^2 for (X^T X + ridge) B = X^T Y.
    explained = float(np.sum(solved * moments.xy)) + ridge * float(np.sum(solved * solved))
    return 1.0 - explained / total
