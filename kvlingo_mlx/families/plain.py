"""Families whose attention is mlx-lm's common block without further differences.

Their facts and their rotation are read off the model that mlx-lm built, because mlx-lm ignores
settings of a config that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import nn

from mlx_lm.models import rope_utils
from mlx_lm.models.smollm3 import NoPE

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family, Finish
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope

SCALED = (
    rope_utils.DynamicNTKScalingRoPE,  # listed so that it is refused by its name
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)


@dataclass(frozen=True)
class Plain(Family):
    """A family that is described as mlx-lm runs it.

    If only some layers rotate, ``rotated_if`` names the attribute that says whether a layer does.
    """

    rotated_if: str | None = None

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The rotation, under the names that mlx-lm reads."""
        parameters = text.get("rope_parameters") or {}
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModelError(
                f"this {self.model_type} has rope_parameters for each kind of layer, which mlx-lm "
                "does not read in this family: it would rotate keys by other angles than trained"
            )
        return super().settings(text)

    def facts(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text model's arguments with defaults filled in, merged over the raw config."""
        made = vars(model.get("language_model", model).args)
        known = {name: value for name, value in made.items() if value is not None}
        return {**config.get("text_config", config), **known}

    def rotary(self, attention: nn.Module) -> nn.Module:
        """The layer's own rotary module, or one that rotates nothing."""
        if self.rotated_if is not None and not getattr(attention, self.rotated_if):
            return NoPE()
        return attention.rope

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation; a norm of keys that is not an RMSNorm is refused."""
        norm = attention.get("k_norm", attention.get("k_layernorm"))
        if norm is not None and type(norm) is not nn.RMSNorm:
            raise UnsupportedModelError(
                f"this {self.model_type} norms its keys by {type(norm).__name__}; "
                "only RMSNorm is supported"
            )
        return super().finish(attention, facts)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec | None:
        """The rotation of the layer's module; parameters of scaling come from the config."""
        module = self.rotary(attention)
        if isinstance(module, NoPE):
            return None
        if type(module) is nn.RoPE and module.scale == 1.0:
            return RopeSpec("default", float(module.base), module.dims, module.traditional)
        if type(module) is not nn.RoPE and not isinstance(module, SCALED):
            raise UnsupportedModelError(
                f"this {self.model_type} rotates keys by {type(module).__name__}, "
                "which is not supported"
            )
        dims = module.dim if isinstance(module, rope_utils.SuScaledRoPE) else module.dims
        return configured_rope(facts, dims, traditional=getattr(module, "traditional", False))

    def scale(self, attention: nn.Module) -> float:
        """The layer's own factor if it stores one, else the usual one."""
        names = [name for name in ("scale", "sm_scale") if hasattr(attention, name)]
        return getattr(attention, names[0]) if names else self.key_dim(attention) ** -0.5
