"""What training needs to know about a model family in transformers, and the families there are.

:class:`TorchFamily` describes the common attention block: ``k_proj`` and ``v_proj``, an optional
per-head ``k_norm``, then rotation by halves. Facts are those of the model that transformers made.
mlx-lm must read the same ones from the files: :func:`check_agreement` refuses what is known to
differ, and a translator's fingerprint of the geometry all else, once it is used there.
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
    spelled_out,
)

POINTS = ("pre_norm", "post_norm", "post_rope")
LOCAL = "sliding_attention"

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
    """One model family, by the ``model_type`` of its text model's config."""

    model_type: str

    # The capture points of keys; projections output keys at the first one.
    points: ClassVar[tuple[str, ...]] = POINTS
    # Whether transformers has a rotation for each kind of layer.
    turned_by_kind: ClassVar[bool] = False
    # What a config.json must have; for what it lacks transformers would fill in its own defaults.
    needed: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "vocab_size", "max_position_embeddings")

    # ---- the model ------------------------------------------------------------------------

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

    def geometry(self, model: Any) -> CacheGeometry:
        """All facts that shape this model's cache."""
        config, attentions = self.text(model).config, self.attentions(model)
        return CacheGeometry(
            model_type=self.model_type,
            layers=tuple(map(self.layer_geometry, range(len(attentions)), attentions)),
            rope=tuple(self.rope(model, attention) for attention in attentions),
            norm_eps=config.rms_norm_eps,
            embedding_rows=config.vocab_size,
        )

    def window(self, attention: Any) -> int | None:
        """A layer's window in tokens; None where mlx-lm has none, whatever the config says."""
        return None

    def rope(self, model: Any, attention: Any) -> RopeSpec:
        """How a layer's keys are rotated."""
        parameters = self.text(model).config.rope_parameters
        own = parameters[attention.layer_type] if self.turned_by_kind else parameters
        return configured_rope({"rope_parameters": own}, self.key_dim(attention))

    def key_dim(self, attention: Any) -> int:
        """The width of one head's keys."""
        return attention.head_dim

    def layer_geometry(self, index: int, attention: Any) -> LayerGeometry:
        """The shape of one cache layer."""
        taps, dim, window = self.taps(attention), self.key_dim(attention), self.window(attention)
        heads = taps[0].out_features // dim
        value_dim, local = taps[-1].out_features // heads, window is not None
        return LayerGeometry(index, heads, dim, value_dim, "sliding" if local else "full", window)


class TorchGemma3(TorchFamily):
    """Gemma-3, alone or inside a multimodal model: local and global layers, two rotations."""

    turned_by_kind = True
    needed = ()  # released configs are sparse

    def align(self, model: Any) -> None:
        """Round the scale of embeddings to bfloat16, as mlx-lm does for a model of any dtype."""
        scale = self.text(model).embed_tokens.embed_scale
        scale.copy_(scale.bfloat16())

    def window(self, attention: Any) -> int | None:
        return attention.sliding_window


class TorchGemma4(TorchGemma3):
    """Gemma-4: normed values, wider heads in global layers, last layers that share a cache."""

    align = TorchFamily.align

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


class Latent(TorchFamily):
    """Multi-head latent attention: DeepSeek-V3, and models built like it.

    ``values`` are the latents c_KV after kv_a_layernorm, ``keys`` the rotary keys k_R before their
    rotation, one head each.
    """

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

    def rope(self, model: Any, attention: Any) -> RopeSpec:
        interleaved = getattr(self.text(model).config, "rope_interleave", True)
        return dataclasses.replace(super().rope(model, attention), traditional=interleaved)

    def key_dim(self, attention: Any) -> int:
        return attention.qk_rope_head_dim

    def layer_geometry(self, index: int, attention: Any) -> LayerGeometry:
        """One head, with rotary keys and latents as values."""
        width = attention.qk_rope_head_dim
        return LayerGeometry(index, 1, width, attention.kv_lora_rank, "latent")


# Read and written here as in mlx-lm, biases, multipliers and scaled rotations among it.
PLAIN = ("granite", "iquestcoder", "qwen2", "qwen3", "seed_oss")
LLAMAS = ("llama", "mistral", "ministral3")
FAMILIES: dict[str, TorchFamily] = {
    **{name: TorchFamily(name) for name in (*PLAIN, "qwen3_moe", *LLAMAS)},
    "gemma3_text": TorchGemma3("gemma3_text"),
    "gemma3": TorchGemma3("gemma3_text"),
    "gemma4_text": TorchGemma4("gemma4_text"),
    "gemma4": TorchGemma4("gemma4_text"),
    **{name: Latent(name) for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
}

# Families of models that transformers does not know: importing their file adds them to the table.
ELSEWHERE = {"converted_mla": "benchmarks.paper.converted_mla.on_torch"}


def family_of(model_type: str) -> TorchFamily:
    """The adapter of a model type; without one UnsupportedModelError, which says what there is."""
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
    Mac. ``config`` is the text model's.
    """
    kind, context = family.model_type, family.text(model).config.max_position_embeddings
    text = {**config, **spelled_out(config.get("rope_parameters"))}
    try:
        misread.check(kind, text)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from None
    window = misread.ignored_window(kind, text)
    if window is not None and window < context:
        raise UnsupportedModelError(
            f"{name}: attends to {window} tokens in transformers and to all in mlx-lm; turn its "
            "window off in its config.json"
        )
    if kind in LLAMAS and LOCAL in (config.get("layer_types") or ()):
        raise UnsupportedModelError(
            f"{name}: has layers with a window in mlx-lm and none in transformers; drop "
            "layer_types from its config.json"
        )
    for rope in {family.rope(model, attention) for attention in family.attentions(model)}:
        parameters = dict(rope.scaling)
        alone = len([each for each in MSCALES if parameters.get(each)]) == 1
        if alone or not set(parameters) <= COMMON_ROPES.get(rope.type, set()):
            known = "; ".join(" ".join([each, *sorted(has)]) for each, has in COMMON_ROPES.items())
            raise UnsupportedModelError(
                f"{name} has RoPE {rope.type!r} with {parameters}, which mlx-lm and transformers "
                f"compute differently; training knows these types and parameters: {known}"
            )
