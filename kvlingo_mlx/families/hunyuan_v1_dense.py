"""Hunyuan, dense: keys are rotated first and normed afterwards, so there is no post_norm point."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.families.base import Finish
from kvlingo_mlx.families.plain import Plain
from kvlingo_mlx.format.geometry import RopeSpec


class Hunyuan(Plain):
    """Captures ``post_rope`` as the cache's content, which here is after the norm."""

    @property
    def points(self) -> tuple[str, ...]:
        """The projection's output and the cache's content."""
        return "pre_norm", "post_rope"

    def check_rotation(self, text: Mapping[str, Any]) -> None:
        """Accept every config: "dynamic" here does not depend on the length, see :meth:`rope`."""

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The rotation and the norm, which comes last."""
        finish, norm = super().finish(attention, facts), attention.get("key_layernorm")
        if norm is None:
            return finish
        return dataclasses.replace(
            finish, norm_weight=norm.weight, norm_eps=norm.eps, norm_last=True
        )

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """The rotation; its base is stretched once by ``alpha``, not with the length."""
        alpha = float((facts.get("rope_scaling") or {}).get("alpha", 1.0))
        scaling = () if alpha == 1.0 else (("alpha", alpha),)
        kind = "ntk_alpha" if scaling else "default"
        return RopeSpec(kind, float(facts["rope_theta"]), attention.rope.dims, scaling=scaling)

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        heads = super().queries(attention, projected, offset)
        norm = attention.get("query_layernorm")
        return heads if norm is None else norm(heads)


# Rotated keys are normed with a weight, so attention depends on more than distances.
FAMILY = Hunyuan("hunyuan_v1_dense", relative_positions=False)
