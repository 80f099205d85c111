"""Stage 1's solver: planted maps, optimality, token weights, and data that leave maps open."""

import numpy as np
import pytest

from kvlingo_mlx.format.maps import StateMap
from kvlingo_mlx.stage1 import bilinear
from kvlingo_mlx.stage1.closed_form import ALIKE, RIDGES, Moments, solve

Data = tuple[np.ndarray, np.ndarray]


def random_data(tokens: int, inputs: int, outputs: int, seed: int = 0, noise: float = 0.0) -> Data:
    """Inputs with a spread spectrum, and outputs that a random map makes of them."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(inputs, inputs)) + 2 * np.eye(inputs)
    x = rng.normal(size=(tokens, inputs)) @ mixing + rng.normal(size=inputs)
    y = x @ rng.normal(size=(inputs, outputs)) + noise * rng.normal(size=(tokens, outputs))
    return x, y


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative error in the Frobenius norm."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_float32_states_are_summed_in_float64() -> None:
    """Float32 sums leave noise of 1e-7, above the tolerance, in directions without data."""
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(20_000, 2)) @ rng.normal(size=(2, 6))).astype(np.float32)
    moments = Moments.of(x, x[:, :1])
    assert solve(moments).rank == 2
    exact = x.astype(np.float64)
    assert relative(moments.xx, exact.T @ exact) < 1e-13


def check_least_norm(x: np.ndarray, y: np.ndarray, rank: int) -> None:
    """The solution is numpy's least-norm one, by two of its routes."""
    solution = solve(Moments.of(x, y))
    assert solution.rank == rank
    scale = np.linalg.norm(y) / np.linalg.norm(x)
    for expected in ((np.linalg.pinv(x, rcond=1e-6) @ y).T, np.linalg.lstsq(x, y, rcond=1e-6)[0].T):
        assert np.linalg.norm(solution.weight - expected) < 1e-8 * max(
            scale, float(np.linalg.norm(expected))
        )


def test_repeated_and_constant_features() -> None:
    rng = np.random.default_rng(11)
    x = rng.normal(size=(100, 8))
    x[:, 3] = x[:, 1]
    x[:, 5] = 2.5
    x[:, 6] = 2.5
    check_least_norm(x, rng.normal(size=(100, 3)), 6)


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_fewer_tokens_than_widths(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    x, y = rng.normal(size=(tokens, 10)), rng.normal(size=(tokens, 4))
    check_least_norm(x, y, tokens)
    assert relative(x @ solve(Moments.of(x, y)).weight.T, y) < 1e-8


def test_the_tolerance_is_on_eigenvalues() -> None:
    """E[x x^T] = diag(1, 1e-7, 1e-9): the last lies below 1e-8 of the largest."""
    x = np.diag([1.0, 1e-7, 1e-9]) ** 0.5
    solution = solve(Moments.of(x, x @ np.ones((3, 1))))
    assert solution.rank == 2
    np.testing.assert_allclose(solution.weight, [[1.0, 1.0, 0.0]], atol=1e-8)
    assert solve(Moments.of(x, x), tolerance=1e-10).rank == 3
    assert solve(Moments.of(x, x), tolerance=1e-6).rank == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["x", "y", "weights"])
def test_numbers_that_are_none(which: str, value: float) -> None:
    x, y = random_data(20, 4, 3)
    data = {"x": x, "y": y, "weights": np.ones(20)}
    data[which][3, ...] = value
    with np.errstate(invalid="ignore"):
        moments = Moments.of(**data)
    with pytest.raises(ValueError, match="NaN or Inf"):
        solve(moments)


@pytest.mark.parametrize("ridge", [1e-3, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_ridge_equals_added_rows(ridge: float, weighted: bool) -> None:
    """Rows that ask for an output of 0 where one input is as large as the ridge's root."""
    x, y = random_data(60, 12, 5, noise=0.7)
    w = np.random.default_rng(1).uniform(0.1, 2.0, 60) if weighted else np.ones(60)
    size = np.sqrt(ridge * np.sum(w[:, None] * x**2) / 12)
    rows = np.concatenate([np.sqrt(w)[:, None] * x, size * np.eye(12)])
    goals = np.concatenate([np.sqrt(w)[:, None] * y, np.zeros((12, 5))])
    expected = np.linalg.lstsq(rows, goals, rcond=None)[0].T
    found = solve(Moments.of(x, y, w if weighted else None), ridge=ridge)
    assert relative(found.weight, expected) < 1e-9 and found.ridge == ridge


def cross_validation(x: np.ndarray, y: np.ndarray, ridge: float) -> float:
    """The error of cross-validation as it is defined: by the residuals and the hat matrix."""
    tokens, width = x.shape
    penalty = ridge * np.mean(np.sum(x**2, axis=0)) * np.eye(width)
    hat = x @ np.linalg.solve(x.T @ x + penalty, x.T)
    left = tokens - ALIKE * np.trace(hat)
    return np.inf if left <= 0 else float(np.sum((y - hat @ y) ** 2)) / left**2


@pytest.mark.parametrize(("tokens", "noise"), [(30, 20.0), (60, 5.0), (200, 1.0), (2000, 0.3)])
def test_the_ridge_is_that_of_least_error_in_cross_validation(tokens: int, noise: float) -> None:
    x, y = random_data(tokens, 24, 6, noise=noise)
    errors = [cross_validation(x, y, ridge) for ridge in RIDGES]
    assert solve(Moments.of(x, y), ridge=None).ridge == RIDGES[int(np.argmin(errors))]


def test_a_chosen_ridge_helps_where_data_are_few() -> None:
    """On tokens that no fit has seen, where each token comes twice; with many it changes little."""
    rng = np.random.default_rng(5)
    planted, spread = rng.normal(size=(40, 8)), np.linspace(0.05, 2.0, 40)
    fresh = rng.normal(size=(4000, 40)) * spread
    errors = {}
    for tokens in (50, 6000):
        x = rng.normal(size=(tokens, 40)) * spread
        y = x @ planted + 3.0 * rng.normal(size=(tokens, 8))
        moments = Moments.of(np.repeat(x, 2, axis=0), np.repeat(y, 2, axis=0))
        for ridge in (0.0, None):
            weight = solve(moments, ridge=ridge).weight
            errors[tokens, ridge] = float(np.mean((fresh @ (weight.T - planted)) ** 2))
    assert errors[50, None] < 0.6 * errors[50, 0.0]
    assert errors[6000, None] < 1.02 * errors[6000, 0.0]


@pytest.mark.parametrize("tokens", [49, 400])
def test_what_is_linear_needs_no_ridge(tokens: int) -> None:
    """Even of few tokens, if they are more than the unknowns."""
    x, y = random_data(tokens, 48, 8)
    found = solve(Moments.of(x, y), ridge=None)
    assert found.ridge == 0.0
    assert relative(found.weight, np.linalg.lstsq(x, y, rcond=None)[0].T) < 1e-6


def test_no_ridge_is_chosen_blindly() -> None:
    """Fewer tokens than unknowns pass through every point; that says nothing."""
    x, y = random_data(20, 48, 8, noise=1.0)
    assert solve(Moments.of(x, y), ridge=None).ridge > 0.0
    silent = Moments.of(np.zeros((9, 3)), np.ones((9, 2)))
    assert not solve(silent, ridge=None).weight.any()


def loop(left: np.ndarray, given: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The sum of L S R over source layers, layer by layer; ``given`` (N, J, i, k)."""
    _, layers, rows, columns = given.shape
    return sum(
        left[:, j * rows : (j + 1) * rows] @ given[:, j] @ right[j * columns : (j + 1) * columns]
        for j in range(layers)
    )


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
