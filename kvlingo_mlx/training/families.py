"""What training must know about a model family in transformers; one entry each.

The defaults describe the common attention block: ``k_proj`` and ``v_proj``, an optional
per-head ``k_norm``, then rotation by halves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.geometry import CacheGeometry, LayerGeometry, configured_rope


@dataclass(frozen=True)
class TorchFamily:
    """One model family, by the ``model_type`` of its config."""

    model_type: str

    def attentions(self, model: Any) -> list[Any]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in model.model.layers]

    def geometry(self, model: Any, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache; ``config`` is the raw config.json."""
        attentions = self.attentions(model)
        return CacheGeometry(
            model_type=self.model_type,
            layers=tuple(self.layer_geometry(i, a) for i, a in enumerate(attentions)),
            rope=tuple(configured_rope(config, a.head_dim) for a in attentions),
            norm_eps=config["rms_norm_eps"],
            embedding_rows=config["vocab_size"],
        )

    def layer_geometry(self, index: int, attention: Any) -> LayerGeometry:
        """The shape of one cache layer."""
        heads = attention.k_proj.out_features // attention.head_dim
        value_dim = attention.v_proj.out_features // heads
        return LayerGeometry(index, heads, attention.head_dim, value_dim)

    def normalise(self, attention: Any, heads: torch.Tensor, which: str = "k") -> torch.Tensor:
        """Per-head RMSNorm of (T, H, D) keys (``which="q"``: queries), where there is one."""
        norm = getattr(attention, f"{which}_norm", None)
        return heads if norm is None else norm(heads)

    def rotate(self, model: Any, attention: Any, heads: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate (T, H, D) keys or queries at positions ``start`` and on; (1, H, T, D)."""
        states = heads.transpose(0, 1)[None]
        positions = torch.arange(start, start + len(heads), device=heads.device)[None]
        cos, sin = model.model.rotary_emb(states, positions)
        apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        return apply(states, states, cos, sin)[0]


FAMILIES = {name: TorchFamily(name) for name in ("qwen3", "qwen3_moe")}


def family_of(model_type: str) -> TorchFamily:
    """The adapter of a model type.

    Raises:
        UnsupportedModelError: There is none; the message lists those there are.
    """
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} cannot be trained; "
            f"supported families: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
