"""Stage 1's solver: planted maps, optimality, token weights, and data that leave maps open."""

from __future__ import annotations

import numpy as np
import pytest

from kvlingo_mlx.stage1.closed_form import (
    ALIKE,
    RIDGES,
    Decomposed,
    Moments,
    checked_ridge,
    solve,
)

Data = tuple[np.ndarray, np.ndarray]


def random_data(tokens: int, inputs: int, outputs: int, seed: int = 0, noise: float = 0.0) -> Data:
    """Inputs with a spread spectrum, and outputs that a random map makes of them."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(inputs, inputs)) + 2 * np.eye(inputs)
    x = rng.normal(size=(tokens, inputs)) @ mixing + rng.normal(size=inputs)
    y = x @ rng.normal(size=(inputs, outputs)) + noise * rng.normal(size=(tokens, outputs))
    return x, y


def sums(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> Moments:
    """The moments of one batch."""
    moments = Moments(x.shape[1], y.shape[1])
    moments.add(x, y, weights)
    return moments


def squared_error(
    weight: np.ndarray, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Sum over tokens of w |M x - y|^2, one token at a time."""
    w = np.ones(len(x)) if weights is None else weights
    return sum(float(w[t] * np.sum((weight @ x[t] - y[t]) ** 2)) for t in range(len(x)))


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative error in the Frobenius norm."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# ---- maps that the data determine -------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (8, 8), (24, 8), (8, 24), (48, 16)])
def test_a_planted_map_is_recovered(inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    planted = rng.normal(size=(outputs, inputs))
    x = rng.normal(size=(40 * inputs, inputs))
    solution = solve(sums(x, x @ planted.T))
    assert solution.weight.shape == (outputs, inputs)
    assert solution.weight.dtype == np.float64
    assert solution.rank == inputs
    assert relative(solution.weight, planted) < 1e-9


def test_noisy_data_give_the_least_squares_map() -> None:
    x, y = random_data(300, 12, 5, noise=0.7)
    expected = np.linalg.lstsq(x, y, rcond=None)[0].T
    assert relative(solve(sums(x, y)).weight, expected) < 1e-9


@pytest.mark.parametrize("weighted", [False, True])
def test_no_perturbation_is_better(weighted: bool) -> None:
    rng = np.random.default_rng(5)
    x, y = random_data(150, 10, 6, noise=0.5)
    weights = rng.uniform(0, 3, len(x)) if weighted else None
    best = solve(sums(x, y, weights)).weight
    least = squared_error(best, x, y, weights)
    for size in (1e-3, 1e-1, 1.0):
        for _ in range(20):
            other = best + size * rng.normal(size=best.shape)
            assert squared_error(other, x, y, weights) > least


def test_batches_add_up() -> None:
    x, y = random_data(120, 7, 3, noise=0.3)
    weights = np.random.default_rng(6).uniform(0.1, 2, 120)
    whole, parts = sums(x, y, weights), Moments(7, 3)
    for span in (slice(0, 1), slice(1, 50), slice(50, 50), slice(50, 120)):
        parts.add(x[span], y[span], weights[span])
    assert parts.tokens == whole.tokens == 120
    assert relative(solve(parts).weight, solve(whole).weight) < 1e-9


def test_float32_states_are_summed_in_float64() -> None:
    """Float32 sums leave noise of 1e-7, above the tolerance, in directions without data."""
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(20_000, 2)) @ rng.normal(size=(2, 6))).astype(np.float32)
    moments = Moments(6, 1)
    moments.add(x, x[:, :1])
    assert solve(moments).rank == 2
    exact = x.astype(np.float64)
    assert relative(moments.xx, exact.T @ exact) < 1e-13


# ---- token weights ----------------------------------------------------------------------


def test_weights_are_repeated_rows() -> None:
    rng = np.random.default_rng(8)
    x, y = random_data(60, 5, 4, noise=0.6)
    counts = rng.integers(0, 5, 60)
    repeated = np.repeat(x, counts, axis=0), np.repeat(y, counts, axis=0)
    expected = np.linalg.lstsq(*repeated, rcond=None)[0].T
    solution = solve(sums(x, y, counts.astype(np.float64)))
    assert relative(solution.weight, expected) < 1e-9


@pytest.mark.parametrize("wrong", [np.ones(1), np.ones(49), np.ones((50, 1))])
def test_weights_are_one_a_token(wrong: np.ndarray) -> None:
    x, y = random_data(50, 4, 3)
    with pytest.raises(ValueError):
        sums(x, y, wrong)


# ---- data that leave a map open ---------------------------------------------------------


def check_least_norm(x: np.ndarray, y: np.ndarray, rank: int) -> None:
    """The solution is numpy's least-norm one, by two of its routes."""
    solution = solve(sums(x, y))
    assert solution.rank == rank
    scale = np.linalg.norm(y) / np.linalg.norm(x)
    for expected in ((np.linalg.pinv(x, rcond=1e-6) @ y).T, np.linalg.lstsq(x, y, rcond=1e-6)[0].T):
        assert np.linalg.norm(solution.weight - expected) < 1e-8 * max(
            scale, float(np.linalg.norm(expected))
        )


def test_a_rank_deficient_input() -> None:
    rng = np.random.default_rng(10)
    x = rng.normal(size=(200, 5)) @ rng.normal(size=(5, 12))
    check_least_norm(x, x @ rng.normal(size=(12, 4)) + rng.normal(size=(200, 4)), 5)


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
    assert relative(x @ solve(sums(x, y)).weight.T, y) < 1e-8


def test_no_input_at_all() -> None:
    solution = solve(sums(np.zeros((20, 4)), np.ones((20, 3))))
    assert solution.rank == 0
    assert (solution.weight == np.zeros((3, 4))).all()


def test_weights_of_zero_leave_a_map_open() -> None:
    rng = np.random.default_rng(13)
    x, y = rng.normal(size=(30, 6)), rng.normal(size=(30, 2))
    weights = np.zeros(30)
    weights[[4, 17]] = 0.5
    solution = solve(sums(x, y, weights))
    assert solution.rank == 2
    expected = (np.linalg.pinv(x[[4, 17]]) @ y[[4, 17]]).T
    assert relative(solution.weight, expected) < 1e-8


def test_the_tolerance_is_on_eigenvalues() -> None:
    """E[x x^T] = diag(1, 1e-7, 1e-9): the last lies below 1e-8 of the largest."""
    x = np.diag([1.0, 1e-7, 1e-9]) ** 0.5
    solution = solve(sums(x, x @ np.ones((3, 1))))
    assert solution.rank == 2
    np.testing.assert_allclose(solution.weight, [[1.0, 1.0, 0.0]], atol=1e-8)
    assert solve(sums(x, x), tolerance=1e-10).rank == 3
    assert solve(sums(x, x), tolerance=1e-6).rank == 1


# ---- blocks ------------------------------------------------------------------------------


# ---- blocks: head-wise maps -------------------------------------------------------------


def test_a_block_is_a_map_of_its_own() -> None:
    x, y = random_data(90, 8, 6, noise=0.5)
    weights = np.random.default_rng(17).uniform(0, 2, 90)
    rows, columns = np.array([6, 2, 3]), np.array([4, 0])
    block = sums(x, y, weights).block(rows, columns)
    alone = sums(x[:, rows], y[:, columns], weights)
    assert block.tokens == 90
    assert (block.input_width, block.output_width) == (3, 2)
    np.testing.assert_allclose(block.xx, alone.xx, rtol=1e-12)
    np.testing.assert_allclose(block.xy, alone.xy, rtol=1e-12, atol=1e-12)
    roots = np.sqrt(weights)[:, None]
    expected = np.linalg.lstsq(roots * x[:, rows], roots * y[:, columns], rcond=None)[0].T
    assert relative(solve(block).weight, expected) < 1e-9


# ---- errors -----------------------------------------------------------------------------


def test_no_tokens() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        solve(Moments(4, 3))
    with pytest.raises(ValueError, match="no tokens"):
        solve(sums(np.zeros((0, 4)), np.zeros((0, 3))))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["x", "y", "weights"])
def test_numbers_that_are_none(which: str, value: float) -> None:
    x, y = random_data(20, 4, 3)
    data = {"x": x, "y": y, "weights": np.ones(20)}
    data[which][3, ...] = value
    with np.errstate(invalid="ignore"):
        moments = sums(**data)
    with pytest.raises(ValueError, match="NaN or Inf"):
        solve(moments)


def test_squares_that_overflow() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        moments = sums(np.full((2, 2), 1e200), np.ones((2, 1)))
    with pytest.raises(ValueError, match="NaN or Inf"):
        solve(moments)


@pytest.mark.parametrize(
    ("x", "y"), [((5, 3), (5, 2)), ((5, 4), (5, 3)), ((5, 4), (4, 2)), ((4,), (2,))]
)
def test_shapes_that_disagree(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    moments = Moments(4, 2)
    with pytest.raises(ValueError):
        moments.add(np.ones(x), np.ones(y))


# ---- a ridge ----------------------------------------------------------------------------


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
    found = solve(sums(x, y, w if weighted else None), ridge=ridge)
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
    assert solve(sums(x, y), ridge=None).ridge == RIDGES[int(np.argmin(errors))]


def test_a_chosen_ridge_helps_where_data_are_few() -> None:
    """On tokens that no fit has seen, where each token comes twice; with many it changes little."""
    rng = np.random.default_rng(5)
    planted, spread = rng.normal(size=(40, 8)), np.linspace(0.05, 2.0, 40)
    fresh = rng.normal(size=(4000, 40)) * spread
    errors = {}
    for tokens in (50, 6000):
        x = rng.normal(size=(tokens, 40)) * spread
        y = x @ planted + 3.0 * rng.normal(size=(tokens, 8))
        moments = sums(np.repeat(x, 2, axis=0), np.repeat(y, 2, axis=0))
        for ridge in (0.0, None):
            weight = solve(moments, ridge=ridge).weight
            errors[tokens, ridge] = float(np.mean((fresh @ (weight.T - planted)) ** 2))
    assert errors[50, None] < 0.6 * errors[50, 0.0]
    assert errors[6000, None] < 1.02 * errors[6000, 0.0]


@pytest.mark.parametrize("tokens", [49, 400])
def test_what_is_linear_needs_no_ridge(tokens: int) -> None:
    """Even of few tokens, if they are more than the unknowns."""
    x, y = random_data(tokens, 48, 8)
    found = solve(sums(x, y), ridge=None)
    assert found.ridge == 0.0
    assert relative(found.weight, np.linalg.lstsq(x, y, rcond=None)[0].T) < 1e-6


def test_no_ridge_is_chosen_blindly() -> None:
    """Fewer tokens than unknowns pass through every point; that says nothing."""
    x, y = random_data(20, 48, 8, noise=1.0)
    assert solve(sums(x, y), ridge=None).ridge > 0.0
    silent = sums(np.zeros((9, 3)), np.ones((9, 2)))
    assert not solve(silent, ridge=None).weight.any()


@pytest.mark.parametrize("wrong", [-1e-9, np.inf, np.nan])
def test_ridges_that_are_none(wrong: float) -> None:
    with pytest.raises(ValueError, match="ridge is .*; give 0 or more, or leave it out"):
        checked_ridge(wrong)
    assert checked_ridge(None) is None and checked_ridge(0) == 0


def test_equal_inputs_are_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the maps are those that each decomposition of its own gives, bit by bit."""
    rng, calls = np.random.default_rng(2), []
    eigh = np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda matrix: (calls.append(1), eigh(matrix))[1])
    x, other = rng.normal(size=(50, 6)), rng.normal(size=(50, 6))
    decomposed = Decomposed()
    for inputs, expected in ((x, 1), (x, 1), (other, 2), (x, 3)):
        moments = Moments(6, 3)
        moments.add(inputs, rng.normal(size=(50, 3)))
        shared = solve(moments, ridge=None, eigh=decomposed)
        assert len(calls) == expected
        own = solve(moments, ridge=None, eigh=eigh)
        assert np.array_equal(shared.weight, own.weight) and shared.ridge == own.ridge
