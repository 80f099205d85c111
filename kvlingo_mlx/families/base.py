"""What the rest of the package must know about a model family.

A family is one file with one ``Family`` object. The defaults here describe the common
attention block of mlx-lm: ``k_proj`` and ``v_proj``, an optional per-head RMSNorm named
``k_norm``, then RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.geometry import CacheGeometry, LayerGeometry, RopeSpec, configured_rope


@dataclass(frozen=True)
class KeyFinish:
    """What a model does to a layer's keys between its projection and its cache.

    Attributes:
        norm_weight: (D,) weight of the per-head RMSNorm, or None where there is none.
        norm_eps: Its epsilon.
        rope: The model's own rotary module.
        rope_spec: The same in comparable form, from the config.
    """

    norm_weight: mx.array | None
    norm_eps: float
    rope: nn.Module
    rope_spec: RopeSpec


@dataclass(frozen=True)
class Family:
    """One model family, by mlx-lm's ``model_type``.

    ``scaled_rope`` is False where mlx-lm builds a plain RoPE whatever the config says.
    """

    model_type: str
    scaled_rope: bool = True

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in model.layers]

    def key_finish(self, attention: nn.Module, config: dict[str, Any]) -> KeyFinish:
        """The norm and the rotation of one layer's keys."""
        norm = attention.get("k_norm")
        return KeyFinish(
            norm_weight=None if norm is None else norm.weight,
            norm_eps=0.0 if norm is None else norm.eps,
            rope=attention.rope,
            rope_spec=configured_rope(config, _key_dim(attention), scaled=self.scaled_rope),
        )

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        """Queries as attention uses them: (B, T, Hq * D) projected to (B, Hq, T, D)."""
        batch, tokens, _ = projected.shape
        heads = projected.reshape(batch, tokens, attention.n_heads, -1)
        heads = attention.q_norm(heads) if "q_norm" in attention else heads
        return attention.rope(heads.transpose(0, 2, 1, 3), offset=offset)

    def layer_geometry(self, index: int, attention: nn.Module, finish: KeyFinish) -> LayerGeometry:
        """The shape of one cache layer."""
        heads = attention.n_kv_heads
        return LayerGeometry(
            layer=index,
            kv_heads=heads,
            key_dim=_key_dim(attention),
            value_dim=output_width(attention.v_proj) // heads,
        )

    def geometry(self, model: nn.Module, config: dict[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache, as loaded."""
        attentions = self.attentions(model)
        finishes = [self.key_finish(attention, config) for attention in attentions]
        pairs = zip(attentions, finishes, strict=True)
        return CacheGeometry(
            model_type=self.model_type,
            layers=tuple(self.layer_geometry(i, a, f) for i, (a, f) in enumerate(pairs)),
            rope=tuple(finish.rope_spec for finish in finishes),
            norm_eps=config["rms_norm_eps"],
            embedding_rows=config["vocab_size"],
        )


def output_width(projection: nn.Module) -> int:
    """Rows of a linear layer, float or quantised."""
    return projection.weight.shape[0]


def _key_dim(attention: nn.Module) -> int:
    return output_width(attention.k_proj) // attention.n_kv_heads
