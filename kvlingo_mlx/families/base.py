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

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format import misread
from kvlingo_mlx.format.geometry import (
    CacheGeometry,
    LayerGeometry,
    RopeSpec,
    check_rotation,
    configured_rope,
    layer_period,
    spelled_out,
)

POINTS = ("pre_norm", "post_norm", "post_rope")
LATENT, FULL = "latent", "full_attention"
KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
NORM_EPS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps")


@dataclass(frozen=True)
class Finish:
    """What a model does to a layer's keys and values between projections and cache.

    Attributes:
        norm_weight: Weight of the keys' RMSNorm: (D,) for one a head, (H * D,) for one over all
            heads; None where there is none.
        norm_eps: Its epsilon.
        rope: The model's own rotary module.
        rope_spec: The same in comparable form; None where keys are not rotated.
        value_eps: Epsilon of the values' RMSNorm, which has no weight; None: no such norm.
        norm_last: Whether keys are rotated first and normed afterwards.
    """

    norm_weight: mx.array | None
    norm_eps: float
    rope: nn.Module
    rope_spec: RopeSpec | None
    value_eps: float | None = None
    norm_last: bool = False


@dataclass(frozen=True)
class Family:
    """One model family, by mlx-lm's ``model_type``.

    ``scaled_rope`` is False where mlx-lm builds a plain RoPE whatever the config says;
    ``quantised_cache`` where its attention handles the cached arrays itself, which ``kv_bits``
    makes something else of; ``relative_positions`` where attention depends on more of two
    positions than their distance.
    """

    model_type: str
    scaled_rope: bool = True
    quantised_cache: bool = True
    relative_positions: bool = True

    @property
    def points(self) -> tuple[str, ...]:
        """Where its keys can be captured; the projections' outputs are at the first."""
        return POINTS

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What mlx-lm must be told of a raw config that it would misread, to go over that.

        Raises:
            UnsupportedModelError: It cannot be told; or mlx-lm does not do it.
        """
        text = config.get("text_config", config)
        self.check_rotation(text)
        missing = {k: v for k, v in self.settings(text).items() if text.get(k) is None}
        misread.check(text.get("model_type", self.model_type), {**text, **missing})
        return missing if text is config or not missing else {"text_config": {**text, **missing}}

    def check_rotation(self, text: Mapping[str, Any]) -> None:
        """Refuse (UnsupportedModelError) a rotation that mlx-lm does not make, or not once."""
        check_rotation(text)

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """What the config of the text model says in words that mlx-lm does not read, in its own.

        Raises:
            UnsupportedModelError: mlx-lm has no words for it.
        """
        return spelled_out(text.get("rope_parameters"))

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

    def rotary(self, attention: nn.Module) -> nn.Module:
        """The module that rotates a layer's queries and keys."""
        return attention.rope

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation of one layer."""
        norm = attention.get("k_norm")
        return Finish(
            norm_weight=None if norm is None else norm.weight,
            norm_eps=0.0 if norm is None else norm.eps,
            rope=self.rotary(attention),
            rope_spec=self.rope(attention, facts),
        )

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec | None:
        """How a layer rotates its keys; None if it does not."""
        return configured_rope(facts, self.key_dim(attention), scaled=self.scaled_rope)

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

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        """Queries as attention uses them: (B, T, Hq * D) projected to (B, Hq, T, D)."""
        batch, tokens, width = projected.shape
        norm = attention.get("q_norm")
        if norm is not None and norm.weight.size == width:
            projected, norm = norm(projected), None
        heads = projected.reshape(batch, tokens, -1, self.key_dim(attention))
        heads = heads if norm is None else norm(heads)
        return self.rotary(attention)(heads.transpose(0, 2, 1, 3), offset=offset)

    def scale(self, attention: nn.Module) -> float:
        """What the products of queries and keys are multiplied by."""
        return attention.scale

    def layer_geometry(self, index: int, attention: nn.Module, cache: Any) -> LayerGeometry:
        """The shape of one cache layer; ``cache`` is the one mlx-lm makes for it."""
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        return LayerGeometry(
            layer=index,
            kv_heads=kv_heads(attention),
            key_dim=self.key_dim(attention),
            value_dim=self.value_dim(attention),
            attention="full" if window is None else "sliding",
            window=window,
        )

    def key_dim(self, attention: nn.Module) -> int:
        """Width of one head's keys."""
        return key_dim(attention)

    def value_dim(self, attention: nn.Module) -> int:
        """Width of one head's values."""
        return output_width(attention.v_proj) // kv_heads(attention)

    def geometry(self, model: nn.Module, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache, as loaded."""
        facts, caches = self.facts(model, config), make_prompt_cache(model)
        attentions = self.attentions(model)
        pairs = zip(attentions, caches, strict=True)
        return CacheGeometry(
            model_type=self.text_type(facts),
            layers=tuple(self.layer_geometry(i, a, c) for i, (a, c) in enumerate(pairs)),
            rope=tuple(self.finish(a, facts).rope_spec for a in attentions),
            norm_eps=next(facts[name] for name in NORM_EPS if name in facts),
            embedding_rows=facts["vocab_size"],
        )

    def text_type(self, facts: Mapping[str, Any]) -> str:
        """The model type of the text model, whatever wraps it."""
        return self.model_type


def period_setting(text: Mapping[str, Any]) -> dict[str, Any]:
    """``sliding_window_pattern`` of a config that lists its layers' kinds instead.

    Raises:
        UnsupportedModelError: They do not recur with one period.
    """
    types = text.get("layer_types")
    if types is None:
        return {}
    period, given = layer_period(types), text.get("sliding_window_pattern")
    if period is None:
        raise UnsupportedModelError(
            f"the local and global layers of this {text['model_type']} do not alternate "
            "regularly, which mlx-lm cannot run"
        )
    if given is not None and [k == FULL for k in types] != [
        (i + 1) % given == 0 for i in range(len(types))
    ]:
        raise UnsupportedModelError(
            f"this {text['model_type']} has layer_types with a global layer every {period}, and "
            f"sliding_window_pattern {given}, by which mlx-lm goes; take out the wrong one"
        )
    return {"sliding_window_pattern": period}


def kv_heads(attention: nn.Module) -> int:
    """KV heads of a layer, by whichever name mlx-lm has given them."""
    return next(getattr(attention, name) for name in KV_HEADS if hasattr(attention, name))


def output_width(projection: nn.Module) -> int:
    """Rows of a linear layer, float or quantised."""
    return projection.weight.shape[0]


def key_dim(attention: nn.Module) -> int:
    """Width of one head's keys."""
    return output_width(attention.k_proj) // kv_heads(attention)
