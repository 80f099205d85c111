"""What training must know about a model family in transformers; one entry each.

The defaults describe the common attention block: ``k_proj`` and ``v_proj``, an optional
per-head ``k_norm``, then rotation by halves. A family's facts are those that mlx-lm goes by;
``agreement.py`` compares them with what transformers made of the same files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.geometry import CacheGeometry, LayerGeometry, RopeSpec, configured_rope


@dataclass(frozen=True)
class TorchFamily:
    """One model family, by the ``model_type`` of its text model's config.

    ``scaled_rope`` is False where mlx-lm builds a plain RoPE whatever the config says.
    """

    model_type: str
    scaled_rope: bool = True

    # What transformers can be configured to do and mlx-lm leaves out; how to turn windows off.
    ignored: ClassVar[tuple[str, ...]] = ()
    no_windows: ClassVar[str] = "use_sliding_window to false"

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the text model as mlx-lm reads it; ``config`` is the raw one."""
        return config

    def text(self, model: Any) -> Any:
        """The decoder without its head."""
        return model.model

    def align(self, model: Any) -> None:
        """Make a loaded model compute what mlx-lm does, where that is a matter of rounding."""

    def attentions(self, model: Any) -> list[Any]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in self.text(model).layers]

    def geometry(self, model: Any, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache; ``config`` is what ``facts`` gave."""
        attentions = self.attentions(model)
        windows = self.windows(config, len(attentions))
        return CacheGeometry(
            model_type=self.model_type,
            layers=tuple(self.layer_geometry(i, a, windows[i]) for i, a in enumerate(attentions)),
            rope=tuple(self.rope(config, a) for a in attentions),
            norm_eps=config["rms_norm_eps"],
            embedding_rows=config["vocab_size"],
        )

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """Each layer's window in tokens as mlx-lm runs it; None where it attends to all."""
        return [None] * num_layers

    def windows_here(self, model: Any) -> list[int | None]:
        """The same as transformers runs it."""
        return [getattr(a, "sliding_window", None) for a in self.attentions(model)]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """How mlx-lm rotates a layer's keys."""
        return configured_rope(config, attention.head_dim, scaled=self.scaled_rope)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        """The same as transformers does."""
        parameters = self.text(model).config.rope_parameters
        return configured_rope({"rope_parameters": parameters}, attention.head_dim)

    def layer_geometry(self, index: int, attention: Any, window: int | None) -> LayerGeometry:
        """The shape of one cache layer."""
        heads = attention.k_proj.out_features // attention.head_dim
        value_dim = attention.v_proj.out_features // heads
        return LayerGeometry(
            layer=index,
            kv_heads=heads,
            key_dim=attention.head_dim,
            value_dim=value_dim,
            attention="full" if window is None else "sliding",
            window=window,
        )

    def normalise(self, attention: Any, heads: torch.Tensor, which: str = "k") -> torch.Tensor:
        """Per-head RMSNorm of (T, H, D) keys (``which="q"``: queries), where there is one."""
        norm = getattr(attention, f"{which}_norm", None)
        return heads if norm is None else norm(heads)

    def rotate(self, model: Any, attention: Any, heads: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate (T, H, D) keys or queries at positions ``start`` and on; (1, H, T, D)."""
        states = heads.transpose(0, 1)[None]
        positions = torch.arange(start, start + len(heads), device=heads.device)[None]
        cos, sin = self.cosines(model, attention, states, positions)
        apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        return apply(states, states, cos, sin)[0]

    def cosines(
        self, model: Any, attention: Any, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (1, T, D) of a layer's rotation, in the dtype of ``states``."""
        return self.text(model).rotary_emb(states, positions)


class Llama(TorchFamily):
    """Llama, and Mistral, which mlx-lm runs as Llama: no k_norm, windows by ``layer_types``."""

    no_windows = "sliding_window to null and drop layer_types"

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """mlx-lm ignores a window that ``layer_types`` gives to no layer."""
        kinds = config.get("layer_types") or ["full_attention"] * num_layers
        return [config["sliding_window"] if k == "sliding_attention" else None for k in kinds]

    def windows_here(self, model: Any) -> list[int | None]:
        """transformers gives Mistral's to every layer, and Llama none."""
        config = self.text(model).config
        window = config.sliding_window if config.model_type == "mistral" else None
        return [window] * len(self.attentions(model))


class Gemma3(TorchFamily):
    """Gemma-3, text or the text part of the multimodal model: local and global layers."""

    ignored = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    no_windows = "sliding_window_pattern and layer_types to the same layers"

    # mlx-lm's own, where a config says nothing; transformers has others.
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    MULTIMODAL_ROWS = 262208

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Released configs of the multimodal model leave most of the text model's out."""
        if "text_config" not in config:
            return {**self.DEFAULTS, **config}
        rows = {"vocab_size": config.get("vocab_size", self.MULTIMODAL_ROWS)}
        return {**self.DEFAULTS, **config["text_config"], **rows}

    def text(self, model: Any) -> Any:
        """The multimodal model has its text model beside the vision tower."""
        return getattr(model.model, "language_model", model.model)

    def align(self, model: Any) -> None:
        """mlx-lm scales embeddings by a bfloat16 number whatever the model's dtype is."""
        scale = self.text(model).embed_tokens.embed_scale
        scale.copy_(scale.bfloat16())

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """Every so many layers one is global."""
        window, pattern = config["sliding_window"], config["sliding_window_pattern"]
        return [window if (i + 1) % pattern else None for i in range(num_layers)]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """Local layers have a base of their own and no scaling."""
        own = (config.get("rope_parameters") or {}).get(attention.layer_type)
        if own is not None:
            return configured_rope({"rope_parameters": own}, attention.head_dim)
        if attention.is_sliding:
            return RopeSpec("default", float(config["rope_local_base_freq"]), attention.head_dim)
        named = {name: config[name] for name in ("rope_theta", "rope_scaling")}
        return configured_rope(named, attention.head_dim)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        """transformers keeps the parameters of each kind of layer."""
        parameters = self.text(model).config.rope_parameters[attention.layer_type]
        return configured_rope({"rope_parameters": parameters}, attention.head_dim)

    def cosines(
        self, model: Any, attention: Any, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the layer's own kind."""
        return self.text(model).rotary_emb(states, positions, attention.layer_type)


FAMILIES = {
    "qwen3": TorchFamily("qwen3"),
    "qwen3_moe": TorchFamily("qwen3_moe", scaled_rope=False),
    "llama": Llama("llama"),
    "mistral": Llama("mistral"),
    "gemma3_text": Gemma3("gemma3_text"),
    "gemma3": Gemma3("gemma3_text"),
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
