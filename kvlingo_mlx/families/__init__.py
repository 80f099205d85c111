"""The model families that can be tapped and written, and the one table that names them.

What sets a family apart is a row's arguments, or a class in a file of its own; ``refused.py`` knows
why others are none. ``tests`` run every row.
"""

from __future__ import annotations

import importlib

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family
from kvlingo_mlx.families.latent import AbsorbedFamily, ExpandedFamily
from kvlingo_mlx.families.plain import Plain
from kvlingo_mlx.families.refused import reason

# What each is called in config.json. Norms of keys, biases, widths of values, partial and
# traditional rotations, scaled ones, windows and mixtures of experts are all read off the model.
PLAIN = (
    "Klear", "apertus", "cohere", "deepseek", "dots1", "ernie4_5", "ernie4_5_moe",
    "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "helium",
    "internlm3", "iquestcoder", "llama", "mimo", "minicpm", "minimax", "minimax_m2", "mistral",
    "mixtral", "nemotron", "olmo2", "olmoe", "phimoe", "pixtral", "qwen2", "qwen2_moe",
    # Beside a vision tower, which mlx-lm leaves out.
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
    "seed_oss", "smollm3", "solar_open", "starcoder2", "telechat3", "xverse",
)  # fmt: skip
# Soft caps, casts or sinks of their own.
OWN_ATTENTION = ("gemma2", "gpt_oss", "phi", "stablelm")
ROWS: dict[str, Family] = {
    **{name: Plain(name) for name in PLAIN},
    **{name: Plain(name, quantised_cache=False) for name in OWN_ATTENTION},
    "afmoe": Plain("afmoe", rotated_if="is_local_attention"),
    "exaone4": Plain("exaone4", rotated_if="use_rope"),
    "exaone_moe": Plain("exaone_moe", rotated_if="use_rope"),
    "qwen3": Family("qwen3"),
    # mlx-lm builds a plain RoPE here whatever ``rope_scaling`` says: described as what it runs as.
    "qwen3_moe": Family("qwen3_moe", scaled_rope=False),
    # mlx-lm rotates this one by YaRN whatever type is named.
    "deepseek_v2": ExpandedFamily("deepseek_v2", rope_type="yarn"),
    **{
        name: AbsorbedFamily(name)
        for name in ("deepseek_v3", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2")
    },
}
# Those with a file of their own: its ``FAMILY``, or the one there by that name.
FILES = {
    "cohere2": "cohere2", "gemma3_text": "gemma3_text", "gemma4_text": "gemma4_text",
    "hunyuan_v1_dense": "hunyuan_v1_dense", "minicpm3": "minicpm3", "ministral3": "ministral3",
    "mistral3": "mistral3", "olmo3": "olmo3", "phi3": "phi3",
    # The same with towers or other encoders, which mlx-lm leaves out.
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_text",
    "llava": "mistral3",
}  # fmt: skip


def known_families() -> list[str]:
    """The model types that have an adapter."""
    return sorted({*ROWS, *FILES}, key=str.lower)


def family_of(model_type: str) -> Family:
    """The adapter of a model type.

    Raises:
        UnsupportedModelError: There is none; the message says why, or lists those there are.
    """
    if model_type in ROWS:
        return ROWS[model_type]
    if model_type in FILES:
        module = importlib.import_module(f"{__name__}.{FILES[model_type]}")
        return getattr(module, "FAMILIES", {}).get(model_type, module.FAMILY)
    why = reason(model_type)
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not supported{why and f': {why}'}; "
        f"supported families: {', '.join(known_families())}"
    )
