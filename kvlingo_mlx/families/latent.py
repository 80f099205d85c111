"""Multi-head latent attention (MLA): a token is cached as one latent and one rotary key.

Whatever mlx-lm's cache stores, here ``values`` are c_KV after kv_a_layernorm and ``keys`` are k_R
before its rotation, with one head each (paper: section "MLA cache translation").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.families.base import LATENT, Family, Sides
from kvlingo_mlx.format.geometry import LayerGeometry, RopeSpec, configured_rope


@dataclass(frozen=True)
class LatentFamily(Family):
    """The common part of both ways to cache latents.

    ``traditional`` says whether neighbouring numbers are rotated together. ``rope_type`` is the
    type that mlx-lm builds where it ignores the type in the config, else None.
    """

    traditional: bool = True
    rope_type: str | None = None

    @property
    def points(self) -> tuple[str, ...]:
        """The single capture point of latents."""
        return (LATENT,)

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """The one projection whose output contains the latent and the rotary key."""
        return (attention.kv_a_proj_with_mqa,)

    def states(self, attention: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        """The rotary keys (B, T, dr) and the normed latents (B, T, r)."""
        (projected,) = outputs
        latent, keys = mx.split(projected, [attention.kv_lora_rank], axis=-1)
        return keys, attention.kv_a_layernorm(latent)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """The rotation of the rotary keys."""
        scaling = facts.get("rope_scaling")
        if self.rope_type is not None:
            scaling = {**(scaling or {}), "type": self.rope_type}
        known = {"rope_theta": facts["rope_theta"], "rope_scaling": scaling}
        return configured_rope(known, attention.qk_rope_head_dim, traditional=self.traditional)

    def layer_geometry(self, index: int, attention: nn.Module, cache: Any) -> LayerGeometry:
        """One head: rotary keys as keys and latents as values."""
        return LayerGeometry(
            layer=index,
            kv_heads=1,
            key_dim=attention.qk_rope_head_dim,
            value_dim=attention.kv_lora_rank,
            attention="latent",
        )


@dataclass(frozen=True)
class AbsorbedFamily(LatentFamily):
    """A family whose cache stores the latent as its keys and the rotated key as its values."""

    quantised_cache: bool = False

    def stored(self, attention: nn.Module, keys: mx.array, values: mx.array) -> Sides:
        """The latents (B, 1, T, r) and the rotary keys (B, 1, T, dr)."""
        return values, keys


@dataclass(frozen=True)
class ExpandedFamily(LatentFamily):
    """A family whose cache stores each head's keys and values, as ``kv_b_proj`` expands them."""

    def stored(self, attention: nn.Module, keys: mx.array, values: mx.array) -> Sides:
        """Keys (B, H, T, nope + dr), whose last dr numbers all heads share, and values."""
        batch, _, tokens, _ = values.shape
        both = attention.kv_b_proj(values[:, 0])
        both = both.reshape(batch, tokens, attention.num_heads, -1).transpose(0, 2, 1, 3)
        plain, expanded = mx.split(both, [attention.qk_nope_head_dim], axis=-1)
        rotary = mx.repeat(keys, attention.num_heads, axis=1)
        return mx.concatenate([plain, rotary], axis=-1), expanded


FAMILIES = {
    # mlx-lm rotates by YaRN in the first, and by LongRoPE's long factors in the second, whatever
    # type the config names.
    "deepseek_v2": ExpandedFamily("deepseek_v2", rope_type="yarn"),
    "minicpm3": ExpandedFamily("minicpm3", traditional=False, rope_type="longrope"),
    **{
        name: AbsorbedFamily(name)
        for name in ("deepseek_v3", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2")
    },
}
