"""Gemma-3: the text model, alone or inside the multimodal model, with local and global layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from kvlingo_mlx.cuda.families.base import TorchFamily
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope, layer_period


class Gemma3(TorchFamily):
    """The adapter of Gemma-3, with a rotation for each kind of layer and scaled embeddings."""

    turned_by_kind = True
    no_windows = "sliding_window_pattern and layer_types to the same layers"

    # mlx-lm's defaults for what a config leaves out; those of transformers differ.
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
        """The text model's config, completed with mlx-lm's defaults; released ones are sparse."""
        text = config.get("text_config", config)
        found = {**self.DEFAULTS, **self._period(text), **text}
        if text is config:
            return found
        return {**found, "vocab_size": config.get("vocab_size", self.MULTIMODAL_ROWS)}

    def _period(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """``sliding_window_pattern`` from ``layer_types``, the only one that newer configs give."""
        types = text.get("layer_types")
        if types is None or "sliding_window_pattern" in text:
            return {}  # if the two contradict each other, the comparison of windows finds it
        period = layer_period(types)
        if period is None:
            raise UnsupportedModelError(
                "the local and global layers of this gemma3 do not alternate regularly, which "
                "mlx-lm cannot run"
            )
        return {"sliding_window_pattern": period}

    def align(self, model: Any) -> None:
        """Round the scale of embeddings to bfloat16, as mlx-lm does for a model of any dtype."""
        scale = self.text(model).embed_tokens.embed_scale
        scale.copy_(scale.bfloat16())

    def key_norm(self, attention: Any) -> tuple[torch.Tensor, float]:
        """Gemma's norms store what is added to one."""
        return 1 + attention.k_norm.weight.float(), attention.k_norm.eps

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """The windows; one layer in every ``sliding_window_pattern`` is global and has none."""
        window, pattern = config["sliding_window"], config["sliding_window_pattern"]
        return [window if (i + 1) % pattern else None for i in range(num_layers)]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """How mlx-lm rotates keys: local layers have their own base and no scaling."""
        own = (config.get("rope_parameters") or {}).get(attention.layer_type)
        if own is not None:
            return configured_rope({"rope_parameters": own}, attention.head_dim)
        if attention.is_sliding:
            return RopeSpec("default", float(config["rope_local_base_freq"]), attention.head_dim)
        named = {name: config[name] for name in ("rope_theta", "rope_scaling")}
        return configured_rope(named, attention.head_dim)
