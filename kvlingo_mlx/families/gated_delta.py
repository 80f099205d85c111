"""Qwen3-Next and Qwen3.5: three layers of the gated delta rule to one of gated attention.

A gated delta layer's inputs are queries, keys and values before their convolution, and those of two
gates (write strength and decay). Queries have no part in the state, but in the convolution's tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models import gated_delta

from kvlingo_mlx.families.base import Kept
from kvlingo_mlx.families.recurrent import Recurrent, slid
from kvlingo_mlx.format.geometry import LIFTED

# What transformers takes where a config says nothing, and mlx-lm takes otherwise or not at all.
DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
BASE = 1e4  # transformers' rope_theta where a config has none


def rotation(text: Mapping[str, Any]) -> dict[str, Any]:
    """The ``rope_parameters`` that transformers makes of a config, however it spells them."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    lifted = {name: text[name] for name in LIFTED if text.get(name) is not None}
    share = DEFAULTS["partial_rotary_factor"]
    default = {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": share}
    return {**default, **lifted, **given}


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """Layers by mlx-lm's ``GatedDeltaNet``, whose queries, keys and values have one projection."""

    period: str | None = "full_attention_interval"
    named_inside: bool = True
    sizes: tuple[str, ...] = (
        *("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size"),
    )

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a config; the whole rotation, of which mlx-lm reads ``rope_parameters``."""
        found = super().overrides(config)
        text = config.get("text_config", config)
        entries = {**found.get("text_config", {**text, **found}), "rope_parameters": rotation(text)}
        return {"text_config": entries} if "text_config" in config else entries

    def mixer(self, block: nn.Module) -> nn.Module:
        return block.linear_attn if block.is_linear else block.self_attn

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return module.in_proj_qkv, module.in_proj_b, module.in_proj_a

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        mixed, strengths, decays = outputs
        return mixed, mx.concatenate([strengths, decays], axis=-1)

    def followed(
        self, module: nn.Module, kept: Kept, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, ...]:
        """The tail and the state after a span; in the order in which mlx-lm computes them."""
        tail, state = kept
        batch, tokens, _ = keys.shape
        tail, whole = slid(tail, keys, module.conv_kernel_size)
        mixed = nn.silu(module.conv1d(whole))
        q, k, v = mx.split(mixed, [module.key_dim, 2 * module.key_dim], -1)
        q, k = (each.reshape(batch, tokens, module.num_k_heads, -1) for each in (q, k))
        v = v.reshape(batch, tokens, module.num_v_heads, -1)
        q, k = gated_delta.normalize_qk(q, k, inv_scale=module.head_k_dim**-0.5, eps=1e-6)
        strengths, decays = mx.split(values, 2, axis=-1)
        _, state = gated_delta.gated_delta_update(
            *(q, k, v, decays, strengths, module.A_log, module.dt_bias, state),
            use_kernel=not module.training,
        )
        return tail, state

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        """Queries; a head's projection also holds the gate of its output, which they leave out."""
        batch, tokens, _ = projected.shape
        heads = projected.reshape(batch, tokens, -1, 2 * self.key_dim(attention))
        queries = mx.split(heads, 2, axis=-1)[0].reshape(batch, tokens, -1)
        return super().queries(attention, queries, offset)


@dataclass(frozen=True)
class Interleaved(GatedDelta):
    """Qwen3-Next, whose projections come head by head."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The rotation and the period; what a config may leave out, as transformers takes it."""
        return {**DEFAULTS, **super().settings(text)}

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return Recurrent.overrides(self, config)

    def projections(self, module: nn.Module) -> tuple[nn.Module, ...]:
        return module.in_proj_qkvz, module.in_proj_ba

    def inputs(self, module: nn.Module, outputs: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        q, k, v, _, strengths, decays = module.fix_query_key_value_ordering(*outputs)
        batch, tokens = q.shape[:2]
        mixed = [each.reshape(batch, tokens, -1) for each in (q, k, v)]
        return mx.concatenate(mixed, axis=-1), mx.concatenate([strengths, decays], axis=-1)


FAMILIES = {
    "qwen3_next": Interleaved("qwen3_next"),
    "qwen3_5": GatedDelta("qwen3_5"),
    "qwen3_5_moe": GatedDelta("qwen3_5_moe"),
}
