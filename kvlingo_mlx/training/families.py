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
from kvlingo_mlx.geometry import CacheGeometry, LayerGeometry, RopeSpec, configured_rope

# RoPE types that transformers and mlx-lm compute alike, with the parameters both read.
ROPES = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
    "llama3": {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    },
}  # fmt: skip


@dataclass(frozen=True)
class TorchFamily:
    """One model family, by the ``model_type`` of its config.

    ``scaled_rope`` is False where mlx-lm builds a plain RoPE whatever the config says.
    """

    model_type: str
    scaled_rope: bool = True

    def attentions(self, model: Any) -> list[Any]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in model.model.layers]

    def geometry(self, model: Any, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache; ``config`` is the raw config.json."""
        attentions = self.attentions(model)
        return CacheGeometry(
            model_type=self.model_type,
            layers=tuple(self.layer_geometry(i, a) for i, a in enumerate(attentions)),
            rope=tuple(self.rope(config, a.head_dim) for a in attentions),
            norm_eps=config["rms_norm_eps"],
            embedding_rows=config["vocab_size"],
        )

    def rope(self, config: Mapping[str, Any], dims: int) -> RopeSpec:
        """How mlx-lm rotates the keys of a model with this config."""
        return configured_rope(config, dims, scaled=self.scaled_rope)

    def check_agreement(self, model: Any, config: Mapping[str, Any], name: str) -> None:
        """Refuse a model that transformers would run otherwise than mlx-lm does.

        Its translator would be trained for another model than it meets on a Mac.

        Raises:
            UnsupportedModelError: Names the model, and its window or its RoPE.
        """
        if config.get("use_sliding_window") and config.get("sliding_window"):
            raise UnsupportedModelError(
                f"{name} has use_sliding_window in its config.json: transformers runs its upper "
                "layers with a window, mlx-lm without; set it to false there"
            )
        dims = self.attentions(model)[0].head_dim
        try:
            ours = self.rope(config, dims)
            theirs = configured_rope({"rope_parameters": model.config.rope_parameters}, dims)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{name}: {error}") from None
        if ours != theirs:
            raise UnsupportedModelError(
                f"{name} has RoPE {_in_words(theirs)}, which mlx-lm runs as {_in_words(ours)}: a "
                "translator trained here would not fit it there; make its config.json say what "
                "mlx-lm runs"
            )
        if ours.type not in ROPES or not set(dict(ours.scaling)) <= ROPES[ours.type]:
            known = "; ".join(" ".join([kind, *sorted(ROPES[kind])]) for kind in ROPES)
            raise UnsupportedModelError(
                f"{name} has RoPE {_in_words(ours)}, which mlx-lm and transformers compute "
                f"differently; training knows these types and parameters: {known}"
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


def _in_words(rope: RopeSpec) -> str:
    scaling = "".join(f", {name} {value}" for name, value in rope.scaling)
    return f"{rope.type!r} (base {rope.base:g}{scaling})"


FAMILIES = {
    family.model_type: family
    for family in (TorchFamily("qwen3"), TorchFamily("qwen3_moe", scaled_rope=False))
}


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
