"""What training needs to know about a model family in transformers, and the families there are.

:class:`TorchFamily` describes the common attention block: ``k_proj`` and ``v_proj``, an optional
per-head ``k_norm``, then rotation by halves. A family states the facts as mlx-lm uses them;
``check_agreement`` compares them with what transformers reads from the same files.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format import misread
from kvlingo_mlx.format.geometry import (
    CacheGeometry,
    LayerGeometry,
    RopeSpec,
    configured_rope,
    layer_period,
)

POINTS = ("pre_norm", "post_norm", "post_rope")
LOCAL, GLOBAL = "sliding_attention", "full_attention"

# The position of a span's first token, or of each token (T,). mypy without torch needs the word.
Positions: TypeAlias = int | torch.Tensor
KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def places(start: Positions, heads: torch.Tensor) -> torch.Tensor:
    """The positions (1, T) of (T, H, D) keys."""
    if isinstance(start, int):
        start = torch.arange(start, start + len(heads), device=heads.device)
    return start[None]


@dataclass(frozen=True)
class TorchFamily:
    """One model family, by the ``model_type`` of its text model's config.

    ``scaled_rope`` is False where mlx-lm builds a plain RoPE and ignores the config's scaling.
    """

    model_type: str
    scaled_rope: bool = True

    # The capture points of keys; projections output keys at the first one.
    points: ClassVar[tuple[str, ...]] = POINTS
    # Whether transformers has a rotation for each kind of layer.
    turned_by_kind: ClassVar[bool] = False
    # How a user turns windows off in config.json.
    no_windows: ClassVar[str] = "use_sliding_window to false"

    # ---- the model ------------------------------------------------------------------------

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text model's config as mlx-lm reads it; ``config`` is the raw one."""
        return config

    def text(self, model: Any) -> Any:
        """The decoder of the text model, without its language-model head and its other towers."""
        return getattr(model.model, "language_model", model.model)

    def align(self, model: Any) -> None:
        """Make a loaded model round as mlx-lm does, where the two differ only in rounding."""

    def attentions(self, model: Any) -> list[Any]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in self.text(model).layers]

    def readers(self, model: Any) -> list[tuple[Any, ...]]:
        """For each cache, the attention modules that read it; its owner comes first."""
        return [(attention,) for attention in self.attentions(model)]

    def logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        return model.lm_head(hidden)

    # ---- keys and values ------------------------------------------------------------------

    def taps(self, attention: Any) -> tuple[Any, ...]:
        """The modules whose outputs hold a layer's keys and values."""
        return attention.k_proj, attention.v_proj

    def states(self, attention: Any, outputs: Sequence[torch.Tensor]) -> KeysValues:
        """Keys and values (T, H * D), at the first of ``points``, from the outputs of ``taps``."""
        return outputs[0], outputs[-1]

    def normalise_values(self, attention: Any, heads: torch.Tensor) -> torch.Tensor:
        """(T, H, D) values after their norm, where there is one."""
        return heads

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Finished keys and values as transformers' cache stores them, (1, H, T, D) each."""
        return keys, values

    def normalise(self, attention: Any, heads: torch.Tensor) -> torch.Tensor:
        """(T, H, D) keys after a per-head RMSNorm, where there is one."""
        norm = getattr(attention, "k_norm", None)
        return heads if norm is None else norm(heads)

    def key_norm(self, attention: Any) -> tuple[torch.Tensor, float]:
        """What a key is multiplied by after it was divided by its root mean square, and epsilon."""
        return attention.k_norm.weight, attention.k_norm.variance_epsilon

    def rotate(
        self, model: Any, attention: Any, heads: torch.Tensor, start: Positions
    ) -> torch.Tensor:
        """Rotate (T, H, D) keys to (1, H, T, D)."""
        states = heads.transpose(0, 1)[None]
        angles = self.cosines(model, attention, states, places(start, heads))
        return self.turned(sys.modules[type(attention).__module__], states, angles)

    def turned(self, module: Any, states: torch.Tensor, angles: Any) -> torch.Tensor:
        """States (1, H, T, D) rotated by ``angles``, by the functions of the family's module."""
        return module.apply_rotary_pos_emb(states, states, *angles)[0]

    def cosines(
        self, model: Any, attention: Any, states: torch.Tensor, positions: torch.Tensor
    ) -> KeysValues:
        """Cosines and sines (1, T, D) of a layer's rotation, in the dtype of ``states``."""
        kind = (attention.layer_type,) if self.turned_by_kind else ()
        return self.text(model).rotary_emb(states, positions, *kind)

    # ---- facts ----------------------------------------------------------------------------

    def geometry(self, model: Any, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache; ``config`` is the result of ``facts``."""
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
        """Each layer's window in tokens in mlx-lm; None where a layer attends to all tokens."""
        return [None] * num_layers

    def windows_here(self, model: Any) -> list[int | None]:
        return [getattr(a, "sliding_window", None) for a in self.attentions(model)]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """How mlx-lm rotates a layer's keys."""
        return configured_rope(config, self.key_dim(attention), scaled=self.scaled_rope)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        """How transformers rotates a layer's keys."""
        parameters = self.text(model).config.rope_parameters
        own = parameters[attention.layer_type] if self.turned_by_kind else parameters
        return configured_rope({"rope_parameters": own}, self.key_dim(attention))

    def key_dim(self, attention: Any) -> int:
        """The width of one head's keys."""
        return attention.head_dim

    def layer_geometry(self, index: int, attention: Any, window: int | None) -> LayerGeometry:
        """The shape of one cache layer."""
        taps, dim = self.taps(attention), self.key_dim(attention)
        heads = taps[0].out_features // dim
        value_dim, local = taps[-1].out_features // heads, window is not None
        return LayerGeometry(index, heads, dim, value_dim, "sliding" if local else "full", window)


class Llama(TorchFamily):
    """Llama, Mistral and Ministral-3: no k_norm, and windows by ``layer_types``."""

    no_windows = "sliding_window to null and drop layer_types"

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """mlx-lm ignores a window that ``layer_types`` gives to no layer."""
        kinds = config.get("layer_types") or [GLOBAL] * num_layers
        return [config["sliding_window"] if kind == LOCAL else None for kind in kinds]

    def windows_here(self, model: Any) -> list[int | None]:
        """Every layer of Mistral and Ministral-3 has one, none of Llama."""
        config = self.text(model).config
        window = None if config.model_type == "llama" else config.sliding_window
        return [window] * len(self.attentions(model))


class TorchGemma3(TorchFamily):
    """Gemma-3, alone or inside a multimodal model: local and global layers, two rotations."""

    turned_by_kind = True
    no_windows = "sliding_window_pattern and layer_types to the same layers"

    # mlx-lm's defaults for what a config leaves out; those of transformers differ.
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
    MULTIMODAL_ROWS: ClassVar[int] = 262208

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text model's config, completed with mlx-lm's defaults; released ones are sparse."""
        text = config.get("text_config", config)
        found = {**self.DEFAULTS, **self._period(text), **text}
        if text is config:
            return found
        return {**found, "vocab_size": config.get("vocab_size", self.MULTIMODAL_ROWS)}

    def _period(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """``sliding_window_pattern`` from ``layer_types``, the only one that newer configs give."""
        types = text.get("layer_types")
        if types is None or "sliding_window_pattern" in text:
            return {}  # if the two contradict each other, the comparison of windows finds it
        period = layer_period(types)
        if period is None:
            raise UnsupportedModelError(
                "the local and global layers of this gemma3 do not alternate regularly, which "
                "mlx-lm cannot run"
            )
        return {"sliding_window_pattern": period}

    def align(self, model: Any) -> None:
        """Round the scale of embeddings to bfloat16, as mlx-lm does for a model of any dtype."""
        scale = self.text(model).embed_tokens.embed_scale
        scale.copy_(scale.bfloat16())

    def key_norm(self, attention: Any) -> tuple[torch.Tensor, float]:
        """Gemma's norms store what is added to one."""
        return 1 + attention.k_norm.weight.float(), attention.k_norm.eps

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """One layer in every ``sliding_window_pattern`` is global."""
        window, pattern = config["sliding_window"], config["sliding_window_pattern"]
        return [window if (i + 1) % pattern else None for i in range(num_layers)]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """Local layers have their own base and no scaling."""
        own = (config.get("rope_parameters") or {}).get(attention.layer_type)
        if own is not None:
            return configured_rope({"rope_parameters": own}, attention.head_dim)
        if attention.is_sliding:
            return RopeSpec("default", float(config["rope_local_base_freq"]), attention.head_dim)
        named = {name: config[name] for name in ("rope_theta", "rope_scaling")}
        return configured_rope(named, attention.head_dim)


class TorchGemma4(TorchGemma3):
    """Gemma-4: normed values, wider heads in global layers, last layers that share a cache."""

    no_windows = "layer_types to the same layers"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 35,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "layer_types": None,
        "rope_parameters": None,
        "final_logit_softcapping": 30.0,
    }
    MULTIMODAL_ROWS: ClassVar[int] = 262144
    ROPES: ClassVar[dict[str, dict[str, Any]]] = {
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    }

    align, key_norm = TorchFamily.align, TorchFamily.key_norm

    def _period(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def attentions(self, model: Any) -> list[Any]:
        """Later layers share a cache, and are left out."""
        return [a for a in super().attentions(model) if not a.is_kv_shared_layer]

    def readers(self, model: Any) -> list[tuple[Any, ...]]:
        """The last owner of each kind is also read by the shared layers of that kind."""
        owners = self.attentions(model)
        shared = super().attentions(model)[len(owners) :]
        return [
            (a, *(s for s in shared if a.store_full_length_kv and s.layer_type == a.layer_type))
            for a in owners
        ]

    def logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Bounded by a tanh."""
        logits, bound = model.lm_head(hidden), self.text(model).config.final_logit_softcapping
        return logits if bound is None else torch.tanh(logits / bound) * bound

    def taps(self, attention: Any) -> tuple[Any, ...]:
        """Without a value projection, the key projection gives keys and values."""
        return super().taps(attention) if attention.v_proj is not None else (attention.k_proj,)

    def normalise_values(self, attention: Any, heads: torch.Tensor) -> torch.Tensor:
        return attention.v_norm(heads)

    def turned(self, module: Any, states: torch.Tensor, angles: Any) -> torch.Tensor:
        """Gemma-4's function takes one array, not queries and keys."""
        return module.apply_rotary_pos_emb(states, *angles)

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """By ``layer_types``, or as in Gemma-3."""
        if not config["layer_types"]:
            return super().windows(config, num_layers)
        kinds = config["layer_types"][:num_layers]
        return [config["sliding_window"] if kind == LOCAL else None for kind in kinds]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        own = (config["rope_parameters"] or self.ROPES).get(attention.layer_type)
        return configured_rope({"rope_parameters": own}, attention.head_dim)


@dataclass(frozen=True)
class Latent(TorchFamily):
    """Multi-head latent attention: DeepSeek-V3, and models built like it.

    ``values`` are the latents c_KV after kv_a_layernorm, ``keys`` the rotary keys k_R before their
    rotation, one head each. ``base`` is mlx-lm's default rope_theta; ``rope_type`` is what mlx-lm
    builds where it ignores the config's own type.
    """

    base: float = 1e4
    rope_type: str | None = None

    points: ClassVar[tuple[str, ...]] = ("latent",)

    def taps(self, attention: Any) -> tuple[Any, ...]:
        return (attention.kv_a_proj_with_mqa,)

    def states(self, attention: Any, outputs: Sequence[torch.Tensor]) -> KeysValues:
        """The rotary keys (T, dr) and normed latents (T, r)."""
        sizes = [attention.kv_lora_rank, attention.qk_rope_head_dim]
        latent, keys = outputs[0].split(sizes, dim=-1)
        return keys, attention.kv_a_layernorm(latent)

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """transformers stores latents first."""
        return values, keys

    def turned(self, module: Any, states: torch.Tensor, angles: Any) -> torch.Tensor:
        """Rotate pairs of neighbours; the output has the first numbers of all pairs in front."""
        if isinstance(angles, torch.Tensor):  # DeepSeek-V2 has complex numbers
            return module.apply_rotary_emb(states, states, angles)[0]
        return module.apply_rotary_pos_emb_interleave(states, states, *angles)[0]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        parameters = config.get("rope_parameters") or {}
        base = config.get("rope_theta") or parameters.get("rope_theta") or self.base
        scaling = config.get("rope_scaling") or parameters
        if self.rope_type is not None:
            scaling = {**scaling, "type": self.rope_type}
        facts = {"rope_theta": base, "rope_scaling": scaling}
        spec = configured_rope(facts, self.key_dim(attention))
        return dataclasses.replace(spec, traditional=True)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        spec = super().rope_here(model, attention)
        interleaved = getattr(self.text(model).config, "rope_interleave", True)
        return dataclasses.replace(spec, traditional=interleaved)

    def key_dim(self, attention: Any) -> int:
        return attention.qk_rope_head_dim

    def layer_geometry(self, index: int, attention: Any, window: int | None) -> LayerGeometry:
        """One head, with rotary keys and latents as values."""
        width = attention.qk_rope_head_dim
        return LayerGeometry(index, 1, width, attention.kv_lora_rank, "latent")


# Read and written here as in mlx-lm, biases, multipliers and scaled rotations among it.
PLAIN = ("granite", "iquestcoder", "qwen2", "qwen3", "seed_oss")
FAMILIES: dict[str, TorchFamily] = {
    **{name: TorchFamily(name) for name in PLAIN},
    "qwen3_moe": TorchFamily("qwen3_moe", scaled_rope=False),
    "llama": Llama("llama"),
    "mistral": Llama("mistral"),
    "ministral3": Llama("ministral3"),
    "gemma3_text": TorchGemma3("gemma3_text"),
    "gemma3": TorchGemma3("gemma3_text"),
    "gemma4_text": TorchGemma4("gemma4_text"),
    "gemma4": TorchGemma4("gemma4_text"),
    "deepseek_v2": Latent("deepseek_v2", rope_type="yarn"),
    "deepseek_v3": Latent("deepseek_v3"),
    "glm4_moe_lite": Latent("glm4_moe_lite", base=1e6),
}

# Families of models that transformers does not know: importing their file adds them to the table.
ELSEWHERE = {"converted_mla": "benchmarks.paper.converted_mla.on_torch"}

# They keep recurrent states: a cache that PyTorch's path here cannot make.
HYBRIDS = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("granitemoehybrid", "nemotron_h", "lfm2", "lfm2_moe"),
)


def family_of(model_type: str) -> TorchFamily:
    """The adapter of a model type; without one UnsupportedModelError, which says what there is."""
    if model_type.removesuffix("_text") in HYBRIDS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} keeps recurrent states, through which only MLX trains "
            "here: --device mlx"
        )
    if model_type not in FAMILIES:
        instead = f"--device mlx, or one of {', '.join(sorted(FAMILIES))}"
        if model_type in ELSEWHERE:
            instead = f"import {ELSEWHERE[model_type]} first"
        raise UnsupportedModelError(
            f"model_type {model_type!r} cannot be trained on PyTorch; {instead}"
        )
    return FAMILIES[model_type]


# ---- agreement with mlx-lm ----------------------------------------------------------------------

# YaRN's magnitude scaling: transformers applies it only where both parameters are given, mlx-lm
# also with one of them.
MSCALES = ("mscale", "mscale_all_dim")
# RoPE types that transformers and mlx-lm compute alike, with the parameters that both read.
# ``llama_4_scaling_beta`` scales queries only, in the family that has it.
COMMON_ROPES: dict[str, set[str]] = {
    "default": set(),
    "listed": {"frequencies"},
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
             "llama_4_scaling_beta", *MSCALES},
    "proportional": {"partial_rotary_factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings"},
}  # fmt: skip


def check_agreement(family: TorchFamily, model: Any, config: Mapping[str, Any], name: str) -> None:
    """Refuse (UnsupportedModelError) a model that transformers runs differently from mlx-lm.

    A translator trained here would be for a model that computes something else than the one on the
    Mac. ``config`` is the result of ``family.facts``.
    """
    try:
        misread.check(config["model_type"], config)
        _check_windows(family, model, config)
        ropes = {
            (family.rope(config, attention), family.rope_here(model, attention))
            for attention in family.attentions(model)
        }
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from None
    for ours, theirs in sorted(ropes, key=str):
        _check_rope(ours, theirs, name)


def _check_windows(family: TorchFamily, model: Any, config: Mapping[str, Any]) -> None:
    here, context = family.windows_here(model), config["max_position_embeddings"]
    for layer, windows in enumerate(zip(here, family.windows(config, len(here)), strict=True)):
        # A window at least as long as the context is none.
        reach = [f"{w} tokens" if w is not None and w < context else "all" for w in windows]
        if reach[0] != reach[1]:
            raise UnsupportedModelError(
                f"layer {layer} attends to {reach[0]} in transformers and to {reach[1]} in "
                f"mlx-lm; set {family.no_windows} in its config.json"
            )


def _check_rope(ours: RopeSpec, theirs: RopeSpec, name: str) -> None:
    if ours != theirs:
        raise UnsupportedModelError(
            f"{name} has RoPE {_in_words(theirs)}, which mlx-lm runs as {_in_words(ours)}: a "
            "translator trained here would not fit it there; make its config.json say what "
            "mlx-lm runs"
        )
    parameters = dict(ours.scaling)
    alone = len([name for name in MSCALES if parameters.get(name)]) == 1
    if alone or ours.type not in COMMON_ROPES or not set(parameters) <= COMMON_ROPES[ours.type]:
        known = "; ".join(" ".join([kind, *sorted(has)]) for kind, has in COMMON_ROPES.items())
        raise UnsupportedModelError(
            f"{name} has RoPE {_in_words(ours)}, which mlx-lm and transformers compute "
            f"differently; training knows these types and parameters: {known}"
        )


def _in_words(rope: RopeSpec) -> str:
    scaling = "".join(f", {name} {value}" for name, value in rope.scaling)
    return f"{rope.type!r} (base {rope.base:g}{scaling})"
