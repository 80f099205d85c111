"""Mistral-3 with its vision tower, which mlx-lm leaves out: a Mistral or Ministral-3 inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families import ministral3
from kvlingo_mlx.families.plain import Plain


class Mistral3(Plain):
    """mlx-lm makes one KVCache a layer here, for layers with a window too."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """As in any plain family; the third kind of text model has latent attention."""
        if text.get("model_type") == "mistral4":
            raise UnsupportedModelError(
                f"this {self.model_type} holds a mistral4, whose cache keeps latents; it is not "
                "supported"
            )
        return super().settings(text)

    def text_type(self, facts: Mapping[str, Any]) -> str:
        """The inner model's own type."""
        return facts["model_type"]

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        """As the inner model has them."""
        if hasattr(attention, "scaling_beta"):
            return ministral3.FAMILY.queries(attention, projected, offset)
        return super().queries(attention, projected, offset)


FAMILY = Mistral3("mistral3", relative_positions=False)  # perhaps a Ministral-3, or windows
# LLaVA is run by this file, too, by Llama's inside.
FAMILIES = {"llava": Mistral3("llava", relative_positions=False)}
