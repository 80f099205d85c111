"""Maps of recurrent states in closed form: alternating least squares, head by head. NumPy only.

A target head's state is fitted by the sum of L S R over the source layers that it reads. With R
given, L is a linear regression with a ridge, and R is one with L given. Both are solved in turns,
from R = 1 on. States are wanted of many texts and lengths, since one state alone fits anything.
"""

from collections.abc import Mapping

import numpy as np

from kvlingo_mlx.format.maps import StateMap

# Measured on the zoo's hybrids (paper/LOG.md, "hybrids distilled"): distilled from 64 states
# with this ridge, the maps keep a little more than from 400 with a hundredth of it.
STATES = 64  # states of each head that a map is fitted on
RIDGE = 1e-2  # as a share of the inputs' mean square
ROUNDS = 20


def solve_states(
    m: StateMap, given: Mapping[int, np.ndarray], wanted: np.ndarray
) -> dict[str, np.ndarray]:
    """The tensors of one map, in float64, by their names in the format.

    ``given`` are the source's states (N, heads, value dim, key dim) by layer, ``wanted`` the
    target's after the same N texts.

    Raises:
        ValueError: A state is not finite.
    """
    read = [("source", given[layer]) for layer in m.reads]
    for name, array in (*read, ("target", wanted)):
        if not np.isfinite(array).all():
            raise ValueError(f"the states of the {name} for the map {m.name} hold NaN or Inf")
    pairs = []
    for own, theirs in enumerate(m.heads):
        states = np.stack([given[layer][:, theirs] for layer in m.reads], axis=1)
        pairs.append(bilinear(states.astype(np.float64), wanted[:, own].astype(np.float64)))
    both = zip(m.shapes, zip(*pairs, strict=True), strict=True)
    return {f"{m.name}.{name}": np.stack(each) for name, each in both}


def bilinear(given: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L (o, J * i) and R (J * k, q) with the sum of L S R near ``wanted`` (N, o, q).

    ``given`` (N, J, i, k) are the states S of J source layers.
    """
    count, layers, rows, columns = given.shape
    _, outputs, queries = wanted.shape
    right = np.tile(np.eye(columns, queries), (layers, 1))
    by_row = wanted.transpose(1, 0, 2).reshape(outputs, -1)
    by_column = wanted.reshape(-1, queries)
    left = np.zeros((outputs, layers * rows))
    for _ in range(ROUNDS):
        x = given @ right.reshape(layers, columns, queries)
        x = x.transpose(1, 2, 0, 3).reshape(layers * rows, -1)
        left = _regression(x @ x.T, x @ by_row.T).T
        y = left.reshape(outputs, layers, rows).swapaxes(0, 1) @ given
        y = y.transpose(0, 2, 1, 3).reshape(count * outputs, layers * columns)
        right = _regression(y.T @ y, y.T @ by_column)
    return left, right


def _regression(square: np.ndarray, cross: np.ndarray) -> np.ndarray:
    """The solution with the ridge; zeros where the inputs are zero."""
    mean = float(np.trace(square)) / len(square)
    if not mean:
        return np.zeros_like(cross)
    return np.linalg.solve(square + RIDGE * mean * np.eye(len(square)), cross)
