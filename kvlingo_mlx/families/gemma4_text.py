"""Gemma-4, text: normed values, wider heads in global layers, last layers without a cache.

Local layers keep a window and global layers keep everything; each kind has its own rotation, in
global layers a proportional one. In large models, global layers have no value projection: their
values are the keys before any norm. In small models, each of the last layers reads the keys and
values of the last layer of its kind that owns a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.families.base import Family, Finish
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope


class Gemma4(Family):
    """Takes facts from mlx-lm's model arguments, because released configs omit many of them."""

    def facts(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return vars(_text_model(model).args)

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The attention modules that own a cache; the last layers may share another's."""
        return [a for a in super().attentions(model) if a.has_kv]

    def readers(self, model: nn.Module) -> list[tuple[nn.Module, ...]]:
        """For each cache, the layer that owns it and the layers that share it."""
        layers, owners = model.layers, _text_model(model).model.previous_kvs
        return [
            tuple(layers[i].self_attn for i, owner in enumerate(owners) if owner == index)
            for index in range(len(self.attentions(model)))
        ]

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """The projections; without a value projection, the key projection serves for both."""
        return (attention.k_proj,) if attention.use_k_eq_v else super().taps(attention)

    def states(
        self, attention: nn.Module, outputs: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """The keys and values before their norms."""
        return outputs[0], outputs[-1]

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation; values have a norm too, without a weight."""
        return dataclasses.replace(super().finish(attention, facts), value_eps=attention.v_norm.eps)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """The layer's rotation; each kind of layer has its own parameters."""
        return configured_rope(
            {"rope_parameters": facts["rope_parameters"].get(attention.layer_type)},
            attention.head_dim,
        )

    def key_dim(self, attention: nn.Module) -> int:
        """The width of one head's keys, also in layers without a key projection."""
        return attention.head_dim

    def value_dim(self, attention: nn.Module) -> int:
        """The width of one head's values, which equals the keys'."""
        return attention.head_dim


def _text_model(model: nn.Module) -> nn.Module:
    return model.get("language_model", model)


FAMILY = Gemma4("gemma4_text")
