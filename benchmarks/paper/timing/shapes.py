"""The widths of models that are timed, for MLX and PyTorch: the paper's, and hybrids."""

from collections.abc import Mapping
from typing import Any

QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN35 = {
    "model_type": "qwen3_5", "head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "head_dim": 256, "vocab_size": 262208, "rms_norm_eps": 1e-6,
    "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip


def _dense(base: Mapping[str, Any], *numbers: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {**base, **dict(zip(names, numbers, strict=True)), **more}


# The numbers of the models' own config.json.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _dense(QWEN3, 1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _dense(QWEN3, 2048, 28, 16, 6144, tie_word_embeddings=True),
    "qwen3-4b": _dense(QWEN3, 2560, 36, 32, 9728, tie_word_embeddings=True),
    "qwen3-8b": _dense(QWEN3, 4096, 36, 32, 12288, tie_word_embeddings=False),
    "qwen3-30b-a3b": _dense(
        QWEN3, 2048, 48, 32, 6144, model_type="qwen3_moe", num_key_value_heads=4,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
    ),
    "qwen3.5-0.8b": _dense(
        QWEN35, 1024, 24, 8, 3584, num_key_value_heads=2, linear_num_value_heads=16
    ),
    "qwen3.5-4b": _dense(
        QWEN35, 2560, 32, 16, 9216, num_key_value_heads=4, linear_num_value_heads=32
    ),
    "gemma-3-4b": _dense(GEMMA3, 2560, 34, 8, 10240, num_key_value_heads=4),
    "gemma-3-12b": _dense(GEMMA3, 3840, 48, 16, 15360, num_key_value_heads=8),
    # No released model: the paper's tables app:tab:vllm and app:tab:budget.
    "gemma-3-12b-4kv": _dense(GEMMA3, 3840, 48, 16, 15360, num_key_value_heads=4),
}  # fmt: skip
