"""The model families that can be captured and written, in one table; those that cannot, and why.

A family differs from the default by its row's arguments, or by a class in a file. The tests run
every row.
"""

import importlib

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import Family

# Names as in config.json. What may differ between these (norms of keys, biases, widths of values,
# windows, mixtures of experts, partial, traditional and scaled rotations) is read off the model.
PLAIN = """
    Klear apertus cohere deepseek dots1 ernie4_5 ernie4_5_moe gemma glm glm4 glm4_moe granite
    granitemoe helium internlm3 iquestcoder llama mimo minicpm minimax minimax_m2 mistral
    mixtral nemotron olmo2 olmoe phimoe pixtral qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
    solar_open starcoder2 telechat3 xverse
""".split()
# Families with a vision tower, which mlx-lm leaves out.
WITH_TOWERS = "qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe".split()
# Families whose attention has its own soft caps, casts or sinks.
OWN_ATTENTION = ("gemma2", "gpt_oss", "phi", "stablelm")
ROWS: dict[str, Family] = {
    **{name: Family(name) for name in (*PLAIN, *WITH_TOWERS)},
    **{name: Family(name, quantised_cache=False) for name in OWN_ATTENTION},
    "afmoe": Family("afmoe", rotated_if="is_local_attention"),
    "cohere2": Family("cohere2", rotated_if="use_sliding_window", period="sliding_window_pattern"),
    "exaone4": Family("exaone4", rotated_if="use_rope"),
    "exaone_moe": Family("exaone_moe", rotated_if="use_rope"),
}
# Files with classes, each with its ``FAMILIES`` by name.
FILES: dict[str, str] = {
    name: file
    for file, names in {
        "attention": """
            gemma3 gemma3_text gemma4 gemma4_text gemma4_unified hunyuan_v1_dense llava ministral3
            mistral3 olmo3 phi3
        """,
        "latent": """
            deepseek_v2 deepseek_v3 glm4_moe_lite joyai_llm_flash kimi_k2 minicpm3
        """,
        "recurrent": """
            granitemoehybrid lfm2 lfm2_moe nemotron_h qwen3_5 qwen3_5_moe qwen3_next
        """,
    }.items()
    for name in names.split()
}
# What mlx-lm runs and this package does not support.
REASONS = {
    "it keeps a recurrent state by a rule for which there is no adapter yet": """
        baichuan_m1 bailing_hybrid bailing_moe_linear bailing_moe_v3 gear jamba kimi_k3
        kimi_linear lfm2-vl olmo_hybrid plamo2 prism_hadamard_qwen35 recurrent_gemma
    """,
    "each of its layers keeps both a recurrent state and keys and values": "falcon_h1",
    "it has no layer of attention, so nothing of a text can be looked up in its cache": """
        falcon_mamba mamba mamba2 rwkv7
    """,
    "its queries, keys and values come from one projection, laid out in a way of its own": """
        bailing_moe dbrx gpt2 gpt_bigcode gpt_neox internlm2 lille-130m muse_spark olmo
        openelm phi-msft phi3small phixtral plamo3 qwen spark2_5
    """,
    "its layers or its passes share keys and values": """
        afm7 gemma3n hunyuan iquestloopcoder nanbeige
    """,
    "it caches keys of an index beside its keys, by which it chooses what to attend to": """
        deepseek_v32 deepseek_v41 deepseek_v41_text glm_moe_dsa minimax_m3_vl
    """,
    "it caches latents, as deepseek_v3 does, and no adapter for its own modules is tested yet": """
        kimi_k25 kimi_vl longcat_flash longcat_flash_ngram mistral4 youtu_llm
    """,
    "its layers forget by chunks of the text, which a translated cache cannot follow": """
        llama4 llama4_text
    """,
    "it changes keys or values between projection and cache in a way of its own": """
        mimo_v2_flash muse_glimmer nanochat step3p5 talkie
    """,
    "it rotates each kind of layer by parameters of its own": "laguna mellum",
    "its modules have names that none of mlx-lm's other families have": "exaone gptj plamo",
    "some of its layers have no attention": "nemotron-nas",
    "its ternary layers run on Metal alone, where it could not be tested": "bitnet",
    "its modules are the laboratory's, not mlx-lm's: import benchmarks.paper.converted_mla.on_mlx "
    "first, or run `python -m benchmarks.paper.converted_mla VERB ...`": "converted_mla",
}
# Families of models that mlx-lm was told of elsewhere.
REGISTERED: dict[str, Family] = {}


def register(family: Family) -> None:
    """Support a family of models that are not mlx-lm's own, by its ``model_type``.

    Raises:
        ValueError: The package has a family of this type.
    """
    if family.model_type in known_families():
        raise ValueError(f"model_type {family.model_type!r} is supported already")
    REGISTERED[family.model_type] = family


def known_families() -> list[str]:
    """The model types that are supported, without those that were registered."""
    return sorted({*ROWS, *FILES}, key=str.lower)


def family_of(model_type: str) -> Family:
    """The ``Family`` of a model type.

    Raises:
        UnsupportedModelError: It is not supported; the message says why and lists those that are.
    """
    rows = ROWS | REGISTERED
    if model_type in rows:
        return rows[model_type]
    if model_type in FILES:
        module = importlib.import_module(f"{__name__}.{FILES[model_type]}")
        families: dict[str, Family] = module.FAMILIES
        return families[model_type]
    why = next((f": {why}" for why, names in REASONS.items() if model_type in names.split()), "")
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not supported{why}; "
        f"supported families: {', '.join(known_families())}"
    )
