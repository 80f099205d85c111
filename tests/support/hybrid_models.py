"""Tiny random hybrids: models some of whose layers keep a recurrent state.

No two widths are alike where the family allows it, and no head counts.
"""

from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.format.assignment import by_depth
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import Receipt
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator
from tests.support import plain_models, random_samples, tiny

EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": tiny.VOCAB, "max_position_embeddings": tiny.CONTEXT,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
DELTA: dict[str, Any] = {
    "num_hidden_layers": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "head_dim": 32, "rms_norm_eps": 1e-6, "full_attention_interval": 4, "attention_bias": False,
}  # fmt: skip
ROTATION = {
    "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip
MIXER: dict[str, Any] = {"attention_bias": False, "mamba_proj_bias": False, "num_hidden_layers": 4}
SHORT: dict[str, Any] = {
    "num_hidden_layers": 5, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
    "rope_theta": 5000.0,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
}  # fmt: skip


def _wrapped(model_type: str, **more: Any) -> dict[str, Any]:
    text = {**COMMON, **DELTA, "rope_parameters": ROTATION, "model_type": f"{model_type}_text"}
    return {"model_type": model_type, "text_config": text | more}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **COMMON, **DELTA, **EXPERTS, "model_type": "qwen3_next", "mlp_only_layers": [1],
        "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
    },
    "qwen3_5": _wrapped("qwen3_5"),
    "qwen3_5_moe": _wrapped("qwen3_5_moe", **EXPERTS),
    "granitemoehybrid": {
        **COMMON, **MIXER, "model_type": "granitemoehybrid", "rms_norm_eps": 1e-5,
        "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
        "mamba_d_state": 24, "mamba_d_conv": 4,
        "mamba_n_groups": 1, "mamba_conv_bias": True, "position_embedding_type": "rope",
        "rope_theta": 5000.0,
    },
    "nemotron_h": {
        **COMMON, **MIXER, "model_type": "nemotron_h", "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "conv_kernel": 4,
        "n_groups": 2, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "M", "*", "-", "M", "*"], "head_dim": 16,
        "num_hidden_layers": 7,
    },
    "lfm2": {
        **COMMON, **SHORT, "model_type": "lfm2", "block_dim": 64, "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
        "tie_word_embeddings": True,
    },
    "lfm2_moe": {
        **COMMON, **SHORT, **EXPERTS, "model_type": "lfm2_moe", "num_dense_layers": 1,
        "use_expert_bias": True, "tie_word_embeddings": True,
    },
}  # fmt: skip


def write_hybrid_model(folder: Path, model_type: str, *, seed: int = 1, **more: Any) -> Path:
    """Write a random hybrid with its tokenizer; ``more`` goes into its text model's config."""
    config = dict(CONFIGS[model_type])
    if "text_config" in config:
        config["text_config"] = config["text_config"] | more
    else:
        config |= more
    return plain_models.write_model(folder, config, seed)


def forget_tails(model: LanguageModel) -> None:
    """Let a model's convolutions read the present token alone, so that its tails do not matter."""
    for module in model.attentions:
        if "conv1d" in module:
            weight = module.conv1d.weight
            zeros = mx.zeros_like(weight[:, :-1])
            module.conv1d.weight = mx.concatenate([zeros, weight[:, -1:]], axis=1)


def random_translator(
    source: LanguageModel,
    target: LanguageModel,
    seed: int = 3,
    nu: int = 2,
    *,
    state_maps: bool = False,
) -> Translator:
    """Random linear maps, of up to ``nu`` source layers; its receipt says that it is exact."""
    assignment = by_depth(source.geometry.layers, target.geometry.layers, nu)
    exact = {"receipt": Receipt(0.0, 1.0, 0, 1.0).to_json()}
    ends = source.spec(), target.spec()
    config = TranslatorConfig(*ends, assignment, state_maps=state_maps, provenance=exact)
    return random_samples.random_translator(config, seed)
