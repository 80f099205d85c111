"""Gemma-3, text: local and global layers with different rotations; k_norm is by (1 + weight)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.backend import nn

from kvlingo_mlx.families.base import Family, Finish, key_dim, period_setting
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope, spelled_out


class Gemma3(Family):
    """Takes facts from mlx-lm's model arguments, because released configs omit most of them."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The rotation of each kind of layer and the period, under the older names."""
        kinds = text.get("rope_parameters") or {}
        found = spelled_out(kinds.get("full_attention", kinds))
        if "sliding_attention" in kinds:
            found["rope_local_base_freq"] = kinds["sliding_attention"]["rope_theta"]
        return found | period_setting(text)

    def facts(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return vars(model.get("language_model", model).args)

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation; the norm's weight is stored as its difference from 1."""
        finish = super().finish(attention, facts)
        return dataclasses.replace(finish, norm_weight=1.0 + attention.k_norm.weight)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """The layer's rotation; local layers have their own base and no scaling."""
        dims = key_dim(attention)
        if attention.is_sliding:
            return RopeSpec("default", float(facts["rope_local_base_freq"]), dims)
        return configured_rope(
            {"rope_theta": facts["rope_theta"], "rope_scaling": facts["rope_scaling"]}, dims
        )


FAMILY = Gemma3("gemma3_text")
