"""Tiny random models and translators on disk, made without network and without PyTorch.

Files are written from their formats' own descriptions and not by the package's writers,
so that reading them is tested too.
"""

import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import safetensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvlingo_mlx import embedded
from tests.support import TESTS
from tests.support.translator_folders import layer_json, page_shapes, probe_input

Shape = tuple[int, ...]

SIDES = ("keys", "values")
EXPERTS, ACTIVE_EXPERTS = 8, 2
CONTEXT = 512
# Large enough that attention and routing shape the logits, small enough that nothing saturates.
WEIGHT_STD = 0.15
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# A few merges, so that text and tokens do not run in step.
MERGES = (
    ("h", "e"), ("i", "n"), ("r", "e"), ("o", "n"), ("Ġ", "t"), ("Ġt", "he"), ("Ġ", "a"),
    ("Ġa", "n"), ("Ġan", "d"), ("o", "u"), ("y", "ou"), ("s", "e"), ("u", "se"), ("use", "r"),
    ("Ġ", "i"), ("Ġi", "s"), ("e", "r"), ("a", "t"), ("i", "t"), ("Ġ", "o"), ("Ġo", "f"),
)  # fmt: skip
VOCAB = 320  # more rows than the tokenizer has ids, as in released models
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- endif -%}{%- endif -%}"
)


def write_tiny_model(
    folder: Path,
    model_type: str,
    *,
    seed: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = VOCAB,
    rope_theta: float = 10000.0,
    dtype: str = "float32",
    **more: Any,
) -> Path:
    """Write a random model with its tokenizer, as Qwen releases its own; returns the folder.

    ``model_type`` is one of ``COMMON``; ``more`` goes into its config. The same arguments give
    the same weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "rope_theta": rope_theta,
        "torch_dtype": dtype,
        **COMMON[model_type](hidden),
        **more,
    }
    if model_type == "converted_mla":
        config = _listed(config) | config
        importlib.import_module("benchmarks.paper.converted_mla.on_mlx")  # registers the family
    tokenizer = byte_tokenizer()
    config["eos_token_id"] = tokenizer.token_to_id("<|im_end|>")
    config["pad_token_id"] = tokenizer.token_to_id("<|endoftext|>")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(folder / "model.safetensors", random_weights(config, seed), dtype)
    _write_tokenizer(folder, tokenizer)
    return folder


def _common(architecture: str, hidden: int, *, tied: bool = True, **more: Any) -> dict[str, Any]:
    """A config; an entry of ... is left out of it."""
    config = {
        "architectures": [f"{architecture}ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "intermediate_size": 2 * hidden,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "use_cache": True, "bos_token_id": None,
        "tie_word_embeddings": tied,  # as the small released models, and not the large ones
        **more,
    }  # fmt: skip
    return {name: value for name, value in config.items() if value is not ...}


UNWINDOWED = {"sliding_window": None, "use_sliding_window": False}
# Multi-head latent attention; all widths differ, and are fit for 4 bits where they must.
LATENTS = {
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
# A dense layer, then experts.
DEEPSEEK = {
    **LATENTS, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE_EXPERTS, "routed_scaling_factor": 1.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 2, "topk_group": 1,
    "moe_layer_freq": 1, "first_k_dense_replace": 1,
}  # fmt: skip
GELU = "gelu_pytorch_tanh"
FACTORS = [1.0 + 0.25 * i for i in range(8)]
# By model_type, of a hidden width.
COMMON: dict[str, Callable[[int], dict[str, Any]]] = {
    # Latents of grouped queries; other pairs of the original's in every layer's rotary key.
    "converted_mla": lambda h: _common(
        "ConvertedMLA", h, **UNWINDOWED, qk_rope_head_dim=16, qk_norm=True
    ),
    "deepseek_v3": lambda h: _common("DeepseekV3", h, tied=False, **DEEPSEEK),
    "glm4_moe_lite": lambda h: _common(
        "Glm4MoeLite", h, tied=False, **DEEPSEEK | {"q_lora_rank": None, "n_group": 1},
        num_nextn_predict_layers=0,
    ),
    "deepseek_v2": lambda h: _common("DeepseekV2", h, tied=False, **DEEPSEEK | {
        "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                         "mscale": 1.2, "mscale_all_dim": 0.7},
    }),
    "minicpm3": lambda h: _common("MiniCPM3", h, tied=False, **LATENTS | {
        "v_head_dim": h // 4,  # mlx-lm has no other
        "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0,
        "rope_scaling": {"type": "longrope", "long_factor": FACTORS, "short_factor": FACTORS,
                         "original_max_position_embeddings": 64},
    }),
    "qwen3": lambda h: _common("Qwen3", h, **UNWINDOWED),
    "qwen3_moe": lambda h: _common(
        "Qwen3Moe", h, tied=False, **UNWINDOWED, num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE_EXPERTS, norm_topk_prob=True, moe_intermediate_size=h // 2,
        decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False,
        router_aux_loss_coef=0.001,
    ),
    # Two local layers of 16 tokens before each global one; scales of its own everywhere.
    "gemma3_text": lambda h: _common(
        "Gemma3", h, hidden_activation=GELU, query_pre_attn_scalar=24, rope_theta=1e6,
        rope_local_base_freq=5000.0, rope_scaling={"rope_type": "linear", "factor": 4.0},
        sliding_window=16, sliding_window_pattern=3,
    ),
    # Local layers before each global one, which is wider and rotates half of its width. As
    # released without rope_scaling, which transformers would take for rope_parameters.
    "gemma4_text": lambda h: _common(
        "Gemma4", h, rope_scaling=..., hidden_activation=GELU, global_head_dim=64,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                               "partial_rotary_factor": 0.5},
        },
        sliding_window=16, num_kv_shared_layers=0, use_double_wide_mlp=True,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=30.0,
    ),
    "llama": lambda h: _common("Llama", h, tied=False),
    "mistral": lambda h: _common("Mistral", h, tied=False, sliding_window=None),
    # YaRN, and queries that grow with their position, in steps of 16 tokens.
    "ministral3": lambda h: _common(
        "Ministral3", h, tied=False, rope_scaling=..., sliding_window=None, rope_parameters={
            "rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    ),
}  # fmt: skip


def _listed(config: dict[str, Any]) -> dict[str, Any]:
    """A converted model's entries for each layer and pair."""
    layers, half = range(config["num_hidden_layers"]), config["head_dim"] // 2
    most, pairs = config["num_key_value_heads"] * half, config["qk_rope_head_dim"] // 2
    return {
        "kv_lora_ranks": [64 for _ in layers],
        "rotary_frequencies": [config["rope_theta"] ** (-i / half) for i in range(half)],
        "rotary_slots": [[(5 * i + 3 * layer) % most for i in range(pairs)] for layer in layers],
    }


SCALES = r"norm(_\d)?\.weight$|scalar$|scale$"  # of the order of 1
GEMMAS = ("gemma3_text",)  # norms by (1 + weight), four of them a layer
NO_HEAD_NORMS = ("llama", "mistral", "ministral3")


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Every tensor of a model, float32, under the released names."""
    # Uniform draws of the frozen legacy generator: the same bits on every platform and
    # NumPy version, which golden files rely on (normal draws go through libm).
    rng = np.random.RandomState(seed)
    bound = WEIGHT_STD * math.sqrt(3)
    tensors = {}
    for name, shape in _weight_shapes(config):
        low, high = (0.7, 1.3) if re.search(SCALES, name) else (-bound, bound)
        if high != bound and config["model_type"] in GEMMAS:
            low, high = low - 1, high - 1
        tensors[name] = rng.uniform(low, high, shape).astype(np.float32)
    return tensors


def _weight_shapes(config: dict[str, Any]) -> Iterable[tuple[str, Shape]]:
    hidden, vocab, model_type = config["hidden_size"], config["vocab_size"], config["model_type"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    if config.get("hidden_size_per_layer_input"):
        extra = config["num_hidden_layers"] * config["hidden_size_per_layer_input"]
        yield "model.embed_tokens_per_layer.weight", (VOCAB, extra)
        yield "model.per_layer_model_projection.weight", (extra, hidden)
        each = config["hidden_size_per_layer_input"]
        yield "model.per_layer_projection_norm.weight", (each,)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in LAYERS.get(model_type, _plain_layer)(config, layer).items():
            suffix = "" if re.search(BARE, name) else ".weight"
            yield f"model.layers.{layer}.{name}{suffix}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


Shapes = dict[str, Shape]
# Tensors that are no module's weight.
BARE = r"scalar$|scale$|_bias$|^experts\."


def _norms(hidden: int, *names: str) -> Shapes:
    return {f"{name}_layernorm": (hidden,) for name in names}


def _mlp(hidden: int, width: int, block: str = "mlp") -> Shapes:
    """A gated MLP, or an expert."""
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {f"{block}.{name}_proj": shape for name, shape in shapes.items()}


def _plain_layer(config: dict[str, Any], layer: int) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    gemma = config["model_type"] in GEMMAS
    head_norms = config["model_type"] not in NO_HEAD_NORMS
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: Shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        **({"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)} if head_norms else {}),
        **_norms(hidden, "input", "post_attention"),
        **(_norms(hidden, "pre_feedforward", "post_feedforward") if gemma else {}),
    }  # fmt: skip
    if "num_experts" not in config:
        return shapes | _mlp(hidden, config["intermediate_size"])
    shapes["mlp.gate"] = (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        shapes |= _mlp(hidden, config["moe_intermediate_size"], f"mlp.experts.{expert}")
    return shapes


def _gemma4_layer(config: dict[str, Any], layer: int) -> Shapes:
    """Shared layers have no keys and values; global ones may have no value projection."""
    hidden, extra = config["hidden_size"], config["hidden_size_per_layer_input"]
    owns = layer < config["num_hidden_layers"] - config["num_kv_shared_layers"]
    kind, experts = config["layer_types"][layer], config.get("num_experts")
    heads, dim = _gemma4_heads(config, kind)
    queries, width = config["num_attention_heads"] * dim, config["intermediate_size"]
    shapes: Shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
    }  # fmt: skip
    if owns:
        shapes |= {"self_attn.k_proj": (heads * dim, hidden), "self_attn.k_norm": (dim,)}
        if kind == LOCAL or not config.get("attention_k_eq_v", False):
            shapes["self_attn.v_proj"] = (heads * dim, hidden)
    shapes |= _norms(hidden, "input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes |= _mlp(hidden, width if owns else 2 * width)
    if extra:
        shapes |= {"per_layer_input_gate": (extra, hidden), "per_layer_projection": (hidden, extra)}
        shapes["post_per_layer_input_norm"] = (hidden,)
    shapes["layer_scalar"] = (1,)
    if experts:
        names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
                 "pre_feedforward_layernorm_2")  # fmt: skip
        width = config["moe_intermediate_size"]
        shapes |= {name: (hidden,) for name in names} | {
            "router.proj": (experts, hidden), "router.scale": (hidden,),
            "router.per_expert_scale": (experts,),
            "experts.gate_up_proj": (experts, 2 * width, hidden),
            "experts.down_proj": (experts, hidden, width),
        }  # fmt: skip
    return shapes


def _gemma4_heads(config: dict[str, Any], kind: str) -> tuple[int, int]:
    """KV heads and their width in layers of a kind."""
    if kind == LOCAL:
        return config["num_key_value_heads"], config["head_dim"]
    fewer = config.get("attention_k_eq_v", False)
    heads = config["num_global_key_value_heads" if fewer else "num_key_value_heads"]
    return heads, config["global_head_dim"]


def _latent_layer(config: dict[str, Any], layer: int) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, queries = config["kv_lora_rank"], config["q_lora_rank"]
    plain, rotary, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    experts, full = config.get("n_routed_experts"), heads * (plain + rotary)
    routed = bool(experts) and layer >= config["first_k_dense_replace"]
    shapes: Shapes = {}
    if routed and config["topk_method"] == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    shapes |= {
        "self_attn.kv_a_proj_with_mqa": (latent + rotary, hidden),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (plain + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
        **_norms(hidden, "input", "post_attention"),
    }
    if queries:
        shapes |= {"self_attn.q_a_proj": (queries, hidden), "self_attn.q_a_layernorm": (queries,)}
        shapes["self_attn.q_b_proj"] = (full, queries)
    else:
        shapes["self_attn.q_proj"] = (full, hidden)
    if not routed:
        return shapes | _mlp(hidden, config["intermediate_size"])
    shapes["mlp.gate"] = (experts, hidden)
    for block in (*(f"mlp.experts.{e}" for e in range(experts)), "mlp.shared_experts"):
        shapes |= _mlp(hidden, config["moe_intermediate_size"], block)
    return shapes


def _converted_layer(config: dict[str, Any], layer: int) -> Shapes:
    hidden, heads, dim = (config[n] for n in ("hidden_size", "num_attention_heads", "head_dim"))
    groups, rotary = config["num_key_value_heads"], config["qk_rope_head_dim"]
    rank = config["kv_lora_ranks"][layer]
    return {
        "self_attn.q_proj": (heads * (dim + rotary), hidden), "self_attn.q_norm": (1, dim),
        "self_attn.kv_a_proj_with_mqa": (rank + rotary, hidden),
        "self_attn.k_b_proj": (groups * dim, rank), "self_attn.k_norm": (groups, dim),
        "self_attn.v_b_proj": (groups * dim, rank), "self_attn.o_proj": (hidden, heads * dim),
        **_mlp(hidden, config["intermediate_size"]), **_norms(hidden, "input", "post_attention"),
    }  # fmt: skip


LOCAL, GLOBAL = "sliding_attention", "full_attention"
LATENT = ("deepseek_v3", "glm4_moe_lite", "deepseek_v2", "minicpm3", "converted_mla")
# Layers unlike the common one.
LAYERS: dict[str, Callable[[dict[str, Any], int], Shapes]] = {
    "gemma4_text": _gemma4_layer,
    **dict.fromkeys(LATENT, _latent_layer),
    "converted_mla": _converted_layer,
}


def byte_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    """A byte-level BPE tokenizer: 256 bytes, a few merges, Qwen's special tokens or others."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As Qwen has it: the think marks are added tokens, yet plain text when decoded.
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special[:3]])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in special[3:]])
    return tokenizer


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def amend(path: Path, **facts: Any) -> None:
    """Write other entries into a file that holds a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def write_random_translator(
    folder: Path,
    source_folder: Path,
    target_folder: Path,
    *,
    nu: int = 1,
    head_mixing: bool = True,
    seed: int = 0,
    dtype: str = "float32",
    capture: str | None = None,
    bias: bool = False,
    head_map: Sequence[int] | None = None,
) -> Path:
    """Write a random linear translator between two model folders; returns its folder.

    Each target layer reads ``nu`` random source layers of its own kind of attention (or all
    there are) in random order, drawn anew for keys and for values, so that no reading order
    passes for another. ``capture`` None is the first point that the models have.
    """
    rng = np.random.RandomState(seed)
    source, target = _model_spec(source_folder), _model_spec(target_folder)
    config = {
        "format_version": 1,
        "kind": "linear",
        "head_mixing": head_mixing,
        "joint": False,
        "capture": capture or ("latent" if target["model_type"] in LATENT else "pre_norm"),
        "source": source,
        "target": target,
        "assignment": {side: _random_layers(rng, source, target, nu) for side in SIDES},
        "alignment": None,
        "provenance": {},
        **({} if head_map is None else {"head_map": list(head_map)}),
    }
    tensors = {
        name: _random_map(rng, s)
        for name, s in page_shapes(config, lambda *_: 0, bias=bias).items()
    }
    write_translator(folder, config, tensors, dtype)
    return folder


def write_translator(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Write a linear translator's config, tensors (float32, rounded here) and self-test."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "translator_config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(folder / "translator.safetensors", tensors, dtype)
    probes = {
        f"{name}.probe_out": (_rounded(weight, dtype) @ probe_input(weight.shape[-1])).astype(
            np.float32
        )
        for name, weight in tensors.items()
        if name.endswith(".weight")
    }
    write_tensors(folder / "selftest.safetensors", probes)


def write_mlp_translator(folder: Path, like: Path, hidden: int = 8) -> Path:
    """Write gated two-layer maps between the models of another translator, random."""
    config = json.loads((like / "translator_config.json").read_text())
    config |= {"kind": "mlp", "provenance": {}}
    rng = np.random.RandomState(SEED)
    shapes = page_shapes(config, lambda *_: hidden, gate=True)
    tensors = {name: _random_map(rng, shape) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    (folder / "translator_config.json").write_text(json.dumps(config))
    write_tensors(folder / "translator.safetensors", tensors)
    return folder


def _model_spec(folder: Path) -> dict[str, Any]:
    """The description of a model folder, from its config alone; fingerprints unknown."""
    config = json.loads((folder / "config.json").read_text())
    owners = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    return {
        "name": folder.name,
        "revision": None,
        "model_type": config["model_type"],
        "fingerprint": {"geometry": None, "norms": None, "tokenizer": None},
        "layers": [_cache_layer(config, layer) for layer in range(owners)],
    }


def _cache_layer(config: dict[str, Any], layer: int) -> dict[str, Any]:
    window = layer_window(config, layer)
    attention = "full" if window is None else "sliding"
    if config["model_type"] in LATENT:
        attention, heads = "latent", 1
        latents = config.get("kv_lora_ranks") or [config["kv_lora_rank"]] * (layer + 1)
        widths = config["qk_rope_head_dim"], latents[layer]
    else:
        heads, dim = config["num_key_value_heads"], config["head_dim"]
        if config["model_type"] == "gemma4_text":
            heads, dim = _gemma4_heads(config, config["layer_types"][layer])
        widths = dim, dim
    return layer_json(layer, heads, *widths, window) | {"attention": attention}


def layer_window(config: dict[str, Any], layer: int) -> int | None:
    """How many tokens a layer attends to, by a model's config.json; None for all."""
    pattern = config.get("sliding_window_pattern")
    if "layer_types" in config:
        local = config["layer_types"][layer] == LOCAL
    else:
        local = bool(pattern and (layer + 1) % pattern)
    return config["sliding_window"] if local else None


def _random_layers(
    rng: np.random.RandomState, source: dict[str, Any], target: dict[str, Any], nu: int
) -> list[list[int]]:
    kinds = [layer["attention"] for layer in source["layers"]]
    found = []
    for layer in target["layers"]:
        alike = [s for s, kind in enumerate(kinds) if kind == layer["attention"]]
        found.append([alike[index] for index in rng.permutation(len(alike))[:nu]])
    return found


def _random_map(rng: np.random.RandomState, shape: Shape) -> np.ndarray:
    """Entries that keep the scale of their input; a bias of about half that scale."""
    bound = math.sqrt(3 / shape[-1]) if len(shape) > 1 else 1.0
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def write_tensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Write float32 arrays as a safetensors file of ``dtype``."""
    stored = {name: _stored(array, dtype) for name, array in tensors.items()}
    mx.save_safetensors(str(path), stored, {"format": "pt"})  # transformers asks for it


def _stored(array: np.ndarray, dtype: str) -> mx.array:
    return mx.array(array).astype(getattr(mx, dtype))


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """What a float32 array is once stored as ``dtype``, in float32."""
    return np.array(_stored(array, dtype).astype(mx.float32))


@dataclass(frozen=True)
class Case:
    """A random translator between two of ``MODELS``; ``options`` go to its writer."""

    source: str
    target: str
    nu: int = 1
    head_mixing: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """What tests and files call it."""
        words = [self.source, "to", self.target, "mix" if self.head_mixing else "headwise"]
        extra = [f"{value}" if value is not True else key for key, value in self.options]
        return "-".join([*words, f"nu{self.nu}", *extra])


# Depth, KV heads, head width and rotation base all differ somewhere, and two models of one
# shape differ in rotation base alone: taking a fact from the wrong model shows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense4x16": ("qwen3", dict(seed=1, layers=4, kv_heads=4, head_dim=16)),
    "dense2x32": ("qwen3", dict(seed=2, layers=3, kv_heads=2, head_dim=32, rope_theta=1e6)),
    "moe2x32": ("qwen3_moe", dict(seed=3, layers=5, kv_heads=2, head_dim=32)),
    # Three local layers to one global one, or fewer; windows that a translator may shrink.
    "gemma2x32": ("gemma3_text", dict(seed=4, layers=7, kv_heads=2, head_dim=32)),
    "gemma4x16": (
        "gemma3_text",
        dict(
            seed=5, layers=5, kv_heads=4, head_dim=16, sliding_window=12,
            rope_local_base_freq=3000.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
    ),
    "gemma1x32": (
        "gemma3_text",
        dict(
            seed=6, layers=8, kv_heads=1, head_dim=32, sliding_window=8, sliding_window_pattern=4,
            rope_scaling=None,
        ),
    ),
    "llama2x16": (
        "llama",
        dict(
            seed=8, layers=4, kv_heads=2, head_dim=16,
            rope_scaling={
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        ),
    ),
    "mistral4x24": (
        "mistral",
        dict(
            seed=9, layers=3, kv_heads=4, head_dim=24,
            rope_scaling={
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
            },
        ),
    ),
    "ministral2x24": ("ministral3", dict(seed=12, layers=4, kv_heads=2, head_dim=24)),
    # Gemma-4: two local layers to one global one, the last three without a cache.
    "shared2x32": (
        "gemma4_text",
        dict(
            seed=10, layers=6, kv_heads=2, head_dim=32, sliding_window=12,
            layer_types=[LOCAL, LOCAL, GLOBAL] * 2, num_kv_shared_layers=3,
            hidden_size_per_layer_input=16,
        ),
    ),
    # Three to one, the last two without a cache.
    "shared4x16": (
        "gemma4_text",
        dict(
            seed=11, layers=8, kv_heads=4, head_dim=16, sliding_window=8, global_head_dim=48,
            layer_types=[LOCAL, LOCAL, LOCAL, GLOBAL] * 2, num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            rope_parameters={
                LOCAL: {"rope_type": "default", "rope_theta": 3000.0},
                GLOBAL: {"rope_type": "proportional", "rope_theta": 1e5,
                         "partial_rotary_factor": 0.25},
            },
        ),
    ),
    # One to one, global layers of fewer heads whose keys are their values; experts.
    "same2x32": (
        "gemma4_text",
        dict(
            seed=12, layers=4, kv_heads=2, head_dim=32, sliding_window=12,
            layer_types=[LOCAL, GLOBAL] * 2, attention_k_eq_v=True, num_global_key_value_heads=1,
            enable_moe_block=True, num_experts=EXPERTS, top_k_experts=ACTIVE_EXPERTS,
            moe_intermediate_size=32,
        ),
    ),
    # Latents of 64 or 48, rotary keys of 16 or 8.
    "mla64": ("deepseek_v3", dict(seed=13, layers=3, kv_heads=4, head_dim=16)),
    "mla48": (
        "deepseek_v3",
        dict(
            seed=14, layers=5, kv_heads=4, head_dim=8, kv_lora_rank=48, qk_rope_head_dim=8,
            rope_theta=5000.0,
            rope_scaling={
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        ),
    ),
    "mla_v2": (
        "deepseek_v2", dict(seed=15, layers=4, kv_heads=4, head_dim=16, kv_lora_rank=32)
    ),
    "mla_glm": ("glm4_moe_lite", dict(seed=16, layers=4, kv_heads=4, head_dim=16)),
}  # fmt: skip
# One of each family, for what must hold to the bit.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", dict(seed=1, layers=3, kv_heads=2, head_dim=32)),
    "qwen3_moe": ("qwen3_moe", dict(seed=2, layers=3, kv_heads=2, head_dim=32)),
    "gemma3": ("gemma3_text", dict(seed=3, layers=5, kv_heads=2, head_dim=32)),
    # The small ones: the last three layers read the caches of the second and the third.
    "gemma4": (
        "gemma4_text",
        dict(
            seed=4, layers=6, kv_heads=2, head_dim=32, num_kv_shared_layers=3,
            layer_types=[LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
            hidden_size_per_layer_input=32,
        ),
    ),
    # The large ones: global layers of fewer heads, whose keys are their values; experts.
    "gemma4_moe": (
        "gemma4_text",
        dict(
            seed=5, layers=4, kv_heads=2, head_dim=32, layer_types=[LOCAL, GLOBAL, LOCAL, GLOBAL],
            attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
            num_experts=EXPERTS, top_k_experts=ACTIVE_EXPERTS, moe_intermediate_size=32,
        ),
    ),
    **{
        name: (name, dict(seed=6, layers=3, kv_heads=2 if "mla" in name else 4, head_dim=16))
        for name in LATENT
    },
}  # fmt: skip
GOLDEN_CASES = (
    Case("dense4x16", "moe2x32", nu=2),
    Case("moe2x32", "dense4x16", nu=2, head_mixing=False),
)
GOLDEN = TESTS / "golden"
GOLDEN_TOKENS = 13
SEED = 7
Folders = tuple[Path, Path, Path]


def write_model(root: Path, name: str) -> Path:
    """The folder of one of ``MODELS`` under ``root``, written when first asked for."""
    folder = root / name
    if not folder.exists():
        model_type, options = MODELS[name]
        write_tiny_model(folder, model_type, **options)
    return folder


def write_case(root: Path, case: Case) -> Folders:
    """The folders of a case under ``root``: source, target, translator."""
    source, target = write_model(root, case.source), write_model(root, case.target)
    folder = root / "translators" / case.name
    if not folder.exists():
        options: dict[str, Any] = {"nu": case.nu, "head_mixing": case.head_mixing}
        options |= dict(case.options)
        write_random_translator(folder, source, target, seed=SEED, **options)
    return source, target, folder


def embedded_cases() -> list[Folders]:
    """Source, target and translator of every pair that the package ships."""
    cases = []
    for path in sorted(embedded.TRANSLATORS.glob("*/translator_config.json")):
        config = json.loads(path.read_text())
        source, target = (embedded.MODELS / config[end]["name"] for end in ("source", "target"))
        cases.append((source, target, path.parent))
    return cases


def random_tokens(count: int, seed: int = SEED) -> list[int]:
    """``count`` token ids of the byte tokenizer."""
    ids = byte_tokenizer().get_vocab_size()
    return np.random.RandomState(seed).randint(0, ids, count).tolist()


def digest(*folders: Path) -> str:
    """Sha256 over the tensors of folders, whatever order their files keep them in."""
    result = hashlib.sha256()
    for path in (p for folder in folders for p in sorted(folder.glob("*.safetensors"))):
        tensors = dict(safetensors.deserialize(path.read_bytes()))
        for name in sorted(tensors):
            result.update(name.encode() + tensors[name]["data"])
    return result.hexdigest()
