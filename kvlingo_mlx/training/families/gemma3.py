"""Gemma-3, text or the text part of the multimodal model: local and global layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope, layer_period
from kvlingo_mlx.training.families.base import TorchFamily


class Gemma3(TorchFamily):
    """A rotation for each kind of layer; embeddings are scaled."""

    no_windows = "sliding_window_pattern and layer_types to the same layers"

    # mlx-lm's own, where a config says nothing; transformers has others.
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    MULTIMODAL_ROWS = 262208

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Released configs of the multimodal model leave most of the text model's out."""
        text = config.get("text_config", config)
        found = {**self.DEFAULTS, **self._period(text), **text}
        if text is config:
            return found
        return {**found, "vocab_size": config.get("vocab_size", self.MULTIMODAL_ROWS)}

    def _period(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """``sliding_window_pattern`` by the layers' kinds, which is all that newer configs list."""
        types = text.get("layer_types")
        if types is None or "sliding_window_pattern" in text:
            return {}  # should the two differ, the windows will
        period = layer_period(types)
        if period is None:
            raise UnsupportedModelError(
                "the local and global layers of this gemma3 do not alternate regularly, which "
                "mlx-lm cannot run"
            )
        return {"sliding_window_pattern": period}

    def text(self, model: Any) -> Any:
        """The multimodal model has its text model beside the vision tower."""
        return getattr(model.model, "language_model", model.model)

    def align(self, model: Any) -> None:
        """mlx-lm scales embeddings by a bfloat16 number whatever the model's dtype is."""
        scale = self.text(model).embed_tokens.embed_scale
        scale.copy_(scale.bfloat16())

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """Every so many layers one is global."""
        window, pattern = config["sliding_window"], config["sliding_window_pattern"]
        return [window if (i + 1) % pattern else None for i in range(num_layers)]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """Local layers have a base of their own and no scaling."""
        own = (config.get("rope_parameters") or {}).get(attention.layer_type)
        if own is not None:
            return configured_rope({"rope_parameters": own}, attention.head_dim)
        if attention.is_sliding:
            return RopeSpec("default", float(config["rope_local_base_freq"]), attention.head_dim)
        named = {name: config[name] for name in ("rope_theta", "rope_scaling")}
        return configured_rope(named, attention.head_dim)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        """transformers keeps the parameters of each kind of layer."""
        parameters = self.text(model).config.rope_parameters[attention.layer_type]
        return configured_rope({"rope_parameters": parameters}, attention.head_dim)

    def cosines(
        self, model: Any, attention: Any, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the layer's own kind."""
        return self.text(model).rotary_emb(states, positions, attention.layer_type)
