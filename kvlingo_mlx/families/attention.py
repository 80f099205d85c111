"""Families whose attention, or whose config, differs from the common one by more than names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family, Finish, Sides, text_model
from kvlingo_mlx.format.geometry import RopeSpec, configured_rope, spelled_out


class Gemma3(Family):
    """Gemma-3: each kind of layer has its own rotation; k_norm multiplies by (1 + weight)."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The rotation of each kind of layer and the period, under the older names."""
        kinds = text.get("rope_parameters") or {}
        found = spelled_out(kinds.get("full_attention", kinds))
        if "sliding_attention" in kinds:
            found["rope_local_base_freq"] = kinds["sliding_attention"]["rope_theta"]
        return found | self.global_layers(text)

    def key_norm(self, attention: nn.Module) -> tuple[mx.array, float]:
        return 1.0 + attention.k_norm.weight, attention.k_norm.eps

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """The layer's rotation; local layers have their own base and no scaling."""
        dims = self.key_dim(attention)
        if attention.is_sliding:
            return RopeSpec("default", float(facts["rope_local_base_freq"]), dims)
        return configured_rope({n: facts.get(n) for n in ("rope_theta", "rope_scaling")}, dims)


class Gemma4(Family):
    """Gemma-4: normed values, wider heads in global layers, last layers without a cache.

    Each kind of layer has its own rotation. In large models, global layers have no value
    projection: their values are the keys before any norm. In small models, each of the last layers
    reads the keys and values of the last layer of its kind that owns a cache.
    """

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return spelled_out(text.get("rope_parameters"))

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """The attention modules that own a cache; the last layers may share another's."""
        return [a for a in super().attentions(model) if a.has_kv]

    def readers(self, model: nn.Module) -> list[tuple[nn.Module, ...]]:
        """For each cache, the layer that owns it and the layers that share it."""
        layers, owners = model.layers, text_model(model).model.previous_kvs
        return [
            tuple(layers[i].self_attn for i, owner in enumerate(owners) if owner == index)
            for index in range(len(self.attentions(model)))
        ]

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        """The projections; without a value projection, the key projection serves for both."""
        return (attention.k_proj,) if attention.use_k_eq_v else super().taps(attention)

    def states(self, attention: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        """The keys and values before their norms."""
        return outputs[0], outputs[-1]

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The norms and the rotation; values have a norm too, without a weight."""
        return dataclasses.replace(super().finish(attention, facts), value_eps=attention.v_norm.eps)

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        parameters = facts["rope_parameters"].get(attention.layer_type)
        return configured_rope({"rope_parameters": parameters}, attention.head_dim)

    def key_dim(self, attention: nn.Module) -> int:
        return attention.head_dim

    value_dim = key_dim


class Hunyuan(Family):
    """Hunyuan, dense: the rotation's base is stretched once by ``alpha``, not with the length."""

    def check_rotation(self, text: Mapping[str, Any]) -> None:
        """Accept every config: "dynamic" here does not depend on the length."""

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        alpha = float((facts.get("rope_scaling") or {}).get("alpha", 1.0))
        scaling = () if alpha == 1.0 else (("alpha", alpha),)
        kind = "ntk_alpha" if scaling else "default"
        return RopeSpec(kind, float(facts["rope_theta"]), attention.rope.dims, scaling=scaling)


class Mistral3(Family):
    """Ministral-3, and wrappers around a Mistral, a Ministral-3 or a Llama.

    A Ministral-3 scales queries by their absolute position, which a hand-over keeps. In a wrapper
    mlx-lm makes a full cache for every layer, even one with a window.
    """

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of any family; a mistral4 inside (latent attention) is refused."""
        if text.get("model_type") == "mistral4":
            raise UnsupportedModelError(
                f"this {self.model_type} holds a mistral4, whose cache keeps latents; it is not "
                "supported"
            )
        return super().settings(text)


class Olmo3(Family):
    """OLMo 3: newer configs give a rotation per kind of layer; mlx-lm scales only global layers."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The global layers' rotation, if local layers have the same base and no scaling."""
        kinds = text.get("rope_parameters") or {}
        full, local = (spelled_out(kinds.get(f"{k}_attention")) for k in ("full", "sliding"))
        if full and local == {"rope_theta": full["rope_theta"]}:
            return full
        return super().settings(text)


class Phi3(Family):
    """Phi-3 and Phi-4: one fused projection writes queries, keys and values."""

    def check_rotation(self, text: Mapping[str, Any]) -> None:
        """Refuse scaled rotations that mlx-lm does not run: all but LongRoPE under older names."""
        super().check_rotation(text)
        found = text.get("rope_scaling") or self.settings(text).get("rope_scaling")
        if not found:
            return
        kind = found.get("type")  # mlx-lm ignores all others; linear also needs long_factor
        if kind not in ("longrope", "su", "linear") or "long_factor" not in found:
            raise UnsupportedModelError(
                f"this {self.model_type} has rope_scaling of type {kind!r} with "
                f"{', '.join(sorted(found))}; mlx-lm runs no scaling here, or longrope with "
                "type and long_factor: correct its config.json, or use another checkpoint"
            )

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        return (attention.qkv_proj,)

    def states(self, attention: nn.Module, outputs: Sequence[mx.array]) -> Sides:
        """The keys and values, which are the last two parts."""
        queries = attention.n_heads * attention.head_dim
        edges = [queries, queries + attention.n_kv_heads * attention.head_dim]
        _, keys, values = mx.split(outputs[0], edges, axis=-1)
        return keys, values

    def key_dim(self, attention: nn.Module) -> int:
        return attention.head_dim

    value_dim = key_dim


GEMMA3 = Gemma3("gemma3_text", period="sliding_window_pattern")
GEMMA4 = Gemma4("gemma4_text")
FAMILIES = {
    # With vision towers or other encoders, which mlx-lm leaves out.
    **dict.fromkeys(("gemma3", "gemma3_text"), GEMMA3),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), GEMMA4),
    # Rotated keys are normed with a weight, so attention depends on more than distances.
    "hunyuan_v1_dense": Hunyuan("hunyuan_v1_dense", relative_positions=False, norm_last=True),
    "llava": Mistral3("llava", relative_positions=False, named_inside=True),
    "ministral3": Mistral3("ministral3", relative_positions=False),
    # Not relative, since the inner model may be a Ministral-3 or have windows.
    "mistral3": Mistral3("mistral3", relative_positions=False, named_inside=True),
    "olmo3": Olmo3("olmo3"),
    "phi3": Phi3("phi3"),
}
