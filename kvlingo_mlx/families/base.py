"""What the rest of the package must know about a model family.

A family is one ``Family`` object. The defaults here describe the common attention block of
mlx-lm: ``k_proj`` and ``v_proj``, an optional per-head RMSNorm named ``k_norm``, then RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from kvlingo_mlx.geometry import CacheGeometry, LayerGeometry, RopeSpec, configured_rope

POINTS = ("pre_norm", "post_norm", "post_rope")
LATENT = "latent"


@dataclass(frozen=True)
class Finish:
    """What a model does to a layer's keys and values between projections and cache.

    Attributes:
        norm_weight: (D,) weight of the keys' per-head RMSNorm, or None where there is none.
        norm_eps: Its epsilon.
        rope: The model's own rotary module.
        rope_spec: The same in comparable form, from the config.
        value_eps: Epsilon of the values' RMSNorm, which has no weight; None: no such norm.
    """

    norm_weight: mx.array | None
    norm_eps: float
    rope: nn.Module
    rope_spec: RopeSpec
    value_eps: float | None = None


@dataclass(frozen=True)
class Family:
    """One model family, by mlx-lm's ``model_type``.

    ``scaled_rope`` is False where mlx-lm builds a plain RoPE whatever the config says.
    """

    model_type: str
    scaled_rope: bool = True

    @property
    def points(self) -> tuple[str, ...]:
        """Where its keys can be captured; the projections' outputs are at the first."""
        return POINTS

    def facts(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the text model; ``config`` is the raw one, of a wrapper perhaps."""
        return config.get("text_config", config)

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in model.layers]

    def readers(self, model: nn.Module) -> list[tuple[nn.Module, ...]]:
        """The attention modules that read each cache, its owner first."""
        return [(attention,) for attention in self.attentions(model)]

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """The modules whose outputs hold a layer's keys and values."""
        return attention.k_proj, attention.v_proj

    def states(
        self, attention: nn.Module, outputs: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Keys and values (B, T, H * D), at the first of ``points``, of what ``taps`` put out."""
        keys, values = outputs
        return keys, values

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation of one layer."""
        norm = attention.get("k_norm")
        return Finish(
            norm_weight=None if norm is None else norm.weight,
            norm_eps=0.0 if norm is None else norm.eps,
            rope=attention.rope,
            rope_spec=self.rope(attention, facts),
        )

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """How a layer rotates its keys."""
        return configured_rope(facts, key_dim(attention), scaled=self.scaled_rope)

    def stored(
        self, attention: nn.Module, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What a layer's cache stores, (B, H, T, D) twice, of finished keys and values."""
        return keys, values

    def attended(self, attention: nn.Module, keys: mx.array, values: mx.array) -> mx.array:
        """The keys that ``queries`` meet, (B, H, T, D), of finished keys and values."""
        return keys

    def query_projection(self, attention: nn.Module) -> nn.Module:
        """The module whose output ``queries`` takes."""
        return attention.q_proj

    def scale(self, attention: nn.Module) -> float:
        """What the products of queries and keys are multiplied by."""
        return attention.scale

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        """Queries as attention uses them: (B, T, Hq * D) projected to (B, Hq, T, D)."""
        batch, tokens, _ = projected.shape
        heads = projected.reshape(batch, tokens, attention.n_heads, -1)
        heads = attention.q_norm(heads) if "q_norm" in attention else heads
        return attention.rope(heads.transpose(0, 2, 1, 3), offset=offset)

    def layer_geometry(self, index: int, attention: nn.Module, cache: Any) -> LayerGeometry:
        """The shape of one cache layer; ``cache`` is the one mlx-lm makes for it."""
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        return LayerGeometry(
            layer=index,
            kv_heads=attention.n_kv_heads,
            key_dim=key_dim(attention),
            value_dim=self.value_dim(attention),
            attention="full" if window is None else "sliding",
            window=window,
        )

    def value_dim(self, attention: nn.Module) -> int:
        """Width of one head's values."""
        return output_width(attention.v_proj) // attention.n_kv_heads

    def geometry(self, model: nn.Module, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache, as loaded."""
        facts, caches = self.facts(model, config), make_prompt_cache(model)
        attentions = self.attentions(model)
        pairs = zip(attentions, caches, strict=True)
        return CacheGeometry(
            model_type=self.model_type,
            layers=tuple(self.layer_geometry(i, a, c) for i, (a, c) in enumerate(pairs)),
            rope=tuple(self.finish(a, facts).rope_spec for a in attentions),
            norm_eps=facts["rms_norm_eps"],
            embedding_rows=facts["vocab_size"],
        )


def output_width(projection: nn.Module) -> int:
    """Rows of a linear layer, float or quantised."""
    return projection.weight.shape[0]


def key_dim(attention: nn.Module) -> int:
    """Width of one head's keys."""
    return output_width(attention.k_proj) // attention.n_kv_heads
