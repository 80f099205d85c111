"""The two-layer MLP of R2: planted relations, and the protocol written out in NumPy."""

from __future__ import annotations

import math

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

from benchmarks.paper.analysis.linearity import fit_layer
from benchmarks.paper.analysis.network import Recipe, TwoLayers, fit_network

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


def reference(x: np.ndarray, y: np.ndarray, recipe: Recipe):
    """The best epoch, the network of that epoch, and the number of epochs without improvement."""
    rng = np.random.default_rng(recipe.seed)
    order = rng.permutation(len(x))
    count = max(1, round(len(x) / 10))
    stop, train = order[:count], order[count:]
    centre, spread = x[train].mean(axis=0), x[train].std(axis=0)
    mean = y[train].mean(axis=0)
    size = math.sqrt(((y[train] - mean) ** 2).mean())
    gram = x[train].T @ x[train]
    ridge = 1e-3 * np.trace(gram) / 3 * np.eye(3)
    linear = np.linalg.inv(gram + ridge) @ x[train].T @ y[train]
    weight, bias = np.diag(spread) @ linear / size, (centre @ linear - mean) / size
    free = rng.normal(size=(3, recipe.hidden)) / math.sqrt(3)
    w = {
        "w1": np.hstack([np.eye(3), -np.eye(3), free]),
        "b1": np.zeros(6 + recipe.hidden),
        "w2": np.vstack([weight, -weight, np.zeros((recipe.hidden, 2))]),
        "b2": bias,
    }
    normal = np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))
    inputs, targets = (x - centre) / spread, (y - mean) / size

    def run(w: dict, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = inputs[rows] @ w["w1"] + w["b1"]
        return z, (z * normal(z)) @ w["w2"] + w["b2"]

    def error(w: dict) -> float:
        return float(((run(w, stop)[1] - targets[stop]) ** 2).mean())

    first = {name: np.zeros_like(value) for name, value in w.items()}
    second = {name: np.zeros_like(value) for name, value in w.items()}
    best, lowest, kept, rate, falls, t = dict(w), error(w), 0, recipe.rate, 0, 0
    for epoch in range(1, recipe.epochs + 1):
        order = rng.permutation(train)
        for start in range(0, len(order), recipe.batch):
            rows, t = order[start : start + recipe.batch], t + 1
            z, out = run(w, rows)
            back = 2 * (out - targets[rows]) / out.size
            slope = normal(z) + z * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
            hidden = (back @ w["w2"].T) * slope
            gradient = {
                "w1": inputs[rows].T @ hidden, "b1": hidden.sum(axis=0),
                "w2": (z * normal(z)).T @ back, "b2": back.sum(axis=0),
            }  # fmt: skip
            for name, g in gradient.items():
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                size_of = np.sqrt(second[name] / (1 - 0.999**t)) + 1e-8
                move = first[name] / (1 - 0.9**t) / size_of
                w[name] = w[name] * (1 - rate * 0.01) - rate * move
        if (now := error(w)) < lowest:
            best, lowest, kept = dict(w), now, epoch
            continue
        w, rate, falls = dict(best), rate * recipe.fall, falls + 1
        if epoch - kept >= recipe.patience:
            break

    def predict(x: np.ndarray) -> np.ndarray:
        z = (x - centre) / spread @ best["w1"] + best["b1"]
        return ((z * normal(z)) @ best["w2"] + best["b2"]) * size + mean

    return kept, predict, falls
