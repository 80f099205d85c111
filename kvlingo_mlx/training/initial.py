"""The tensors with which a training begins where no closed form gives them."""

import math

import numpy as np

from kvlingo_mlx.format.kinds import TENSORS
from kvlingo_mlx.format.maps import maps_of, shapes_of
from kvlingo_mlx.format.translator_config import TranslatorConfig


def initial(
    config: TranslatorConfig, hidden: int, seed: int, *, gated: bool
) -> dict[str, np.ndarray]:
    """The initial tensors that no closed form gives (appendix "Training protocol").

    An MLP starts as PyTorch starts a linear layer, with gates (``gated``) at sigmoid(4). An MLP
    beside a linear map starts with an output of zero.
    """
    generator, spec = np.random.default_rng(seed), config.spec
    gates = ("gate",) if gated and "gate" in spec.optional else ()
    arrays: dict[str, np.ndarray] = {}
    for m in maps_of(config):
        shapes = shapes_of(config, m, (*spec.learnt, *gates), hidden)
        for name, shape in shapes.items():
            start = TENSORS[name].start
            if isinstance(start, str):
                many = {"inputs": m.inputs, "hidden": hidden}[start]
                bound = 0.0 if name in spec.silent else 1 / math.sqrt(many)
                values = generator.uniform(-bound, bound, shape)
                arrays[f"{m.name}.{name}"] = values.astype(np.float32)
            else:
                arrays[f"{m.name}.{name}"] = np.full(shape, start, np.float32)
    return arrays
