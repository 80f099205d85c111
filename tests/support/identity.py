"""The identity translator of a model, and the tokens it is tried on."""

from typing import Any

import numpy as np

from kvlingo_mlx.format.assignment import Assignment, relative_depth
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_states, state_maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import Receipt
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

TOKENS = [(7 * i * i + 3 * i + 5) % 280 for i in range(50)]


def identity_of(model: LanguageModel, *, head_mixing: bool = True, **facts: Any) -> Translator:
    """It is exact, and so its receipt says unless ``facts`` have another provenance."""
    same = same_layers(model)
    exact = {"receipt": Receipt(0.0, 1.0, 0, 1.0).to_json()}
    facts = {"provenance": exact, **facts}
    return identity(
        TranslatorConfig(model.spec(), model.spec(), same, head_mixing=head_mixing, **facts)
    )


def same_layers(model: LanguageModel) -> Assignment:
    """Each layer reads itself."""
    return relative_depth(len(model.attentions), len(model.attentions))


def identity(config: TranslatorConfig) -> Translator:
    """The translator of a model to itself, which must decode exactly as the model does."""
    out: dict[str, np.ndarray] = {}
    for m in state_maps_of(config):
        for name, shape in m.shapes.items():
            out[f"{m.name}.{name}"] = np.tile(np.eye(shape[-1], dtype=np.float32), (shape[0], 1, 1))
    for layer, geometry in enumerate(config.target.layers):
        for side in () if maps_states(config, layer) else SIDES:
            width = geometry.width(side) if config.head_mixing else geometry.head_dim(side)
            eye = np.eye(width, dtype=np.float32)
            heads = (1, 1) if config.head_mixing else (geometry.kv_heads, 1, 1)
            out[f"{side}.{layer}.weight"] = np.tile(eye, heads)
    return build(config, Weights("float32", out))
