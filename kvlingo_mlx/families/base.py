"""The interface of model families: what the rest of the package must know about one.

A family is one ``Family`` object. The defaults describe the common attention block of mlx-lm:
``k_proj`` and ``v_proj``, an optional per-head RMSNorm named ``k_norm``, then RoPE.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models import rope_utils
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.models.smollm3 import NoPE

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format import misread
from kvlingo_mlx.format.geometry import (
    CacheGeometry,
    LayerGeometry,
    Recurrence,
    RopeSpec,
    check_rotation,
    configured_rope,
    layer_period,
    spelled_out,
)

Sides = tuple[mx.array, mx.array]  # a layer's keys and values, or what they are made of
Kept = Sequence[mx.array | None]  # what a recurrent layer keeps: a tail, a state; None if nothing
Parts = tuple[mx.array, ...]  # the same after a span
POINTS = ("pre_norm", "post_norm", "post_rope")
LATENT, FULL = "latent", "full_attention"
# How mlx-lm's families call the same thing.
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
NORM_EPS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
SCALED = (
    rope_utils.DynamicNTKScalingRoPE,  # listed so that it is refused by its name
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)


@dataclass(frozen=True)
class Finish:
    """The norms and the rotation between a layer's projections and its cache."""

    # The weight of the keys' RMSNorm: (D,) for a norm per head, (H * D,) for one over all heads;
    # None if keys have no norm
    norm_weight: mx.array | None
    norm_eps: float  # epsilon of that norm
    rope: nn.Module  # model's own rotary module
    # The rotation in a form that can be compared; None if keys are not rotated
    rope_spec: RopeSpec | None
    # The epsilon of the values' RMSNorm, which has no weight; None if there is none
    value_eps: float | None = None
    norm_last: bool = False  # whether keys are rotated before they are normed


@dataclass(frozen=True)
class Family:
    """One model family, named by mlx-lm's ``model_type``.

    Facts and rotations are read off the model that mlx-lm built, because it ignores settings of a
    config that it does not know.
    """

    model_type: str
    # False if attention uses the cached arrays directly, so that ``kv_bits`` would break it
    quantised_cache: bool = True
    # False if attention depends on more than the distance between two positions
    relative_positions: bool = True
    rotated_if: str | None = None  # the attribute of a layer that says whether it rotates
    period: str | None = None  # the name under which mlx-lm reads the period of global layers
    named_inside: bool = False  # whether translators are for the text model's own type
    norm_last: bool = False  # whether keys are rotated before they are normed

    @property
    def points(self) -> tuple[str, ...]:
        """The capture points of this family's keys, beginning with the projections' outputs."""
        return (POINTS[0], POINTS[2]) if self.norm_last else POINTS

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Config entries that make mlx-lm read a raw config correctly where it would misread it.

        Raises:
            UnsupportedModelError: No entry helps, because mlx-lm does not support what it asks.
        """
        text = config.get("text_config", config)
        self.check_rotation(text)
        missing = {k: v for k, v in self.settings(text).items() if text.get(k) is None}
        misread.check(text.get("model_type", self.model_type), {**text, **missing})
        return missing if text is config or not missing else {"text_config": {**text, **missing}}

    def check_rotation(self, text: Mapping[str, Any]) -> None:
        """Refuse (UnsupportedModelError) rotations that mlx-lm lacks or that vary with length."""
        check_rotation(text)

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of a text model's config that mlx-lm does not read, by names that it does read.

        Raises:
            UnsupportedModelError: mlx-lm has no name for a setting.
        """
        parameters = text.get("rope_parameters") or {}
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModelError(
                f"this {self.model_type} has rope_parameters for each kind of layer, which mlx-lm "
                "does not read in this family: it would rotate keys by other angles than trained"
            )
        return spelled_out(parameters) | self.global_layers(text)

    def global_layers(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The period of global layers, for a config that lists its layers' kinds instead.

        Raises:
            UnsupportedModelError: Global layers do not come with one period.
        """
        types = text.get("layer_types")
        if self.period is None or types is None:
            return {}
        period, given, kind = layer_period(types), text.get(self.period), _kind(text)
        if period is None:
            raise UnsupportedModelError(
                f"the kinds of layers of this {kind} do not alternate regularly, which mlx-lm "
                "cannot run"
            )
        if given is not None and any(
            (found == FULL) != ((i + 1) % given == 0) for i, found in enumerate(types)
        ):
            raise UnsupportedModelError(
                f"this {kind} has layer_types with a global layer every {period}, and "
                f"{self.period} {given}, and mlx-lm uses the latter; take out the wrong one"
            )
        return {self.period: period}

    def facts(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text model's arguments with defaults filled in, over its raw config."""
        made = vars(text_model(model).args)
        known = {name: value for name, value in made.items() if value is not None}
        return {**config.get("text_config", config), **known}

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in model.layers]

    def readers(self, model: nn.Module) -> list[tuple[nn.Module, ...]]:
        """The attention modules that read each cache, its owner first."""
        return [(attention,) for attention in self.attentions(model)]

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """The modules whose outputs contain a layer's keys and values."""
        return attention.k_proj, attention.v_proj

    def states(self, attention: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        """Keys and values (B, T, H * D) at the first capture point, from the ``taps``' outputs."""
        keys, values = outputs
        return keys, values

    def rotary(self, attention: nn.Module) -> nn.Module:
        """The module that rotates a layer's queries and keys, or one that rotates nothing."""
        if self.rotated_if is not None and not getattr(attention, self.rotated_if):
            return NoPE()
        return attention.rope

    def key_norm(self, attention: nn.Module) -> tuple[mx.array, float] | None:
        """The weight and the epsilon of a layer's norm of keys; None if it has none.

        Raises:
            UnsupportedModelError: It is no RMSNorm.
        """
        norm = next((attention[name] for name in KEY_NORMS if name in attention), None)
        if norm is not None and type(norm) is not nn.RMSNorm:
            raise UnsupportedModelError(
                f"this {self.model_type} norms its keys by {type(norm).__name__}; "
                "only RMSNorm is supported"
            )
        return None if norm is None else (norm.weight, norm.eps)

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation of one layer."""
        weight, eps = self.key_norm(attention) or (None, 0.0)
        rotary, spec = self.rotary(attention), self.rope(attention, facts)
        return Finish(weight, eps, rotary, spec, norm_last=self.norm_last)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec | None:
        """How a layer rotates its keys, by its module and the config's scaling; None if not."""
        module = self.rotary(attention)
        if isinstance(module, NoPE):
            return None
        if type(module) is nn.RoPE and module.scale == 1.0:
            return RopeSpec("default", float(module.base), module.dims, module.traditional)
        if type(module) is not nn.RoPE and not isinstance(module, SCALED):
            raise UnsupportedModelError(
                f"this {self.model_type} rotates keys by {type(module).__name__}, "
                "which is not supported"
            )
        dims = module.dim if isinstance(module, rope_utils.SuScaledRoPE) else module.dims
        return configured_rope(facts, dims, traditional=getattr(module, "traditional", False))

    def stored(self, attention: nn.Module, keys: mx.array, values: mx.array) -> Sides:
        """The arrays (B, H, T, D) that a layer's cache stores, from finished keys and values."""
        return keys, values

    def recurrence(self, module: nn.Module) -> Recurrence | None:
        """What a layer keeps of a text in place of keys and values; None if it is attention."""
        return None

    def followed(self, module: nn.Module, kept: Kept, keys: mx.array, values: mx.array) -> Parts:
        """What a recurrent layer keeps after a span, from what it kept before.

        Args:
            kept: What it keeps so far.
            keys: (B, T, width) the span's inputs of its convolution.
            values: (B, T, width) its inputs of its gates.
        """
        raise NotImplementedError(f"{self.model_type} has no recurrent layers")

    def layer_geometry(self, index: int, attention: nn.Module, cache: Any) -> LayerGeometry:
        """The shape of one cache layer; ``cache`` is the cache that mlx-lm makes for it."""
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
        """The width of one head's keys."""
        return output_width(attention.k_proj) // kv_heads(attention)

    def value_dim(self, attention: nn.Module) -> int:
        """The width of one head's values."""
        return output_width(attention.v_proj) // kv_heads(attention)

    def geometry(self, model: nn.Module, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that determine the shape of a loaded model's cache."""
        facts, caches = self.facts(model, config), make_prompt_cache(model)
        attentions = self.attentions(model)
        pairs = zip(attentions, caches, strict=True)
        return CacheGeometry(
            model_type=self.text_type(facts),
            layers=tuple(self.layer_geometry(i, a, c) for i, (a, c) in enumerate(pairs)),
            rope=tuple(self.finish(a, facts).rope_spec for a in attentions),
            norm_eps=setting(facts, *NORM_EPS),
            embedding_rows=setting(facts, "vocab_size"),
        )

    def text_type(self, facts: Mapping[str, Any]) -> str:
        """The text model's own type, also inside a wrapper."""
        return (self.named_inside and facts.get("model_type")) or self.model_type


def text_model(model: nn.Module) -> nn.Module:
    """The text model, without any model that wraps it."""
    return model.get("language_model", model)  # a module is a dict of its parts


def setting(facts: Mapping[str, Any], *names: str) -> Any:
    """A setting of a config, under the first of ``names`` that it has.

    Raises:
        UnsupportedModelError: It has none of them.
    """
    for name in names:
        if name in facts:
            return facts[name]
    raise UnsupportedModelError(
        f"this {_kind(facts)} has none of {', '.join(names)} in its config.json; add "
        "what the model was trained with"
    )


def _kind(facts: Mapping[str, Any]) -> str:
    """What a message calls a model; a text model within a wrapper may not say its own type."""
    return str(facts.get("model_type", "model"))


def kv_heads(attention: nn.Module) -> int:
    """The number of KV heads of a layer, under whichever name mlx-lm stores it.

    Raises:
        UnsupportedModelError: It is stored under none of the known names.
    """
    found = [getattr(attention, name) for name in KV_HEADS if hasattr(attention, name)]
    if not found:
        raise UnsupportedModelError(
            f"mlx-lm's {type(attention).__module__} keeps its number of KV heads under none of "
            f"{', '.join(KV_HEADS)}: this family is not supported"
        )
    return found[0]


def output_width(projection: nn.Module) -> int:
    """The number of outputs of a linear layer, float or quantised."""
    return projection.weight.shape[0]
