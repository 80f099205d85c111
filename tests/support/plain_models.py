"""Tiny random models of mlx-lm's plain families, under the names that converted releases have.

Shapes and names are taken from mlx-lm's own modules, which load nothing else; the values are
drawn as ``tiny.py`` draws them.
"""

import inspect
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx, always)

import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from tests.support import tiny

WINDOW = 16
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 16, 64, 3
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 128,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": tiny.VOCAB, "max_position_embeddings": tiny.CONTEXT, "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5,
    "attention_bias": True, "mlp_bias": False, "use_bias": True, "tie_word_embeddings": False,
    "rope_scaling": None, "hidden_act": "silu",
}  # fmt: skip
GRANITE = {
    "logits_scaling": 2.0, "attention_multiplier": 0.2, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}  # fmt: skip
# What each adds to or changes in COMMON.
CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": EXPERTS | {"mlp_only_layers": [0], "decoder_sparse_step": 1},
    "afmoe": EXPERTS | {"layer_types": MIXED, "sliding_window": WINDOW, "num_dense_layers": 1},
    "apertus": {"hidden_act": "xielu", "post_norm": False, "qk_norm": True, "rope_scaling": LLAMA3},
    # Its own 0.0625 makes all next tokens of a tiny model alike, and a KL of two such
    # distributions is less than what float32 can tell.
    "cohere": {"logit_scale": 0.75},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 0.75},
    "deepseek": EXPERTS | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dots1": EXPERTS | {"scoring_func": "noaux_tc"},
    "ernie4_5": {},
    "ernie4_5_moe": EXPERTS | {"moe_layer_start_index": 1},
    "exaone4": {
        "sliding_window": WINDOW, "sliding_window_pattern": "LGL", "layer_types": MIXED,
        "rope_scaling": LLAMA3, "attention_bias": False,
    },
    "exaone_moe": EXPERTS | {
        "sliding_window": WINDOW, "layer_types": MIXED, "is_moe_layer": [False, True, True]
    },
    "gemma": {"head_dim": 32, "hidden_act": "gelu"},
    "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
               "hidden_act": "gelu_pytorch_tanh"},
    "glm": {"partial_rotary_factor": 1.0},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": EXPERTS | {"partial_rotary_factor": 0.5, "use_qk_norm": True},
    "gpt_oss": EXPERTS | {"layer_types": MIXED, "sliding_window": WINDOW, "rope_scaling": YARN},
    "granite": GRANITE,
    "granitemoe": GRANITE | EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "internlm3": {"qkv_bias": True, "bias": True,
                  "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "iquestcoder": {},
    "llama": {"head_dim": 32, "rope_scaling": LLAMA3, "layer_types": MIXED,
              "sliding_window": WINDOW},
    "mimo": {"num_nextn_predict_layers": 0},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minimax": EXPERTS | {"rotary_dim": 8},
    "minimax_m2": EXPERTS | {"rotary_dim": 8},
    "ministral3": {
        "layer_types": MIXED, "sliding_window": WINDOW,
        "rope_parameters": YARN | {"rope_theta": 5000.0, "mscale": 1.0, "mscale_all_dim": 0.5,
                                   "llama_4_scaling_beta": 0.5},
    },
    "mistral": {"rope_traditional": True, "sliding_window": None},
    "mixtral": EXPERTS,
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "olmo2": {},
    "olmo3": {"rope_theta": 5e5, "rope_scaling": YARN, "layer_types": MIXED,
              "sliding_window": WINDOW},
    "olmoe": EXPERTS,
    "phi": {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    "phi3": {"rope_scaling": LONG, "partial_rotary_factor": 0.5,
             "original_max_position_embeddings": 32},
    "phimoe": EXPERTS | {"original_max_position_embeddings": 32, "rope_scaling": LONG | {
        "short_factor": [1.0] * 8, "long_factor": [1.5] * 8, "short_mscale": 1.1,
        "long_mscale": 1.2}},
    "qwen2": {"rope_scaling": YARN},
    "qwen2_moe": EXPERTS | {"norm_topk_prob": False},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": EXPERTS | {"partial_rotary_factor": 1.0, "use_qk_norm": False},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh"},
    "telechat3": {},
    "xverse": {},
}  # fmt: skip
INNER = {"model_type": "ministral3", **COMMON, **CONFIGS["ministral3"]}
CONFIGS["mistral3"] = {"text_config": INNER}
# As Qwen2-VL and Qwen3-VL rotate: alike in all three directions, where there is text alone.
MROPE: dict[str, Any] = {"type": "mrope", "mrope_section": [2, 3, 3]}
for _name, _inner, _more in (
    ("pixtral", "mistral", {}),
    ("llava", "llama", CONFIGS["llama"]),
    ("qwen2_5_vl", "qwen2", {"rope_scaling": MROPE}),
    ("qwen2_vl", "qwen2", {"rope_scaling": MROPE}),
    ("qwen3_vl", "qwen3", {"rope_scaling": MROPE | {"type": "default"}}),
    ("qwen3_vl_moe", "qwen3_moe", EXPERTS | {"mlp_only_layers": [0], "decoder_sparse_step": 1}),
):
    CONFIGS[_name] = {"text_config": {"model_type": _inner, **COMMON, **_more}}


def without_undeclared(config: dict[str, Any], kept: Collection[str] = ()) -> dict[str, Any]:
    """A config without what ``COMMON`` gives it and mlx-lm's ``ModelArgs`` does not declare.

    A released config has other names for these. Only the context's length all of them have.
    """
    declared = inspect.signature(_get_classes(config)[1]).parameters
    known = {*declared, *kept, "max_position_embeddings"}
    found = {k: v for k, v in config.items() if k in known or k not in COMMON}
    if "text_config" in found:
        found["text_config"] = without_undeclared(found["text_config"])
    return found


def write_plain_model(folder: Path, model_type: str, *, seed: int = 1, **more: Any) -> Path:
    """Write a random model with its tokenizer; ``more`` goes into its config."""
    config = {"model_type": model_type, **COMMON, **CONFIGS[model_type], **more}
    return write_model(folder, without_undeclared(config, {*CONFIGS[model_type], *more}), seed)


def write_model(folder: Path, config: dict[str, Any], seed: int = 1) -> Path:
    """Write a random model of a config with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model_type = config["model_type"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model_class, args_class = _get_classes(config)
    shapes = tree_flatten(model_class(args_class.from_dict(config)).parameters())
    rng, bound = np.random.RandomState(seed), tiny.WEIGHT_STD * np.sqrt(3)
    offset = 1.0 if model_type in ("gemma", "gemma2") else 0.0  # norms by (1 + weight)
    tensors = {}
    for name, array in sorted(shapes):
        norm = "norm" in name and name.endswith("weight")
        low, high = (0.7 - offset, 1.3 - offset) if norm else (-bound, bound)
        tensors[name] = rng.uniform(low, high, array.shape).astype(np.float32)
    tiny.write_tensors(folder / "model.safetensors", tensors)
    tiny._write_tokenizer(folder, tiny.byte_tokenizer())
    return folder
