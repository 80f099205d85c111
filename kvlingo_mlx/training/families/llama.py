"""Llama, and Mistral, which mlx-lm runs as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.training.families.base import TorchFamily


class Llama(TorchFamily):
    """No k_norm; windows by ``layer_types``."""

    no_windows = "sliding_window to null and drop layer_types"

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """mlx-lm ignores a window that ``layer_types`` gives to no layer."""
        kinds = config.get("layer_types") or ["full_attention"] * num_layers
        return [config["sliding_window"] if k == "sliding_attention" else None for k in kinds]

    def windows_here(self, model: Any) -> list[int | None]:
        """transformers gives Mistral's to every layer, and Llama none."""
        config = self.text(model).config
        window = config.sliding_window if config.model_type == "mistral" else None
        return [window] * len(self.attentions(model))
