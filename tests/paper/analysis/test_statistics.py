"""Statistics of caches against plain loops, known spectra and planted maps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from benchmarks.paper.analysis import statistics as s

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(200, 6)), rng.normal(size=(200, 9))


def slow_cka(x: np.ndarray, y: np.ndarray) -> float:
    """HSIC of centred Gram matrices, token by token (Kornblith et al., equation 3)."""
    n = len(x)
    h = np.eye(n) - np.ones((n, n)) / n
    k, q = h @ (x @ x.T) @ h, h @ (y @ y.T) @ h
    hsic = sum(k[i, j] * q[i, j] for i in range(n) for j in range(n))
    return hsic / np.sqrt((k * k).sum() * (q * q).sum())


def cka(x: np.ndarray, y: np.ndarray) -> float:
    return float(s.cka_grid([x], [y])[0, 0])


def test_cka() -> None:
    assert cka(X, Y + 3) == pytest.approx(slow_cka(X, Y))
    turn, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    assert cka(X, 5 * X @ turn + 2) == pytest.approx(1.0)
    assert cka(X, X @ np.diag([9, 1, 1, 1, 1, 1])) < 0.9  # linear, but no rotation
    assert np.isnan(cka(X, np.ones((200, 3))))


def test_grid_and_its_two_numbers() -> None:
    layers = [rng.normal(size=(300, 4)) for _ in range(3)]
    grid = s.cka_grid(layers, [layers[0], layers[2], layers[1]])
    assert grid[1, 2] == pytest.approx(1.0)
    assert grid[0, 1] == pytest.approx(slow_cka(layers[0], layers[1]))
    found = s.correspondence(grid)
    assert found.offset == pytest.approx((0 + 1 + 1) / 3)
    on = (grid[0, 0] + grid[1, 1] + grid[2, 2]) / 3
    off = (grid.sum() - 3 * on) / 6
    assert found.contrast == pytest.approx(on - off)
    assert s.diagonal_of(5, 3).tolist() == [0, 1, 1, 2, 2]  # halves go up
    assert s.diagonal_of(3, 5).tolist() == [0, 2, 4]
    assert s.diagonal_of(4, 4).tolist() == [0, 1, 2, 3]


def test_rank() -> None:
    turn, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    wanted = np.array([4.0, 2.0, 1.0, 1.0, 0, 0, 0, 0])
    points = np.concatenate([np.eye(8), -np.eye(8)]) * np.sqrt(8 * np.tile(wanted, 2))[:, None]
    found = s.spectrum(points @ turn + 7)
    assert found == pytest.approx(wanted, abs=1e-9)
    share = np.array([0.5, 0.25, 0.125, 0.125])
    entropy = -sum(p * np.log(p) for p in share)
    assert s.effective_rank(found) == pytest.approx(np.exp(entropy), rel=1e-6)
    assert s.top_share(found) == pytest.approx(0.5)
    assert s.effective_rank(np.ones(16)) == pytest.approx(16)


def test_linearity() -> None:
    planted = rng.normal(size=(6, 9))
    x, unseen = rng.normal(size=(500, 6)), rng.normal(size=(100, 6))
    y = x @ planted
    fit = s.fit_linear(x, y)
    assert s.r2(fit(unseen), unseen @ planted, y.mean(axis=0)) > 1 - 1e-5
    assert s.r2(fit(unseen), Y[:100], Y.mean(axis=0)) < 0.1  # negative control
    assert s.r2(np.tile(y.mean(axis=0), (500, 1)), y, y.mean(axis=0)) == pytest.approx(0)
    shifted = y + 5
    assert s.r2(s.fit_linear(x, shifted)(x), shifted, shifted.mean(axis=0)) < 0
    affine = s.fit_linear(x, shifted, affine=True)
    assert s.r2(affine(x), shifted, shifted.mean(axis=0)) > 1 - 1e-5
    assert affine.bias == pytest.approx(np.full(9, 5.0), abs=0.02)


def test_sign_test() -> None:
    found = s.sign_test([-1, -2, -0.5, -3, 4, 0, 0])
    # Five signs, at most one of the rarer kind: (1 + 5) of 32 ways, on either side.
    assert (found.above, found.below, found.ties) == (1, 4, 2)
    assert found.p == 2 * 6 / 32 and found.mean == pytest.approx(-2.5 / 7)
    assert s.sign_test([1, -1]).p == 1 and s.sign_test([0, 0]).p == 1
    assert s.sign_test([1] * 6).p == 2 / 64
    signs = list(itertools.product((-1, 1), repeat=9))
    wanted = abs(sum((-1, -1, 1, -1, -1, -1, -1, 1, -1)))
    share = sum(abs(sum(order)) >= wanted for order in signs) / len(signs)
    assert s.sign_test((-1, -1, 1, -1, -1, -1, -1, 1, -1)).p == pytest.approx(share)
    broken = s.sign_test([1, math.nan, -1, -1])
    assert (broken.above, broken.below, broken.ties) == (1, 2, 0) and math.isnan(broken.p)
    assert 0 < s.sign_test([1] * 1000 + [-1] * 900).p < 0.05
    with pytest.raises(ValueError, match="needs at least one difference"):
        s.sign_test([])
