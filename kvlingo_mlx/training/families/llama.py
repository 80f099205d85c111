"""Llama; Mistral, which mlx-lm runs as Llama; Ministral-3, whose queries grow with positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvlingo_mlx.training.families.base import TorchFamily, places


class Llama(TorchFamily):
    """No k_norm; windows by ``layer_types``."""

    no_windows = "sliding_window to null and drop layer_types"

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """mlx-lm ignores a window that ``layer_types`` gives to no layer."""
        kinds = config.get("layer_types") or ["full_attention"] * num_layers
        return [config["sliding_window"] if k == "sliding_attention" else None for k in kinds]

    def windows_here(self, model: Any) -> list[int | None]:
        """transformers gives Mistral's and Ministral-3's to every layer, and Llama none."""
        config = self.text(model).config
        window = None if config.model_type == "llama" else config.sliding_window
        return [window] * len(self.attentions(model))


class Ministral3(Llama):
    """YaRN; queries are scaled by how many times their position holds the original context."""

    def queries(
        self, model: Any, attention: Any, projected: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Queries as attention uses them, (Hq, M, D)."""
        plain = super().queries(model, attention, projected, start)
        rope = attention.config.rope_parameters
        reached = torch.floor(places(start, projected) / rope["original_max_position_embeddings"])
        scale = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + reached)
        return plain * scale[..., None].to(plain.dtype)
