"""Mistral-3: a Mistral or a Ministral-3 inside a wrapper whose vision tower mlx-lm leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families import ministral3
from kvlingo_mlx.families.plain import Plain


class Mistral3(Plain):
    """Has full caches only: mlx-lm makes a KVCache for every layer, even one with a window."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of any plain family; a mistral4 inside (latent attention) is refused."""
        if text.get("model_type") == "mistral4":
            raise UnsupportedModelError(
                f"this {self.model_type} holds a mistral4, whose cache keeps latents; it is not "
                "supported"
            )
        return super().settings(text)

    def text_type(self, facts: Mapping[str, Any]) -> str:
        return facts["model_type"]

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        if hasattr(attention, "scaling_beta"):
            return ministral3.FAMILY.queries(attention, projected, offset)
        return super().queries(attention, projected, offset)


# Positions are not relative, since the inner model may be a Ministral-3 or have windows.
FAMILY = Mistral3("mistral3", relative_positions=False)
# mlx-lm uses the same wrapper for LLaVA, with a Llama inside.
FAMILIES = {"llava": Mistral3("llava", relative_positions=False)}
