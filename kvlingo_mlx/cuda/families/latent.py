"""Multi-head latent attention (MLA): a token is cached as one latent and one rotary key.

``values`` are the latents c_KV after kv_a_layernorm, and ``keys`` the rotary keys k_R before their
rotation, one head each (paper: section "MLA cache translation"). transformers caches the same, with
the rotary key rotated, and expands them in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvlingo_mlx.cuda.families.base import TorchFamily
from kvlingo_mlx.format.geometry import LayerGeometry, RopeSpec, configured_rope


@dataclass(frozen=True)
class Latent(TorchFamily):
    """DeepSeek-V3 and models built like it; ``base`` is mlx-lm's default rope_theta."""

    base: float = 1e4

    points: ClassVar[tuple[str, ...]] = ("latent",)
    # The RoPE type that mlx-lm builds, where it ignores the config's own type.
    rope_type: ClassVar[str | None] = None

    def taps(self, attention: Any) -> tuple[Any, ...]:
        """The projection whose output holds the latent and the rotary key."""
        return (attention.kv_a_proj_with_mqa,)

    def states(
        self, attention: Any, outputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary keys (T, dr) and normed latents (T, r)."""
        sizes = [attention.kv_lora_rank, attention.qk_rope_head_dim]
        latent, keys = outputs[0].split(sizes, dim=-1)
        return keys, attention.kv_a_layernorm(latent)

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cached pair in transformers' order: latents first."""
        return values, keys

    def turned(self, module: Any, states: torch.Tensor, angles: Any) -> torch.Tensor:
        """Rotate pairs of neighbours; the output has the first numbers of all pairs in front."""
        return module.apply_rotary_pos_emb_interleave(states, states, *angles)[0]

    # ---- attention ------------------------------------------------------------------------

    def query_projection(self, attention: Any) -> Any:
        """The projection of queries, which may have their own latent."""
        return attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj

    def queries(
        self, model: Any, attention: Any, projected: torch.Tensor, start: int
    ) -> torch.Tensor:
        """The queries: the part without positions, then the rotated part."""
        heads = projected.view(len(projected), attention.num_heads, -1)
        sizes = [attention.qk_nope_head_dim, attention.qk_rope_head_dim]
        plain, rotary = heads.split(sizes, dim=-1)
        rotary = self.rotate(model, attention, rotary, start)[0]
        return torch.cat([plain.transpose(0, 1), rotary], dim=-1)

    def attended(self, attention: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The keys of every head, expanded from the latent."""
        return attention.expand_kv(values[None], keys[None])[0][0]

    # ---- facts ----------------------------------------------------------------------------

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        parameters = config.get("rope_parameters") or {}
        base = config.get("rope_theta") or parameters.get("rope_theta") or self.base
        scaling = config.get("rope_scaling") or parameters
        if self.rope_type is not None:
            scaling = {**scaling, "type": self.rope_type}
        spec = configured_rope(
            {"rope_theta": base, "rope_scaling": scaling}, self.key_dim(attention)
        )
        return dataclasses.replace(spec, traditional=True)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        spec = super().rope_here(model, attention)
        interleaved = getattr(self.text(model).config, "rope_interleave", True)
        return dataclasses.replace(spec, traditional=interleaved)

    def key_dim(self, attention: Any) -> int:
        return attention.qk_rope_head_dim

    def layer_geometry(self, index: int, attention: Any, window: int | None) -> LayerGeometry:
        """The shape of one cache layer: one head, with rotary keys and latents as values."""
        return LayerGeometry(
            layer=index,
            kv_heads=1,
            key_dim=attention.qk_rope_head_dim,
            value_dim=attention.kv_lora_rank,
            attention="latent",
        )


class DeepseekV2(Latent):
    """DeepSeek-V2, which mlx-lm rotates by YaRN whatever type the config names."""

    rope_type = "yarn"

    def turned(self, module: Any, states: torch.Tensor, angles: Any) -> torch.Tensor:
        """Rotate by complex multiplication; ``angles`` are complex numbers."""
        return module.apply_rotary_emb(states, states, angles)[0]
