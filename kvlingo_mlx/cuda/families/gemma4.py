"""Gemma-4: normed values, wider heads in global layers, last layers that share a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kvlingo_mlx.cuda.families.base import TorchFamily
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope

LOCAL, GLOBAL = "sliding_attention", "full_attention"


class Gemma4(TorchFamily):
    """The adapter of Gemma-4: a text model, alone or inside a multimodal one."""

    turned_by_kind = True
    no_windows = "layer_types to the same layers"

    # mlx-lm's defaults for what a config leaves out; those of transformers differ.
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 35,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "layer_types": None,
        "rope_parameters": None,
        "final_logit_softcapping": 30.0,
    }
    ROPES: ClassVar[dict[str, dict[str, Any]]] = {
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text model's config, completed with mlx-lm's defaults; released ones are sparse."""
        if "text_config" not in config:
            return {**self.DEFAULTS, **config}
        rows = {"vocab_size": config.get("vocab_size", self.DEFAULTS["vocab_size"])}
        return {**self.DEFAULTS, **config["text_config"], **rows}

    def attentions(self, model: Any) -> list[Any]:
        """The attention modules that own a cache; later layers share one and are left out."""
        return [a for a in super().attentions(model) if not a.is_kv_shared_layer]

    def readers(self, model: Any) -> list[tuple[Any, ...]]:
        """The readers of each cache: its owner and, for a kind's last owner, the shared layers."""
        owners = self.attentions(model)
        shared = super().attentions(model)[len(owners) :]
        return [
            (a, *(s for s in shared if a.store_full_length_kv and s.layer_type == a.layer_type))
            for a in owners
        ]

    def logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The next-token logits, bounded by a tanh."""
        logits, bound = model.lm_head(hidden), self.text(model).config.final_logit_softcapping
        return logits if bound is None else torch.tanh(logits / bound) * bound

    # ---- keys and values ------------------------------------------------------------------

    def taps(self, attention: Any) -> tuple[Any, ...]:
        """The projections; without a value projection, the key projection gives keys and values."""
        return super().taps(attention) if attention.v_proj is not None else (attention.k_proj,)

    def states(
        self, attention: Any, outputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values before their norms."""
        return outputs[0], outputs[-1]

    def normalise_values(self, attention: Any, heads: torch.Tensor) -> torch.Tensor:
        """The values after their norm, which has no weight."""
        return attention.v_norm(heads)

    def turned(self, module: Any, states: torch.Tensor, angles: Any) -> torch.Tensor:
        """The states rotated; Gemma-4's function takes one array, not queries and keys."""
        return module.apply_rotary_pos_emb(states, *angles)

    # ---- facts ----------------------------------------------------------------------------

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """The windows, by ``layer_types`` or with one global layer in every pattern."""
        pattern, window = config["sliding_window_pattern"], config["sliding_window"]
        kinds = config["layer_types"] or [
            LOCAL if (i + 1) % pattern else GLOBAL for i in range(num_layers)
        ]
        return [window if kind == LOCAL else None for kind in kinds[:num_layers]]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """How mlx-lm rotates keys; each kind of layer has its own parameters."""
        parameters = config["rope_parameters"] or self.ROPES
        own = {"rope_parameters": parameters.get(attention.layer_type)}
        return configured_rope(own, attention.head_dim)
