"""Statistics of caches against plain loops, known spectra and planted maps."""

import itertools
import math
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

from benchmarks.paper.analysis import statistics as s
from benchmarks.paper.analysis.linearity import fit_layer
from benchmarks.paper.analysis.network import Recipe, TwoLayers, fit_network

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


RECIPE = Recipe(hidden=16, epochs=12, rate=4e-3, batch=128)


def bent(x: np.ndarray, share: float, noise: float, rng: np.random.Generator) -> np.ndarray:
    """x / sqrt(v) + share of |x|, each output of variance 1 + share^2 + noise^2 at normal x."""
    curve = (np.abs(x) - math.sqrt(2 / math.pi)) / math.sqrt(1 - 2 / math.pi)
    return x + share * curve + noise * rng.normal(size=x.shape)


@pytest.mark.parametrize(("share", "noise"), [(0.0, 0.5), (0.5, 0.5), (1.0, 0.3)])
def test_known_shares_of_the_variance(share: float, noise: float) -> None:
    """Linear, curved and irreducible parts are planted; both R2 find theirs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5000, 4))
    y = bent(x, share, noise, rng)
    total = 1 + share**2 + noise**2
    fit = fit_layer(x, y, np.arange(5000) >= 4000, RECIPE)
    assert fit.linear == pytest.approx(1 / total, abs=0.03)
    assert fit.mlp is not None and fit.network is not None
    assert fit.mlp == pytest.approx((1 + share**2) / total, abs=0.04)
    assert fit.mlp - fit.linear == pytest.approx(share**2 / total, abs=0.04)
    unrelated = fit_layer(rng.permutation(x), y, np.arange(5000) >= 4000, RECIPE)
    assert unrelated.mlp is not None and unrelated.mlp < 0.02  # control: no token has its own


def test_the_first_checkpoint_is_the_linear_map() -> None:
    rng = np.random.default_rng(1)
    x, weight, bias = rng.normal(size=(50, 6)), rng.normal(size=(6, 5)), rng.normal(size=5)
    layers = TwoLayers(weight, bias, 7, rng)
    assert layers.w1.shape == (6, 19) and layers.w2.shape == (19, 5)
    found = np.array(layers(mx.array(x.astype(np.float32))))
    assert found == pytest.approx(x @ weight + bias, abs=1e-5)


def test_the_protocol_written_out() -> None:
    """Split, standardised numbers, linear start, AdamW and early stopping, in float64."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 3)) * [1, 5, 0.2] + [3, 0, -1]
    y = bent(x, 0.8, 0.4, rng)[:, :2]
    recipe = Recipe(hidden=4, epochs=14, patience=2, batch=32, rate=0.06, seed=3)
    found = fit_network(x, y, recipe)
    epochs, predict, falls = reference(x, y, recipe)
    assert 0 < epochs < recipe.epochs and falls > 0  # the case has both improvement and none
    assert found.epochs == epochs
    assert found(x) == pytest.approx(predict(x), abs=2e-3 * float(np.abs(y).max()))


def reference(x: np.ndarray, y: np.ndarray, recipe: Recipe) -> tuple[int, Any, int]:
    """The best epoch, the network of that epoch, and the number of epochs without improvement."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(recipe.seed)
    stop, train = np.split(rng.permutation(len(x)), [max(1, round(len(x) / 10))])
    centre, spread = x[train].mean(axis=0), x[train].std(axis=0)
    mean = y[train].mean(axis=0)
    size = math.sqrt(((y[train] - mean) ** 2).mean())
    gram = x[train].T @ x[train]
    ridge = 1e-3 * np.trace(gram) / 3 * np.eye(3)
    linear = np.linalg.inv(gram + ridge) @ x[train].T @ y[train]
    weight, bias = np.diag(spread) @ linear / size, (centre @ linear - mean) / size
    free = rng.normal(size=(3, recipe.hidden)) / math.sqrt(3)
    first = np.hstack([np.eye(3), -np.eye(3), free]), np.zeros(6 + recipe.hidden)
    second = np.vstack([weight, -weight, np.zeros((recipe.hidden, 2))]), bias
    w = [torch.tensor(each, requires_grad=True) for each in (*first, *second)]
    optimiser = torch.optim.AdamW(w, recipe.rate, weight_decay=0.01)

    def run(rows: np.ndarray) -> Any:
        hidden = torch.nn.functional.gelu(torch.tensor((rows - centre) / spread) @ w[0] + w[1])
        return hidden @ w[2] + w[3]

    def error(rows: np.ndarray) -> Any:
        return (run(x[rows]) - torch.tensor((y[rows] - mean) / size)).square().mean()

    def put(numbers: list[Any]) -> None:
        for own, other in zip(w, numbers, strict=True):
            own.data.copy_(other)

    best, lowest, kept, falls = [a.detach().clone() for a in w], error(stop).item(), 0, 0
    for epoch in range(1, recipe.epochs + 1):
        order = rng.permutation(train)
        for begin in range(0, len(order), recipe.batch):
            optimiser.zero_grad()
            error(order[begin : begin + recipe.batch]).backward()
            optimiser.step()
        if (now := error(stop).item()) < lowest:
            best, lowest, kept = [a.detach().clone() for a in w], now, epoch
            continue
        put(best)
        optimiser.param_groups[0]["lr"] *= recipe.fall
        falls += 1
        if epoch - kept >= recipe.patience:
            break
    put(best)
    return kept, lambda rows: run(rows).detach().numpy() * size + mean, falls
