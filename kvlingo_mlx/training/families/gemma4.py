"""Gemma-4: normed values, wider heads in global layers, last layers that own no cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kvlingo_mlx.format.geometry import RopeSpec, configured_rope
from kvlingo_mlx.training.families.base import Positions, TorchFamily, places

LOCAL, GLOBAL = "sliding_attention", "full_attention"


class Gemma4(TorchFamily):
    """A text model, or that of a multimodal one."""

    no_windows = "layer_types to the same layers"

    # mlx-lm's own, where a config says nothing; transformers has others.
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
        """Released configs leave some of it out."""
        if "text_config" not in config:
            return {**self.DEFAULTS, **config}
        rows = {"vocab_size": config.get("vocab_size", self.DEFAULTS["vocab_size"])}
        return {**self.DEFAULTS, **config["text_config"], **rows}

    def text(self, model: Any) -> Any:
        """The multimodal model has its text model beside the towers."""
        return getattr(model.model, "language_model", model.model)

    def attentions(self, model: Any) -> list[Any]:
        """Layers that share another's cache come last and own none."""
        return [a for a in super().attentions(model) if not a.is_kv_shared_layer]

    def readers(self, model: Any) -> list[tuple[Any, ...]]:
        """The last owner of each kind is read by the layers that own none, too."""
        owners = self.attentions(model)
        shared = super().attentions(model)[len(owners) :]
        return [
            (a, *(s for s in shared if a.store_full_length_kv and s.layer_type == a.layer_type))
            for a in owners
        ]

    def logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Bounded by a tanh."""
        logits, bound = model.lm_head(hidden), self.text(model).config.final_logit_softcapping
        return logits if bound is None else torch.tanh(logits / bound) * bound

    # ---- keys and values ------------------------------------------------------------------

    def taps(self, attention: Any) -> tuple[Any, ...]:
        """Without a value projection, the key projection holds both."""
        return super().taps(attention) if attention.v_proj is not None else (attention.k_proj,)

    def states(
        self, attention: Any, outputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values before their norms."""
        return outputs[0], outputs[-1]

    def normalise_values(self, attention: Any, heads: torch.Tensor) -> torch.Tensor:
        """Values have a norm without a weight."""
        return attention.v_norm(heads)

    def rotate(
        self, model: Any, attention: Any, heads: torch.Tensor, start: Positions
    ) -> torch.Tensor:
        """By the rotation of the layer's own kind."""
        states = heads.transpose(0, 1)[None]
        positions = places(start, heads)
        cos, sin = self.text(model).rotary_emb(states, positions, attention.layer_type)
        return sys.modules[type(attention).__module__].apply_rotary_pos_emb(states, cos, sin)

    # ---- facts ----------------------------------------------------------------------------

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """By ``layer_types``, or every so many layers one is global."""
        pattern, window = config["sliding_window_pattern"], config["sliding_window"]
        kinds = config["layer_types"] or [
            LOCAL if (i + 1) % pattern else GLOBAL for i in range(num_layers)
        ]
        return [window if kind == LOCAL else None for kind in kinds[:num_layers]]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """Each kind of layer has parameters of its own."""
        parameters = config["rope_parameters"] or self.ROPES
        own = {"rope_parameters": parameters.get(attention.layer_type)}
        return configured_rope(own, attention.head_dim)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        """transformers keeps the parameters of each kind of layer."""
        parameters = self.text(model).config.rope_parameters[attention.layer_type]
        return configured_rope({"rope_parameters": parameters}, attention.head_dim)
