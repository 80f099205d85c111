"""What a group of maps of each kind computes on the device, without biases.

Paper: sections "Linear translator family" (equation 3.1) and "Training protocol" (MLPs), appendix
"Dense-to-MoE cache translation" (a linear map beside an MLP).
"""

from collections.abc import Callable, Sequence

from kvlingo_mlx.backend import mx, nn

import numpy as np

from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.translators.products import ProductGroup

Inputs = Sequence[mx.array]


def linear(group: ProductGroup, inputs: Inputs) -> mx.array:
    """W x."""
    return group.project("weight", inputs)


def two_layers(group: ProductGroup, inputs: Inputs) -> mx.array:
    """W2 gelu(W1 x + b1) + b2, GELU with erf."""
    product = group.project("w1", inputs)
    hidden = nn.gelu(product + group.vector("b1"))  # in float32, as the vectors are
    return group.project("w2", [hidden.astype(product.dtype)]) + group.vector("b2")


def gated(group: ProductGroup, inputs: Inputs) -> mx.array:
    """An MLP, with or without a gate per target head."""
    result = two_layers(group, inputs)
    return mx.sigmoid(group.vector("gate")) * result if "gate" in group.tensors else result


def summed(group: ProductGroup, inputs: Inputs) -> mx.array:
    """A linear map and an MLP beside it."""
    return linear(group, inputs) + two_layers(group, inputs)


# From the inputs of a group's cuts to (G, B, H, T, D).
FORMULAS: dict[str, Callable[[ProductGroup, Inputs], mx.array]] = {
    "linear": linear,
    "mlp": gated,
    "linear_mlp": summed,
}


def apart(config: TranslatorConfig, weights: Weights) -> Weights:
    """Joint maps as two linear maps that both read keys and values.

    The upper rows of a joint map write keys, the lower ones values.
    """
    found: dict[str, np.ndarray] = {}
    for name, array in weights.arrays.items():
        _, layer, last = name.split(".")
        rows = np.split(array, [config.target.layers[int(layer)].width("keys")])
        found |= {f"{side}.{layer}.{last}": r for side, r in zip(SIDES, rows, strict=True)}
    return Weights(weights.dtype, found)


def together(weights: Weights) -> Weights:
    """Joint maps of what :func:`apart` made of them."""
    found = {}
    for name in (name for name in weights.arrays if name.startswith(SIDES[0])):
        _, layer, last = name.split(".")
        rows = [weights.arrays[f"{side}.{layer}.{last}"] for side in SIDES]
        found[f"joint.{layer}.{last}"] = np.concatenate(rows)
    return Weights(weights.dtype, found)
