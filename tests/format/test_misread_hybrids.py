"""Hybrids' configs: mlx-lm, as this package opens it, against transformers, setting by setting."""

import json
import warnings
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.errors import MissingModelError, UnsupportedModelError
from kvlingo_mlx.format import misread
from tests.support import hybrid_models, tiny

DROP = object()  # a setting that is left out
Settings = dict[str, Any]
Model = Any  # a transformers model
# Of a family's tiny config, what transformers and mlx-lm take alike. transformers clips the time
# steps of nemotron_h by time_step_min and passes over time_step_limit, which mlx-lm goes by, as the
# model's own code does.
OWN: dict[str, Settings] = {
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 96},
    "nemotron_h": {"mlp_hidden_act": "relu2", "hidden_act": DROP, "time_step_min": 1e-12},
}
TOKENS = [5 + (i * i * 7 + 3 * i) % 240 for i in range(48)]
ALIKE, OTHER = 1e-4, 1e-2  # relative errors of logits; nothing may lie between
LINEAR: Settings = {"rope_type": "linear", "type": "linear", "factor": 4.0}
YARN: Settings = {
    "rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
MODERN: Settings = {
    "rope_theta": DROP,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
}
EXPERTS: Settings = {
    "hybrid_override_pattern": list("ME*EM-*"), "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.0,
    "moe_shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1,
}  # fmt: skip
NEW = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
KINDS = [NEW[char] for char in hybrid_models.CONFIGS["nemotron_h"]["hybrid_override_pattern"]]


def without(name: str, *keys: str, **more: Any) -> Settings:
    """``rope_parameters`` of a family's tiny config, changed."""
    given = hybrid_models.CONFIGS[name]["text_config"]["rope_parameters"] | more
    return {"rope_parameters": {k: v for k, v in given.items() if k not in keys}}


# What both run alike, by family.
QWEN: dict[str, Settings] = {
    "as it is": {},
    "biases": {"attention_bias": True},
    "another period": {"full_attention_interval": 2},
    "listed kinds": {
        "full_attention_interval": DROP,
        "layer_types": ["linear_attention", "full_attention"] * 4,
    },
}
WRAPPED: dict[str, Settings] = {
    **QWEN,
    "yarn": without("qwen3_5", **YARN),
    "no base": without("qwen3_5", "rope_theta"),
    "no share": without("qwen3_5", "partial_rotary_factor"),
    "half rotated": without("qwen3_5", partial_rotary_factor=0.5),
    "no sections": without("qwen3_5", "mrope_section", "mrope_interleaved"),
    "older names": {
        "rope_parameters": DROP,
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": YARN,
    },
    "no rotation": {"rope_parameters": DROP},
}
LFM: dict[str, Settings] = {
    "as it is": {},
    "newer names": MODERN,
    "no base": {"rope_theta": DROP},
    "biases": {"conv_bias": True},
    "another kernel": {"conv_L_cache": 4},
    "an activation that neither reads": {"hidden_act": "relu"},
}
SAME: dict[str, dict[str, Settings]] = {
    "qwen3_next": {
        **QWEN,
        "newer names": {**MODERN, "partial_rotary_factor": DROP},
        "linear": {"rope_scaling": LINEAR},
        "unset": dict.fromkeys(("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"), DROP),
        "raw experts": {"norm_topk_prob": False},
        "experts in every other layer": {"decoder_sparse_step": 2},
    },
    "qwen3_5": {**WRAPPED, "tied": {"tie_word_embeddings": True}},
    "qwen3_5_moe": {**WRAPPED, "unset": {"norm_topk_prob": DROP}},
    "granitemoehybrid": {
        "as it is": {},
        "newer names": MODERN,
        "no rotation": {"position_embedding_type": "nope"},
        "no rotation, unset": {"position_embedding_type": DROP},
        "no rotation, null": {"position_embedding_type": None},
        "clipped steps": {"time_step_limit": [0.01, 0.1]},
        "biases": {"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
        "newer kinds": {"layer_types": ["linear_attention"] * 2 + ["full_attention"]},
        "experts": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
        "tied": {"tie_word_embeddings": True},
        "untied, unset": {"tie_word_embeddings": DROP},
    },
    "nemotron_h": {
        "as it is": {},
        "listed kinds": {"hybrid_override_pattern": DROP, "layers_block_type": KINDS},
        "listed kinds, another name": {"hybrid_override_pattern": DROP, "layer_types": KINDS},
        "biases": {"use_bias": True, "mamba_proj_bias": True, "mlp_bias": True},
        "no bias": {"use_conv_bias": False},
        "one group": {"n_groups": 1},
        "experts": EXPERTS,
        "raw experts": {**EXPERTS, "norm_topk_prob": False},
        "narrow experts": {**EXPERTS, "moe_latent_size": 24},
        "an activation that neither reads": {"hidden_act": "relu"},
    },
    "lfm2": {
        **LFM,
        "indices": {"layer_types": DROP, "full_attn_idxs": [2, 4]},
        "as given": {"block_ff_dim": 128, "block_auto_adjust_ff_dim": False},
        "wider": {"block_ffn_dim_multiplier": 1.5},
    },
    "lfm2_moe": {
        **LFM,
        "raw experts": {"norm_topk_prob": False},
        "no bias of experts": {"use_expert_bias": False},
        "scaled experts": {"routed_scaling_factor": 2.0},
    },
}
ACTIVATION = ("ReLU", {"hidden_act": "relu"}, "the activation 'relu'")
SCALED = ("linear", {"rope_scaling": LINEAR}, "rope_scaling of type 'linear'")
NEWER = (
    "linear, newer names",
    {"rope_theta": DROP, "rope_parameters": {**LINEAR, "rope_theta": 700.0}},
    "rope_scaling of type 'linear'",
)
# What they run otherwise, by family: the variant and what the table names.
MISREAD: dict[str, list[tuple[str, Settings, str]]] = {
    "qwen3_next": [ACTIVATION],
    "qwen3_5": [ACTIVATION],
    "qwen3_5_moe": [ACTIVATION, ("raw", {"norm_topk_prob": False}, "norm_topk_prob false")],
    "granitemoehybrid": [
        ACTIVATION, SCALED, NEWER, ("two groups", {"mamba_n_groups": 2}, "mamba_n_groups 2"),
    ],
    "nemotron_h": [
        ("SiLU", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ("GELU", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
    ],
    "lfm2": [SCALED, NEWER],
    "lfm2_moe": [SCALED],
}  # fmt: skip


def write_theirs(folder: Path, name: str, more: Settings, seed: int = 1) -> Model:
    """Write a random model of a family with its tokenizer; return it, in float32.

    ``more`` changes the family's text config in ``hybrid_models.CONFIGS``.
    """
    import torch
    import transformers
    from safetensors.torch import save_model

    text = varied(name, more)
    given = dict(text)
    if "hybrid_override_pattern" in text:  # a string to transformers, a list to mlx-lm
        given["hybrid_override_pattern"] = "".join(text["hybrid_override_pattern"])
    (folder / "config.json").write_text(json.dumps(given))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    seeded = torch.Generator().manual_seed(seed)
    for parameter, values in [*model.named_parameters(), *model.named_buffers()]:
        if not parameter.endswith("inv_freq"):
            values.data.uniform_(*_range(name, parameter), generator=seeded)
    if name == "qwen3_5_moe":  # released ones have all experts of a layer in one tensor
        save_model(model, str(folder / "model.safetensors"))
    else:
        model.save_pretrained(folder)
    tiny._write_tokenizer(folder, tiny.byte_tokenizer())
    wrapped = "text_config" in hybrid_models.CONFIGS[name]
    config = {"model_type": name, "text_config": text} if wrapped else text
    (folder / "config.json").write_text(json.dumps(config))
    return model.eval()


def varied(name: str, more: Settings) -> Settings:
    """A variant of a family's text config."""
    config = hybrid_models.CONFIGS[name]
    text = {**config.get("text_config", config), **OWN.get(name, {}), **more}
    if "layer_types" in more and name == "granitemoehybrid":
        text["num_hidden_layers"] = len(more["layer_types"])
    return {key: value for key, value in text.items() if value is not DROP}


def _range(name: str, parameter: str) -> tuple[float, float]:
    """Between which numbers a parameter is random; time steps reach below mlx-lm's own limits."""
    if parameter.endswith("dt_bias"):
        return -8.0, 1.0
    if parameter.endswith("A_log"):
        return 0.0, 1.2
    if "norm" in parameter and parameter.endswith("weight"):
        stored_from_1 = name.startswith("qwen3") and "linear_attn.norm" not in parameter
        return (-0.3, 0.3) if stored_from_1 else (0.7, 1.3)
    return -0.26, 0.26


def error(folder: Path, name: str, more: Settings) -> float:
    """The relative error of the logits of a variant, as this package opens it."""
    torch = pytest.importorskip("torch")
    theirs = write_theirs(folder, name, more)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].double().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kv.load(folder)
    found = np.array(model.model(mx.array([TOKENS]))[0].astype(mx.float32)).astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_every_hybrid_is_compared() -> None:
    assert set(SAME) == set(MISREAD) == set(hybrid_models.CONFIGS)


@pytest.mark.parametrize(("name", "variant"), [(n, v) for n, row in SAME.items() for v in row])
def test_what_both_run_alike(name: str, variant: str, tmp_path: Path) -> None:
    assert error(tmp_path, name, SAME[name][variant]) < ALIKE


@pytest.mark.parametrize(
    ("name", "index"), [(n, i) for n, row in MISREAD.items() for i in range(len(row))]
)
def test_what_mlx_lm_misreads_is_refused(
    name: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, more, told = MISREAD[name][index]
    with pytest.raises(UnsupportedModelError, match=told) as refused:
        error(tmp_path, name, more)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(misread, "check", lambda model_type, text: None)
    assert error(tmp_path, name, more) > OTHER  # it is not refused for nothing


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        (
            "qwen3_5",
            {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2},
            "kinds of layers of this qwen3_5_text do not alternate regularly",
        ),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "full_attention"] * 4},
            "every 2, and full_attention_interval 4, and mlx-lm uses the latter",
        ),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "has no layer of attention"),
        ("nemotron_h", {"hybrid_override_pattern": list("*-*-*-*")}, "layers of attention alone"),
        ("lfm2", {"layer_types": ["full_attention"] * 5}, "layers of attention alone"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "convolutions with a kernel of 1, and mlx-lm"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_run(name: str, more: Settings, told: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        _ = kv.load(hybrid_models.write_hybrid_model(tmp_path, name, **more)).geometry


@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen3_5", {"full_attention_interval": 0}), ("lfm2", {"layer_types": ["conv"]})],
)
def test_layers_that_do_not_add_up_are_one_line(name: str, more: Settings, tmp_path: Path) -> None:
    folder = hybrid_models.write_hybrid_model(tmp_path, name)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(more)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingModelError, match="mlx-lm refuses its config.json") as refused:
        _ = kv.load(folder).geometry
    assert "\n" not in str(refused.value)
