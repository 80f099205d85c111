"""Maps of states in closed form: planted factors, unrelated states, several source layers."""

from __future__ import annotations

import numpy as np
import pytest

from kvlingo_mlx.format.maps import StateMap
from kvlingo_mlx.stage1 import bilinear


def loop(left: np.ndarray, given: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The sum of L S R over source layers, layer by layer; ``given`` (N, J, i, k)."""
    _, layers, rows, columns = given.shape
    return sum(
        left[:, j * rows : (j + 1) * rows] @ given[:, j] @ right[j * columns : (j + 1) * columns]
        for j in range(layers)
    )


@pytest.mark.parametrize("layers", [1, 2])
def test_planted_factors_are_found(layers: int) -> None:
    """Up to what goes from one factor to the other, and to what the ridge takes."""
    rng = np.random.default_rng(0)
    given = rng.standard_normal((200, layers, 6, 8))
    left, right = rng.standard_normal((5, layers * 6)), rng.standard_normal((layers * 8, 7))
    wanted = loop(left, given, right)
    found = bilinear.bilinear(given, wanted)
    assert [each.shape for each in found] == [left.shape, right.shape]
    assert np.linalg.norm(loop(found[0], given, found[1]) - wanted) < 0.05 * np.linalg.norm(wanted)
    fresh = rng.standard_normal((50, layers, 6, 8))  # and so they hold for other states
    told = loop(left, fresh, right)
    assert np.linalg.norm(loop(found[0], fresh, found[1]) - told) < 0.05 * np.linalg.norm(told)


def test_of_unrelated_states_nothing_is_found() -> None:
    rng = np.random.default_rng(1)
    given, other = rng.standard_normal((400, 1, 6, 8)), rng.standard_normal((400, 5, 7))
    left, right = bilinear.bilinear(given, other)
    assert np.linalg.norm(loop(left, given, right) - other) > 0.8 * np.linalg.norm(other)


def test_fewer_states_than_unknowns_are_no_noise() -> None:
    """The ridge keeps the factors of 3 noisy states from growing without bound."""
    rng = np.random.default_rng(2)
    given, noise = rng.standard_normal((3, 1, 6, 8)), rng.standard_normal((3, 5, 7))
    left, right = bilinear.bilinear(given, noise)
    fresh = rng.standard_normal((50, 1, 6, 8))
    assert np.linalg.norm(loop(left, fresh, right)) / 50**0.5 < 2 * np.linalg.norm(noise) / 3**0.5


def shapes(heads: int) -> dict[str, tuple[int, ...]]:
    return {"left": (heads, 5, 12), "right": (heads, 16, 7)}


def test_each_head_reads_its_own_head_of_each_layer() -> None:
    rng = np.random.default_rng(3)
    m = StateMap(4, (2, 0), (0, 0, 1, 1), shapes(4))
    given = {layer: rng.standard_normal((300, 2, 6, 8)).astype(np.float32) for layer in (0, 1, 2)}
    left, right = (rng.standard_normal(shape) for shape in m.shapes.values())
    wanted = np.stack(
        [
            loop(left[h], np.stack([given[2][:, h // 2], given[0][:, h // 2]], axis=1), right[h])
            for h in range(4)
        ],
        axis=1,
    ).astype(np.float32)
    found = bilinear.solve_states(m, given, wanted)
    assert {n: a.shape for n, a in found.items()} == {
        "states.4.left": (4, 5, 12), "states.4.right": (4, 16, 7)
    }  # fmt: skip
    for h in range(4):
        read = np.stack([given[2][:, h // 2], given[0][:, h // 2]], axis=1).astype(float)
        made = loop(found["states.4.left"][h], read, found["states.4.right"][h])
        assert np.linalg.norm(made - wanted[:, h]) < 0.05 * np.linalg.norm(wanted[:, h])


@pytest.mark.parametrize(("end", "layer"), [("source", 0), ("source", 3), ("target", 0)])
def test_an_overflow_is_named(end: str, layer: int) -> None:
    m = StateMap(1, (0, 3), (0,), {"left": (1, 5, 12), "right": (1, 16, 7)})
    given, wanted = {s: np.ones((4, 1, 6, 8)) for s in m.reads}, np.ones((4, 1, 5, 7))
    (given[layer] if end == "source" else wanted)[2, 0, 1, 1] = np.inf
    with pytest.raises(ValueError, match=f"states of the {end} for the map states.1 hold NaN"):
        bilinear.solve_states(m, given, wanted)
