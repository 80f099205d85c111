"""The model families that can be captured and written, in one table.

A family differs from the default by its row's arguments, or by a class in its own file.
``refused.py`` says why other families are not supported. The tests run every row.
"""

from __future__ import annotations

import importlib

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family
from kvlingo_mlx.families.latent import AbsorbedFamily, ExpandedFamily
from kvlingo_mlx.families.plain import Plain
from kvlingo_mlx.families.refused import reason

# Names as in config.json. What may differ between these (norms of keys, biases, widths of values,
# windows, mixtures of experts, partial, traditional and scaled rotations) is read off the model.
PLAIN = """
    Klear apertus cohere deepseek dots1 ernie4_5 ernie4_5_moe gemma glm glm4 glm4_moe granite
    granitemoe helium internlm3 iquestcoder llama mimo minicpm minimax minimax_m2 mistral
    mixtral nemotron olmo2 olmoe phimoe pixtral qwen2 qwen2_moe seed_oss smollm3 solar_open
    starcoder2 telechat3 xverse
""".split()
# Families with a vision tower, which mlx-lm leaves out.
WITH_TOWERS = "qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe".split()
# Families whose attention has its own soft caps, casts or sinks.
OWN_ATTENTION = ("gemma2", "gpt_oss", "phi", "stablelm")
ROWS: dict[str, Family] = {
    **{name: Plain(name) for name in (*PLAIN, *WITH_TOWERS)},
    **{name: Plain(name, quantised_cache=False) for name in OWN_ATTENTION},
    "afmoe": Plain("afmoe", rotated_if="is_local_attention"),
    "exaone4": Plain("exaone4", rotated_if="use_rope"),
    "exaone_moe": Plain("exaone_moe", rotated_if="use_rope"),
    "qwen3": Family("qwen3"),
    # mlx-lm builds a plain RoPE here whatever ``rope_scaling`` says; the row describes what runs.
    "qwen3_moe": Family("qwen3_moe", scaled_rope=False),
    # mlx-lm rotates by YaRN here, whatever type the config names.
    "deepseek_v2": ExpandedFamily("deepseek_v2", rope_type="yarn"),
    **{
        name: AbsorbedFamily(name)
        for name in ("deepseek_v3", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2")
    },
}
# Families in files: a file has one ``FAMILY``, or several in ``FAMILIES`` by name.
FILES = {
    **{
        name: name
        for name in """
            cohere2 converted_mla gemma3_text gemma4_text hunyuan_v1_dense minicpm3 ministral3
            mistral3 olmo3 phi3
        """.split()
    },
    # The same families with vision towers or other encoders, which mlx-lm leaves out.
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "llava": "mistral3",
    # Hybrids, whose layers without attention keep a recurrent state.
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), "gated_delta"),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h"), "mamba2"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "short_conv"),
}


def known_families() -> list[str]:
    """The model types that are supported."""
    return sorted({*ROWS, *FILES}, key=str.lower)


def family_of(model_type: str) -> Family:
    """The ``Family`` of a model type.

    Raises:
        UnsupportedModelError: It is not supported; the message says why and lists those that are.
    """
    if model_type in ROWS:
        return ROWS[model_type]
    if model_type in FILES:
        module = importlib.import_module(f"{__name__}.{FILES[model_type]}")
        named = {model_type: getattr(module, "FAMILY", None), **getattr(module, "FAMILIES", {})}
        family: Family = named[model_type]
        return family
    why = reason(model_type)
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not supported{why and f': {why}'}; "
        f"supported families: {', '.join(known_families())}"
    )
