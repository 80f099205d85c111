"""Gemma-4, text: normed values, wider heads in global layers, last layers that own no cache.

Local layers keep a window, global ones everything, each kind with a rotation of its own (a
proportional one in global layers). In large models global layers have no value projection:
their values are the keys before any norm. The last layers of small ones read the keys and
values of the last layer of their kind that has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.families.base import Family, Finish
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope


class Gemma4(Family):
    """Facts come from what mlx-lm made of the config: released ones leave much of it out."""

    def facts(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text model's arguments, defaults filled in."""
        return vars(_text_model(model).args)

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """Layers that share another's cache come last and own none."""
        return [a for a in super().attentions(model) if a.has_kv]

    def readers(self, model: nn.Module) -> list[tuple[nn.Module, ...]]:
        """A cache is read by its own layer and by those that share it."""
        layers, owners = model.layers, _text_model(model).model.previous_kvs
        return [
            tuple(layers[i].self_attn for i, owner in enumerate(owners) if owner == index)
            for index in range(len(self.attentions(model)))
        ]

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """Without a value projection, the key projection holds both."""
        return (attention.k_proj,) if attention.use_k_eq_v else super().taps(attention)

    def states(
        self, attention: nn.Module, outputs: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Keys and values before their norms."""
        return outputs[0], outputs[-1]

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """Values have a norm as well, without a weight."""
        return dataclasses.replace(super().finish(attention, facts), value_eps=attention.v_norm.eps)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """Each kind of layer has parameters of its own."""
        return configured_rope(
            {"rope_parameters": facts["rope_parameters"].get(attention.layer_type)},
            attention.head_dim,
        )

    def key_dim(self, attention: nn.Module) -> int:
        """Width of one head's keys, in layers without a projection of them too."""
        return attention.head_dim

    def value_dim(self, attention: nn.Module) -> int:
        """Width of one head's values: the keys'."""
        return attention.head_dim


def _text_model(model: nn.Module) -> nn.Module:
    return model.get("language_model", model)


FAMILY = Gemma4("gemma4_text")
