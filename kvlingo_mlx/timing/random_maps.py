"""Random translators, to time and to probe: neither depends on the weights' values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvlingo_mlx.format.assignment import by_depth
from kvlingo_mlx.format.maps import expected_shapes
from kvlingo_mlx.format.tensor_file import DType, Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

HIDDEN = 8  # units of an MLP


def random_translators(
    source: LanguageModel, target: LanguageModel, nu: int, forms: Mapping[str, tuple[DType, Any]],
    *, head_mixing: bool = True, state_maps: bool = False,
) -> dict[str, Translator]:  # fmt: skip
    """Random linear maps by form; ``forms`` gives the stored dtype and the bits of each."""
    assignment = by_depth(source.geometry.layers, target.geometry.layers, nu)
    ends = source.spec(), target.spec()
    config = TranslatorConfig(*ends, assignment, head_mixing=head_mixing, state_maps=state_maps)
    arrays = random_maps(config)
    return {
        form: build(config, Weights.from_float32(arrays, dtype), quantize=bits)
        for form, (dtype, bits) in forms.items()
    }


def random_maps(config: TranslatorConfig) -> dict[str, np.ndarray]:
    """Random tensors by name, of which maps have outputs about as large as their inputs."""
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in expected_shapes(config, (), HIDDEN).items()
    }
