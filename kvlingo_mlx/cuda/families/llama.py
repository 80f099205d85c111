"""Llama; Mistral, which mlx-lm runs as Llama; Ministral-3, which scales queries by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvlingo_mlx.cuda.families.base import TorchFamily, places


class Llama(TorchFamily):
    """The adapter of Llama and Mistral: no k_norm, and windows by ``layer_types``."""

    no_windows = "sliding_window to null and drop layer_types"

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """The windows in mlx-lm, which ignores a window that ``layer_types`` gives to no layer."""
        kinds = config.get("layer_types") or ["full_attention"] * num_layers
        return [config["sliding_window"] if k == "sliding_attention" else None for k in kinds]

    def windows_here(self, model: Any) -> list[int | None]:
        """The windows in transformers: on every layer of Mistral and Ministral-3, none in Llama."""
        config = self.text(model).config
        window = None if config.model_type == "llama" else config.sliding_window
        return [window] * len(self.attentions(model))


class Ministral3(Llama):
    """The adapter of Ministral-3: YaRN, and queries scaled beyond the original context."""

    def queries(
        self, model: Any, attention: Any, projected: torch.Tensor, start: int
    ) -> torch.Tensor:
        plain = super().queries(model, attention, projected, start)
        rope = attention.config.rope_parameters
        reached = torch.floor(places(start, projected) / rope["original_max_position_embeddings"])
        scale = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + reached)
        return plain * scale[..., None].to(plain.dtype)
