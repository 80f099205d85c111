"""A two-layer MLP, fitted to what a linear map leaves unexplained (table "linearity")."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.backend import mx, nn

import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_map

STOPPING_SHARE = 0.1  # share of the fitting tokens (paragraph "Protocol")


@dataclass(frozen=True)
class Recipe:
    """How to train the network: AdamW, stopped after ``patience`` epochs without improvement.

    ``hidden`` is by default (None) twice the input's width, as in the paper's MLP translators.
    """

    hidden: int | None = None
    epochs: int = 10
    patience: int = 3
    batch: int = 256
    rate: float = 2e-3
    seed: int = 0


class TwoLayers(nn.Module):
    """W2 ReLU(W1 x + b1) + b2, with a second layer that starts at zero.

    ReLU scores like GELU here, and a step takes half as long on a CPU.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, rng: np.random.Generator) -> None:
        super().__init__()
        self.w1 = mx.array(rng.normal(size=(inputs, hidden)).astype(np.float32) / inputs**0.5)
        self.b1, self.b2 = mx.zeros(hidden), mx.zeros(outputs)
        self.w2 = mx.zeros((hidden, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        return nn.relu(x @ self.w1 + self.b1) @ self.w2 + self.b2


@dataclass(frozen=True)
class Correction:
    """A trained network, added to the linear map's prediction: (T, in) to (T, out).

    ``epochs`` is the number of epochs it was trained for; 0 means the linear map alone.
    """

    network: TwoLayers
    mean: np.ndarray
    scale: np.ndarray
    size: float
    epochs: int

    def __call__(self, x: np.ndarray) -> np.ndarray:
        inputs = mx.array(_standardised(x, self.mean, self.scale))
        return self.size * np.array(self.network(inputs), np.float64)


def fit_correction(x: np.ndarray, residual: np.ndarray, recipe: Recipe) -> Correction:
    """Fit the residual of the linear map.

    The network starts at zero, so the linear solution is the first checkpoint. A later checkpoint
    is kept only if its squared error on the stopping set, a tenth of the given tokens, is lower.

    Args:
        x: (T, in) inputs.
        residual: (T, out) targets minus the linear map's prediction.
        recipe: How to train.
    """
    rng = np.random.default_rng(recipe.seed)
    order = rng.permutation(len(x))
    stop, train = np.split(order, [max(1, round(STOPPING_SHARE * len(x)))])
    mean, scale = x[train].mean(axis=0), x[train].std(axis=0) + 1e-12
    size = float(np.sqrt((residual[train] ** 2).mean())) or 1.0
    inputs = mx.array(_standardised(x, mean, scale))
    targets = mx.array((residual / size).astype(np.float32))
    width = x.shape[1]
    network = TwoLayers(width, recipe.hidden or 2 * width, residual.shape[1], rng)
    best, epochs = _train(network, inputs, targets, train, mx.array(stop), recipe, rng)
    network.update(best)
    return Correction(network, mean, scale, size, epochs)


def _train(
    network: TwoLayers,
    inputs: mx.array,
    targets: mx.array,
    train: np.ndarray,
    stop: mx.array,
    recipe: Recipe,
    rng: np.random.Generator,
) -> tuple[dict, int]:
    """The parameters of the best epoch, and its number."""

    def loss(network: TwoLayers, rows: mx.array) -> mx.array:
        return mx.square(network(inputs[rows]) - targets[rows]).mean()

    step = nn.value_and_grad(network, loss)
    optimizer = optimizers.AdamW(recipe.rate, bias_correction=True)
    best = tree_map(mx.array, network.parameters())
    lowest, kept = float(loss(network, stop)), 0
    for epoch in range(1, recipe.epochs + 1):
        order = mx.array(rng.permutation(train))
        for start in range(0, len(train), recipe.batch):
            _, gradients = step(network, order[start : start + recipe.batch])
            optimizer.update(network, gradients)
            mx.eval(network.parameters(), optimizer.state)
        error = float(loss(network, stop))
        if error < lowest:
            best, lowest, kept = tree_map(mx.array, network.parameters()), error, epoch
        elif epoch - kept >= recipe.patience:
            break
    return best, kept


def _standardised(x: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return ((x - mean) / scale).astype(np.float32)
