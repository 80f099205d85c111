"""An independent hand-over in PyTorch and transformers: plain loops, float64, one token at a time.

It shares no code with the package. It reads a translator's files as the format page
describes them, and takes k_norm, RoPE and decoding from the models' own modules.
Legend: T tokens, H KV heads, D head dim.
"""

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from tests.support import kinds
from tests.support.translator_folders import layer_output

Model = Any  # a transformers model: its attributes differ by family, and types hide them
# How many of norm and rotation keys have behind them; those of latents await their rotation.
POINTS = {"pre_norm": 0, "latent": 1, "post_norm": 1, "post_rope": 2}
SIDES = ("keys", "values")
PER_KIND = ("gemma3_text", "gemma4_text")  # a rotation for each kind of layer
EXPANDED = ("deepseek_v2",)  # mlx-lm caches every head's keys and values, not the latents


@dataclass(frozen=True)
class Reference:
    """A target's cache of all tokens but the last, as mlx-lm has it, and its logits for that one.

    ``keys`` (rotated) and ``values`` hold one (H, T, D) array a layer that owns a cache. Where
    mlx-lm caches latents, ``keys`` are those and ``values`` the rotated rotary keys.
    """

    keys: list[np.ndarray]
    values: list[np.ndarray]
    logits: np.ndarray


@functools.cache
def load_model(folder: Path) -> Model:
    """A model in float64, attention and experts in their plainest form.

    PyTorch's own float32 is up to 1.2e-4 from it in a logit of the zoo, more than is allowed here.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(rms_norm, module)  # its own casts to float32
    return model.eval()


def rms_norm(module: Any, x: Tensor) -> Tensor:
    """What transformers' RMSNorm computes, in the dtype of ``x``."""
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if not hasattr(module, "weight"):  # Gemma-4's norm of values
        return normed
    gemma3 = "Gemma3" in type(module).__name__  # its weight is stored as its distance from 1
    return (module.weight + 1 if gemma3 else module.weight) * normed


@torch.no_grad()
def hand_over(
    source_folder: Path,
    target_folder: Path,
    translator_folder: Path,
    tokens: Sequence[int],
    *,
    first_position: int = 0,
) -> Reference:
    """Prefill the source, translate, decode one step with the target.

    ``first_position`` is where the target's keys are rotated to start; only a negative
    control gives another one than 0.
    """
    keys, values = translate(
        source_folder, target_folder, translator_folder, tokens[:-1], first_position
    )
    return decode(load_model(target_folder), keys, values, tokens[-1])


def translate(
    source_folder: Path,
    target_folder: Path,
    translator_folder: Path,
    prefix: Sequence[int],
    first_position: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Every target layer's rotated keys and values of a prefix, (T, H, D)."""
    source, target = load_model(source_folder), load_model(target_folder)
    config, tensors = read_translator(translator_folder)
    capture = config["capture"]
    finished: dict[str, list[Tensor]] = {}
    for side, states in zip(SIDES, capture_projections(source, prefix), strict=True):
        read = [
            finish(source, side, layer, array, "pre_norm", capture)
            for layer, array in enumerate(states)
        ]
        finished[side] = [
            finish(
                target,
                side,
                layer,
                translate_layer(config, tensors, side, layer, read),
                capture,
                "post_rope",
                first_position,
            )
            for layer in range(len(config["target"]["layers"]))
        ]
    return finished["keys"], finished["values"]


def owners(model: Model) -> list[Model]:
    """The attention modules that have keys and values of their own; Gemma-4's last have none."""
    attentions = [layer.self_attn for layer in model.model.layers]
    return [a for a in attentions if not getattr(a, "is_kv_shared_layer", False)]


def has_latents(model: Model) -> bool:
    """Whether a model's attention is MLA."""
    return hasattr(owners(model)[0], "kv_a_proj_with_mqa")


def read_translator(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A translator's config and its tensors, as float64."""
    config = json.loads((folder / "translator_config.json").read_text())
    if config["kind"] != "linear" or config["joint"]:
        raise ValueError(f"{folder}: the reference knows plain linear translators only")
    tensors = load_file(folder / "translator.safetensors")
    return config, {name: tensor.double() for name, tensor in tensors.items()}


def capture_projections(model: Model, tokens: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """What the projections write, one (T, H, D) tensor a layer and side: keys before k_norm.

    Of latents, keys are k_R before its rotation and values c_KV after its norm.
    """
    outputs: dict[torch.nn.Module, Tensor] = {}

    def record(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        outputs[module] = output[0]

    taps = [projections(attention) for attention in owners(model)]
    hooks = [p.register_forward_hook(record) for p in {p for pair in taps for p in pair}]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    pairs = [
        split(attention, [outputs[p] for p in pair])
        for attention, pair in zip(owners(model), taps, strict=True)
    ]
    keys, values = map(list, zip(*pairs, strict=True))
    return keys, values


def projections(attention: Model) -> list[torch.nn.Module]:
    """The modules that write a layer's keys and values; one may write both."""
    if hasattr(attention, "kv_a_proj_with_mqa"):
        return [attention.kv_a_proj_with_mqa]
    same = attention.v_proj is None  # Gemma-4's large models, in global layers
    return [attention.k_proj, attention.k_proj if same else attention.v_proj]


def split(attention: Model, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A layer's keys and values (T, H, D), of what its projections wrote."""
    if len(outputs) == 2:
        keys, values = (output.view(len(output), -1, attention.head_dim) for output in outputs)
        return keys, values
    latent, keys = outputs[0].split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    return keys[:, None], attention.kv_a_layernorm(latent)[:, None]


def translate_layer(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    side: str,
    layer: int,
    states: Sequence[Tensor],
) -> Tensor:
    """One target layer's keys or values, (T, H, D), from the source's (T, H, D) a layer."""
    parts = kinds.tensors_of({name: t.numpy() for name, t in tensors.items()}, f"{side}.{layer}")
    read = [states[s].flatten(1).numpy() for s in config["assignment"][side][layer]]
    rows = [layer_output(parts, kinds.inputs(config, row)) for row in zip(*read, strict=True)]
    heads = config["target"]["layers"][layer]["kv_heads"]
    return torch.tensor(np.stack(rows)).view(len(rows), heads, -1)


def finish(
    model: Model,
    side: str,
    layer: int,
    states: Tensor,
    origin: str,
    goal: str,
    first_position: int = 0,
) -> Tensor:
    """Take (T, H, D) keys or values from one capture point to a later one, by model's modules."""
    attention = owners(model)[layer]
    norm = getattr(attention, "k_norm" if side == "keys" else "v_norm", None)
    if norm is not None and POINTS[origin] < 1 <= POINTS[goal]:
        states = norm(states)
    if side == "keys" and POINTS[origin] < 2 <= POINTS[goal]:
        states = rotate(model, attention, states, first_position)
    return states


def rotate(model: Model, attention: Model, keys: Tensor, first_position: int) -> Tensor:
    """RoPE of (T, H, D), laid out as transformers has it."""
    positions = torch.arange(first_position, first_position + len(keys))[None]
    kind = (attention.layer_type,) if model.config.model_type in PER_KIND else ()
    angles = model.model.rotary_emb(keys, positions, *kind)
    modeling = sys.modules[type(model).__module__]
    both = [keys.transpose(0, 1)[None]] * 2  # in place of queries too
    if model.config.model_type == "gemma4_text":
        rotated = modeling.apply_rotary_pos_emb(both[1], *angles)
    elif model.config.model_type == "deepseek_v2":
        _, rotated = modeling.apply_rotary_emb(*both, angles)
    elif interleaves(model):
        _, rotated = modeling.apply_rotary_pos_emb_interleave(*both, *angles)
    else:
        _, rotated = modeling.apply_rotary_pos_emb(*both, *angles)
    return rotated[0].transpose(0, 1)


def interleaves(model: Model) -> bool:
    """Whether numbers rotated together lie side by side before, and half a width apart after."""
    return getattr(model.config, "rope_interleave", False)


def decode(model: Model, keys: Sequence[Tensor], values: Sequence[Tensor], token: int) -> Reference:
    """Run one token over (T, H, D) keys and values as the model's cache.

    The cache holds every token; what lies before a window, transformers masks.
    """
    cache = DynamicCache()
    for layer, attention in enumerate(owners(model)):
        key, value = keys[layer], values[layer]
        if has_latents(model) and hasattr(attention, "expand_kv"):  # caches latents
            key, value = value, key
        elif has_latents(model):  # as transformers had it before
            key, value = expand(attention, key, value)
        key, value = (array.transpose(0, 1)[None].contiguous() for array in (key, value))
        cache.update(key, value, layer)
    logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return as_mlx_caches(model, keys, values, logits)


def expand(attention: Model, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's keys and values (T, H, D), of rotated k_R and c_KV (T, 1, D)."""
    both = attention.kv_b_proj(values[:, 0]).view(len(values), attention.num_heads, -1)
    plain, expanded = both.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=-1)
    return torch.cat([plain, keys.expand(-1, attention.num_heads, -1)], dim=-1), expanded


def as_mlx_caches(
    model: Model, keys: Sequence[Tensor], values: Sequence[Tensor], logits: Tensor
) -> Reference:
    """What mlx-lm's cache stores of rotated keys and values (T, H, D), in float32."""
    pairs = list(zip(keys, values, strict=True))
    if model.config.model_type in EXPANDED:
        pairs = [expand(a, *pair) for a, pair in zip(owners(model), pairs, strict=True)]
    elif has_latents(model):
        pairs = [(v, neighbours(k) if interleaves(model) else k) for k, v in pairs]
    stored_keys, stored_values = (
        [array.transpose(0, 1).float().numpy() for array in side]
        for side in zip(*pairs, strict=True)
    )
    return Reference(stored_keys, stored_values, logits.float().numpy())


def neighbours(halves: Tensor) -> Tensor:
    """Numbers that are rotated together side by side again, as mlx-lm leaves them."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
