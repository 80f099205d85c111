"""The families that mlx-lm runs but this package does not support, by reason."""

from __future__ import annotations

REASONS: dict[str, list[str]] = {
    "it keeps a recurrent state by a rule for which there is no adapter yet": """
        baichuan_m1 bailing_hybrid bailing_moe_linear bailing_moe_v3 gear jamba kimi_k3
        kimi_linear lfm2-vl olmo_hybrid plamo2 prism_hadamard_qwen35 recurrent_gemma
    """.split(),
    "each of its layers keeps both a recurrent state and keys and values": """
        falcon_h1
    """.split(),
    "it has no layer of attention, so nothing of a text can be looked up in its cache": """
        falcon_mamba mamba mamba2 rwkv7
    """.split(),
    "its queries, keys and values come from one projection, laid out in a way of its own": """
        bailing_moe dbrx gpt2 gpt_bigcode gpt_neox internlm2 lille-130m muse_spark olmo
        openelm phi-msft phi3small phixtral plamo3 qwen spark2_5
    """.split(),
    "its layers or its passes share keys and values": """
        afm7 gemma3n hunyuan iquestloopcoder nanbeige
    """.split(),
    "it caches keys of an index beside its keys, by which it chooses what to attend to": """
        deepseek_v32 deepseek_v41 deepseek_v41_text glm_moe_dsa minimax_m3_vl
    """.split(),
    "it caches latents, as deepseek_v3 does, and no adapter for its own modules is tested yet": """
        kimi_k25 kimi_vl longcat_flash longcat_flash_ngram mistral4 youtu_llm
    """.split(),
    "its layers forget by chunks of the text, which a translated cache cannot follow": """
        llama4 llama4_text
    """.split(),
    "it changes keys or values between projection and cache in a way of its own": """
        mimo_v2_flash muse_glimmer nanochat step3p5 talkie
    """.split(),
    "it rotates each kind of layer by parameters of its own": """
        laguna mellum
    """.split(),
    "its modules have names that none of mlx-lm's other families have": """
        exaone gptj plamo
    """.split(),
    "some of its layers have no attention": """
        nemotron-nas
    """.split(),
    "its ternary layers run on Metal alone, where it could not be tested": """
        bitnet
    """.split(),
}


def reason(model_type: str) -> str:
    """Why a model type is not supported; empty if the type is unknown."""
    return next((why for why, names in REASONS.items() if model_type in names), "")
