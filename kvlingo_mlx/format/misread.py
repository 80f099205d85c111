"""Configs that mlx-lm silently runs in another way than their models were trained: one table.

The fault is in mlx-lm: such a model would answer, but wrongly. Both runtimes check the table, since
a translator trained in PyTorch is meant for mlx-lm too. ``test_misread.py`` compares mlx-lm with
transformers for every family: configs on which they disagree must be listed here, and configs on
which they agree must not.
"""

from collections.abc import Callable, Mapping
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


Found = Callable[[str, Text], str | None]  # names a misread setting of a model type's config


def _set(*names: str, bad: Callable[[Any], Any] = bool) -> Found:
    """One of these settings is there, and ``bad``."""

    def found(model_type: str, text: Text) -> str | None:
        for name in names:
            if name in text and bad(value := text[name]):
                return f"{name} {str(value).lower() if isinstance(value, bool) else repr(value)}"
        return None

    return found


def _lacking(name: str, taken: Callable[[str], float]) -> Found:
    """A setting is not there, and transformers takes another default than mlx-lm."""

    def found(model_type: str, text: Text) -> str | None:
        told = f"no {name}, for which transformers takes {taken(model_type):g}"
        return told if text.get(name) is None else None

    return found


def _scaled(*kinds: str, but: tuple[str, ...] = ()) -> Found:
    """A scaling of RoPE, of one of these kinds if there are any, and of none of ``but``."""

    def found(model_type: str, text: Text) -> str | None:
        scaling = text.get("rope_scaling")
        if not isinstance(scaling, Mapping):
            return None
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind in ("default", "mrope", *but) or (
            kind == "linear" and scaling.get("factor") == 1.0
        ):
            return None
        return f"rope_scaling of type {kind!r}" if not kinds or kind in kinds else None

    return found


def _activation(model_type: str, text: Text) -> str | None:
    if model_type in UNREAD:
        return None
    names = [text.get(n) for n in ("hidden_activation", "hidden_act") if text.get(n) is not None]
    known = ACTIVATIONS.get(model_type, SILU)
    return f"the activation {names[0]!r}" if names and names[0] not in known else None


# The model types concerned, what names the misread setting, and what mlx-lm does instead.
TABLE: tuple[tuple[tuple[str, ...], Found, str], ...] = (
    (
        ("Klear", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4",
         "glm4_moe", "granitemoehybrid", "helium", "lfm2", "lfm2_moe", "minimax", "minimax_m2",
         "mixtral", "phi", "qwen2_moe", "qwen3_moe", "solar_open", "stablelm", "starcoder2"),
        _scaled(), "rotates keys without that scaling",
    ),
    (("deepseek",), _scaled(but=("linear",)), "rotates keys without that scaling"),
    (("deepseek_v3",), _scaled("longrope", "su"), "rotates by other angles"),
    (("deepseek_v2",), _scaled(but=("yarn",)), "takes every scaling for YaRN"),
    (("deepseek_v3",), _set("rope_interleave", bad=lambda v: v is False),
     "rotates neighbours together"),
    (("glm",), _lacking("partial_rotary_factor", lambda kind: 0.5), "rotates all of a head"),
    (("glm",), _set("partial_rotary_factor", bad=lambda v: v != 1.0), "rotates all of a head"),
    (("phi",), _lacking("partial_rotary_factor", lambda kind: 0.5), "takes 0.4"),
    (tuple(BASES), _lacking("rope_theta", lambda kind: BASES[kind][1]), "takes another"),
    (("qwen2_moe",), _set("norm_topk_prob"), "leaves the experts' weights as they are"),
    (("qwen3_5_moe",), _set("norm_topk_prob", bad=lambda v: v is False),
     "leaves the experts' weights as they are"),
    (("gemma3_text",), _set("attn_logit_softcapping", "final_logit_softcapping"), "caps nothing"),
    (("gemma3_text",), _set("use_bidirectional_attention"),
     "lets tokens see those before them alone"),
    (("granitemoehybrid",), _set("mamba_n_groups", bad=lambda v: (v or 1) > 1),
     "norms the output of all groups at once"),
    (("nemotron_h",), _set("mlp_hidden_act", bad=lambda v: v not in (None, "relu2")),
     "computes another one"),
    (("nemotron_h",), _set("mamba_hidden_act", bad=lambda v: v not in (None, *SILU)),
     "computes another one"),
    (("*",), _activation, "computes another one"),
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
    for families, named, instead in TABLE:
        found = named(name, text) if name in families or families == ("*",) else None
        if found is not None:
            raise UnsupportedModelError(
                f"this {model_type} has {found} in its config.json, and mlx-lm {instead} in "
                "this family, so its answers would be wrong; use a checkpoint without that, or "
                "correct its config.json if it is mistaken"
            )


def _used(text: Text) -> bool:
    return bool(text.get("use_sliding_window"))


def _unlisted(text: Text) -> bool:
    return not text.get("layer_types")


def _last_layers(text: Text) -> bool:
    types = text.get("layer_types")
    first = text.get("max_window_layers", 28)
    return SLIDING in types if types else first < text["num_hidden_layers"]


def _first_layers(text: Text) -> bool:
    types = text.get("layer_types")
    return SLIDING in types if types else text.get("max_window_layers", 28) > 0


# By family: whether any layer has a window by the config, and the window if the config names none.
WINDOWS: dict[str, tuple[Callable[[Text], bool], int | None]] = {
    "dots1": (_last_layers, 4096),
    "gemma2": (lambda text: SLIDING in (text.get("layer_types") or [SLIDING]), 4096),
    "ministral3": (_unlisted, None),
    "mistral": (_unlisted, 4096),
    "mixtral": (lambda text: True, None),
    "phi3": (lambda text: True, None),
    "phimoe": (lambda text: True, None),
    "qwen2": (lambda text: _used(text) and _last_layers(text), 4096),
    "qwen2_moe": (lambda text: _used(text) and _first_layers(text), 4096),
    "qwen3": (lambda text: _used(text) and _last_layers(text), 4096),
    "qwen3_moe": (_used, 4096),
    "smollm3": (lambda text: _used(text) and _unlisted(text), None),
    "starcoder2": (lambda text: True, None),
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
