"""A two-layer MLP beside the linear map (table "linearity", paragraph "Protocol")."""

from __future__ import annotations

from dataclasses import dataclass

from kvlingo_mlx.backend import mx, nn

import mlx.optimizers as optimizers
import numpy as np

from benchmarks.paper.analysis.statistics import fit_linear

STOPPING_SHARE = 0.1  # share of the fitting tokens (paragraph "Protocol")


@dataclass(frozen=True)
class Recipe:
    """How to train the network: AdamW, each epoch from the best one so far.

    After an epoch without improvement the rate is multiplied by ``fall``; ``patience`` such epochs
    in a row end the training.

    ``hidden`` is the number of hidden units beside those that hold the linear map; by default
    (None) it is twice the input's width, as in the paper's MLP translators.
    """

    hidden: int | None = None
    epochs: int = 10
    patience: int = 3
    batch: int = 256
    rate: float = 1e-3
    fall: float = 0.3
    seed: int = 0


class TwoLayers(nn.Module):
    """W2 GELU(W1 x + b1) + b2, which starts as a given affine map.

    GELU(z) - GELU(-z) is z, so two hidden units for each input hold that map exactly. The other
    units are random, and nothing reads them at first.
    """

    def __init__(
        self, weight: np.ndarray, bias: np.ndarray, hidden: int, rng: np.random.Generator
    ) -> None:
        super().__init__()
        inputs, outputs = weight.shape
        free = rng.normal(size=(inputs, hidden)) / inputs**0.5
        same = np.eye(inputs)
        self.w1 = _float32(np.concatenate([same, -same, free], axis=1))
        self.b1 = mx.zeros(2 * inputs + hidden)
        self.w2 = _float32(np.concatenate([weight, -weight, np.zeros((hidden, outputs))]))
        self.b2 = _float32(bias)

    def __call__(self, x: mx.array) -> mx.array:
        return nn.gelu(x @ self.w1 + self.b1) @ self.w2 + self.b2


@dataclass(frozen=True)
class Standard:
    """What is subtracted from numbers, and then divides them."""

    mean: np.ndarray
    scale: np.ndarray | float

    def __call__(self, x: np.ndarray) -> mx.array:
        return _float32((x - self.mean) / self.scale)


@dataclass(frozen=True)
class Network:
    """A trained network: (T, in) to (T, out).

    ``epochs`` is the number of epochs of the checkpoint that was kept; 0 is the linear map.
    """

    layers: TwoLayers
    inputs: Standard
    outputs: Standard
    epochs: int

    def __call__(self, x: np.ndarray) -> np.ndarray:
        predicted = np.array(self.layers(self.inputs(x)), np.float64)
        return predicted * self.outputs.scale + self.outputs.mean


def fit_network(x: np.ndarray, y: np.ndarray, recipe: Recipe) -> Network:
    """Fit a two-layer MLP whose first checkpoint is the linear map.

    A later checkpoint is kept only if its squared error on the stopping set, a tenth of the given
    tokens, is lower. The linear map that it starts from is fitted on the other tokens, so both
    are compared on tokens that neither has seen.

    Args:
        x: (T, in) inputs.
        y: (T, out) targets.
        recipe: How to train.
    """
    rng = np.random.default_rng(recipe.seed)
    order = rng.permutation(len(x))
    stop, train = np.split(order, [max(1, round(STOPPING_SHARE * len(x)))])
    inputs = Standard(x[train].mean(axis=0), x[train].std(axis=0) + 1e-12)
    mean = y[train].mean(axis=0)
    # One scale for all outputs: R2 weighs each by its variance.
    outputs = Standard(mean, float(np.sqrt(((y[train] - mean) ** 2).mean())) or 1.0)
    linear = fit_linear(x[train], y[train]).weight
    layers = TwoLayers(
        np.reshape(inputs.scale, (-1, 1)) * linear / outputs.scale,
        (inputs.mean @ linear - mean) / outputs.scale,
        2 * x.shape[1] if recipe.hidden is None else recipe.hidden,
        rng,
    )
    epochs = _train(layers, (inputs(x), outputs(y)), (train, stop), recipe, rng)
    return Network(layers, inputs, outputs, epochs)


def _train(
    network: TwoLayers,
    tokens: tuple[mx.array, mx.array],
    rows: tuple[np.ndarray, np.ndarray],
    recipe: Recipe,
    rng: np.random.Generator,
) -> int:
    """Leave the parameters of the best epoch in ``network``; returns its number.

    ``tokens`` are the inputs and outputs, ``rows`` those to train on and to stop by.
    """

    def loss(network: TwoLayers, rows: mx.array) -> mx.array:
        return mx.square(network(tokens[0][rows]) - tokens[1][rows]).mean()

    step = nn.value_and_grad(network, loss)
    optimizer = optimizers.AdamW(recipe.rate, bias_correction=True)
    train, stop = rows[0], mx.array(rows[1])
    best, lowest, kept = network.parameters(), float(loss(network, stop)), 0
    for epoch in range(1, recipe.epochs + 1):
        order = mx.array(rng.permutation(train))
        for start in range(0, len(train), recipe.batch):
            _, gradients = step(network, order[start : start + recipe.batch])
            optimizer.update(network, gradients)
            mx.eval(network.parameters(), optimizer.state)
        error = float(loss(network, stop))
        if error < lowest:
            best, lowest, kept = network.parameters(), error, epoch
            continue
        network.update(best)
        optimizer.learning_rate = optimizer.learning_rate * recipe.fall
        if epoch - kept >= recipe.patience:
            break
    return kept


def _float32(x: np.ndarray) -> mx.array:
    return mx.array(np.asarray(x, np.float32))
