"""Configs that mlx-lm silently runs in another way than their models were trained: one table.

The fault is in mlx-lm: such a model would answer, but wrongly. Both runtimes check the table, since
a translator trained in PyTorch is meant for mlx-lm too. ``test_misread.py`` compares mlx-lm with
transformers for every family: configs on which they disagree must be listed here, and configs on
which they agree must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.errors import UnsupportedModelError

Text = Mapping[str, Any]  # a text model's config, by the names that mlx-lm reads
SLIDING = "sliding_attention"
# The text models' own types, by the types that multimodal wrappers give them.
INNER = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe", "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe",
}  # fmt: skip
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # logits agree to 3e-4
ACTIVATIONS = {  # what mlx-lm computes whatever the config says; it uses SiLU for all others
    "gemma": GELU, "gemma2": GELU, "gemma3_text": GELU, "gemma4_text": GELU, "phi": GELU,
    "starcoder2": GELU, "nemotron": ("relu2",), "apertus": ("xielu",),
}  # fmt: skip
SILU = ("silu", "swish", "swiglu")
UNREAD = ("lfm2", "lfm2_moe", "nemotron_h")  # transformers reads no ``hidden_act`` there either
# The rope_theta that mlx-lm takes where a config has none, and the one that transformers takes.
BASES = {
    "cohere": (8e6, 5e5), "cohere2": (5e4, 1e4), "exaone_moe": (1e6, 1e4), "phimoe": (1e4, 1e6),
    "qwen2": (1e6, 1e4), "qwen2_moe": (1e6, 1e4), "smollm3": (1e4, 2e6),
    "starcoder2": (1e5, 1e4),
}  # fmt: skip


@dataclass(frozen=True)
class Misread:
    """One setting that mlx-lm ignores or reads in another way.

    Attributes:
        families: The model types concerned.
        found: Names the misread setting of a config; None if mlx-lm reads the config correctly.
        instead: What mlx-lm does instead, as a verb phrase.
    """

    families: tuple[str, ...]
    found: Callable[[str, Text], str | None]
    instead: str


def _scaled(model_type: str, text: Text) -> str | None:
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return None
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in ("default", "mrope") or (kind == "linear" and scaling.get("factor") == 1.0):
        return None
    return f"rope_scaling of type {kind!r}"


def _scaled_unlike(kind: str) -> Callable[[str, Text], str | None]:
    def found(model_type: str, text: Text) -> str | None:
        scaled = _scaled(model_type, text)
        return None if scaled is None or kind in scaled else scaled

    return found


def _long(model_type: str, text: Text) -> str | None:
    found = _scaled(model_type, text)
    return found if found is not None and ("longrope" in found or "'su'" in found) else None


def _by_halves(model_type: str, text: Text) -> str | None:
    return "rope_interleave false" if text.get("rope_interleave") is False else None


def _partly_rotated(model_type: str, text: Text) -> str | None:
    share = text.get("partial_rotary_factor")
    if share == 1.0:
        return None
    return f"partial_rotary_factor {'unset, which is 0.5' if share is None else share}"


def _no_share(model_type: str, text: Text) -> str | None:
    lacking = text.get("partial_rotary_factor") is None
    return "no partial_rotary_factor, for which transformers takes 0.5" if lacking else None


def _no_base(model_type: str, text: Text) -> str | None:
    if text.get("rope_theta") is not None:
        return None
    return f"no rope_theta, for which transformers takes {BASES[model_type][1]:g}"


def _activation(model_type: str, text: Text) -> str | None:
    if model_type in UNREAD:
        return None
    names = [text.get(n) for n in ("hidden_activation", "hidden_act") if text.get(n) is not None]
    known = ACTIVATIONS.get(model_type, SILU)
    return f"the activation {names[0]!r}" if names and names[0] not in known else None


def _activation_of_parts(model_type: str, text: Text) -> str | None:
    for name, known in (("mlp_hidden_act", ("relu2",)), ("mamba_hidden_act", SILU)):
        if text.get(name) not in (None, *known):
            return f"{name} {text[name]!r}"
    return None


def _grouped(model_type: str, text: Text) -> str | None:
    groups = text.get("mamba_n_groups") or 1
    return f"mamba_n_groups {groups}" if groups > 1 else None


def _raw_experts(model_type: str, text: Text) -> str | None:
    return "norm_topk_prob false" if text.get("norm_topk_prob") is False else None


def _normed_experts(model_type: str, text: Text) -> str | None:
    return "norm_topk_prob true" if text.get("norm_topk_prob") else None


def _capped(model_type: str, text: Text) -> str | None:
    names = [n for n in ("attn_logit_softcapping", "final_logit_softcapping") if text.get(n)]
    return f"{names[0]} {text[names[0]]}" if names else None


def _both_ways(model_type: str, text: Text) -> str | None:
    name = "use_bidirectional_attention"
    return name if text.get(name) else None


TABLE = (
    Misread(
        ("Klear", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4",
         "glm4_moe", "granitemoehybrid", "helium", "lfm2", "lfm2_moe", "minimax", "minimax_m2",
         "mixtral", "phi", "qwen2_moe", "qwen3_moe", "solar_open", "stablelm", "starcoder2"),
        _scaled, "rotates keys without that scaling",
    ),
    Misread(("deepseek",), _scaled_unlike("linear"), "rotates keys without that scaling"),
    Misread(("deepseek_v3",), _long, "rotates by other angles"),
    Misread(("deepseek_v2",), _scaled_unlike("yarn"), "takes every scaling for YaRN"),
    Misread(("deepseek_v3",), _by_halves, "rotates neighbours together"),
    Misread(("glm",), _partly_rotated, "rotates all of a head"),
    Misread(("phi",), _no_share, "takes 0.4"),
    Misread(tuple(BASES), _no_base, "takes another"),
    Misread(("qwen2_moe",), _normed_experts, "leaves the experts' weights as they are"),
    Misread(("gemma3_text",), _capped, "caps nothing"),
    Misread(("gemma3_text",), _both_ways, "lets tokens see those before them alone"),
    Misread(("granitemoehybrid",), _grouped, "norms the output of all groups at once"),
    Misread(("nemotron_h",), _activation_of_parts, "computes another one"),
    Misread(("qwen3_5_moe",), _raw_experts, "leaves the experts' weights as they are"),
    Misread(("*",), _activation, "computes another one"),
)  # fmt: skip


def check(model_type: str, text: Text) -> None:
    """Refuse a config that mlx-lm would run in another way than its model was trained.

    Args:
        model_type: The type of the text model or of its wrapper.
        text: The text model's config, by the names that mlx-lm reads.

    Raises:
        UnsupportedModelError: The message says what is misread and what mlx-lm does instead.
    """
    name = INNER.get(model_type, model_type)
    for row in TABLE:
        found = row.found(name, text) if name in row.families or row.families == ("*",) else None
        if found is not None:
            raise UnsupportedModelError(
                f"this {model_type} has {found} in its config.json, and mlx-lm {row.instead} in "
                "this family, so its answers would be wrong; use a checkpoint without that, or "
                "correct its config.json if it is mistaken"
            )


# ---- sliding windows that mlx-lm ignores ----------------------------------------------------


def _every_layer(text: Text) -> bool:
    return True


def _if_used(text: Text) -> bool:
    return bool(text.get("use_sliding_window"))


def _last_layers(text: Text) -> bool:
    types = text.get("layer_types")
    first = text.get("max_window_layers", 28)
    return SLIDING in types if types else first < text["num_hidden_layers"]


def _last_layers_if_used(text: Text) -> bool:
    return _if_used(text) and _last_layers(text)


def _first_layers_if_used(text: Text) -> bool:
    types = text.get("layer_types")
    return _if_used(text) and (SLIDING in types if types else text.get("max_window_layers", 28) > 0)


def _some_layers(text: Text) -> bool:
    return SLIDING in (text.get("layer_types") or [SLIDING])


def _not_listed(text: Text) -> bool:
    return _if_used(text) and not text.get("layer_types")


def _unless_listed(text: Text) -> bool:
    return not text.get("layer_types")


# By family: whether any layer has a window by the config, and the window if the config names none.
WINDOWS: dict[str, tuple[Callable[[Text], bool], int | None]] = {
    "dots1": (_last_layers, 4096),
    "gemma2": (_some_layers, 4096),
    "ministral3": (_unless_listed, None),
    "mistral": (_unless_listed, 4096),
    "mixtral": (_every_layer, None),
    "phi3": (_every_layer, None),
    "phimoe": (_every_layer, None),
    "qwen2": (_last_layers_if_used, 4096),
    "qwen2_moe": (_first_layers_if_used, 4096),
    "qwen3": (_last_layers_if_used, 4096),
    "qwen3_moe": (_if_used, 4096),
    "smollm3": (_not_listed, None),
    "starcoder2": (_every_layer, None),
}


def ignored_window(model_type: str, text: Text) -> int | None:
    """The window, in tokens, that a config sets for some layers and mlx-lm ignores; else None.

    A text within the window is run correctly; a longer text is run as if by another model.
    """
    name = INNER.get(model_type, model_type)
    if name not in WINDOWS:
        return None
    slides, default = WINDOWS[name]
    window = text.get("sliding_window", default)
    return int(window) if window and slides(text) else None


def long_factors_from(model_type: str, text: Text) -> int | None:
    """The tokens up to which a LongRoPE model was trained with its short factors; None if not one.

    mlx-lm rotates by the long factors whatever the length of the text.
    """
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping) or "long_factor" not in scaling:
        return None
    if scaling.get("short_factor", scaling["long_factor"]) == scaling["long_factor"]:
        return None
    name = "original_max_position_embeddings"
    return scaling.get(name) or text.get(name)
