"""An independent hand-over in PyTorch and transformers: plain loops, float64, one token at a time.

It shares no code with the package. It reads a translator's files as the format page
describes them, and takes k_norm, RoPE and decoding from the models' own modules.
Legend: T tokens, H KV heads, D head dim.
"""

from __future__ import annotations

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

Model = Any  # a transformers model: its attributes differ by family, and types hide them
POINTS = ("pre_norm", "post_norm", "post_rope")
SIDES = ("keys", "values")


@dataclass(frozen=True)
class Reference:
    """A target's cache of all tokens but the last, and its logits for that one.

    ``keys`` (rotated) and ``values`` hold one (H, T, D) array a layer.
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
    gemma = "Gemma" in type(module).__name__  # its weight is stored as its distance from 1
    eps = module.eps if gemma else module.variance_epsilon
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (module.weight + 1 if gemma else module.weight) * (x * scale)


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
    source, target = load_model(source_folder), load_model(target_folder)
    config, tensors = read_translator(translator_folder)
    capture = config["capture"]
    states = dict(zip(SIDES, capture_projections(source, tokens[:-1]), strict=True))
    states["keys"] = [
        finish(source, layer, keys, "pre_norm", capture)
        for layer, keys in enumerate(states["keys"])
    ]
    translated: dict[str, list[Tensor]] = {
        side: [
            translate_layer(config, tensors, side, layer, states[side])
            for layer in range(len(config["target"]["layers"]))
        ]
        for side in SIDES
    }
    keys = [
        finish(target, layer, array, capture, "post_rope", first_position)
        for layer, array in enumerate(translated["keys"])
    ]
    return decode(target, keys, translated["values"], tokens[-1])


@torch.no_grad()
def native(folder: Path, tokens: Sequence[int]) -> Reference:
    """The same from a model's own prefill, as transformers does it."""
    model = load_model(folder)
    cache: Any = DynamicCache()
    model(torch.tensor([tokens[:-1]]), past_key_values=cache)
    keys = [layer.keys[0].transpose(0, 1) for layer in cache.layers]
    values = [layer.values[0].transpose(0, 1) for layer in cache.layers]
    return decode(model, keys, values, tokens[-1])


def read_translator(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A translator's config and its tensors, as float64."""
    config = json.loads((folder / "translator_config.json").read_text())
    if config["kind"] != "linear" or config["joint"] or config["alignment"] is not None:
        raise ValueError(f"{folder}: the reference knows plain linear translators only")
    tensors = load_file(folder / "translator.safetensors")
    return config, {name: tensor.double() for name, tensor in tensors.items()}


def capture_projections(model: Model, tokens: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """What k_proj and v_proj write, one (T, H, D) tensor a layer: keys before k_norm."""
    outputs: dict[torch.nn.Module, Tensor] = {}

    def record(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        outputs[module] = output[0]

    attentions = [layer.self_attn for layer in model.model.layers]
    projections = [p for a in attentions for p in (a.k_proj, a.v_proj)]
    hooks = [projection.register_forward_hook(record) for projection in projections]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    heads, dim = model.config.num_key_value_heads, attentions[0].head_dim
    keys = [outputs[a.k_proj].view(-1, heads, dim) for a in attentions]
    values = [outputs[a.v_proj].view(-1, heads, dim) for a in attentions]
    return keys, values


def translate_layer(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    side: str,
    layer: int,
    states: Sequence[Tensor],
) -> Tensor:
    """One target layer's keys or values, (T, H, D), from the source's (T, H, D) a layer."""
    weight = tensors[f"{side}.{layer}.weight"]
    read = [states[s] for s in config["assignment"][side][layer]]
    geometry = config["target"]["layers"][layer]
    dim = geometry["key_dim"] if side == "keys" else geometry["value_dim"]
    apply = mix_heads if config["head_mixing"] else functools.partial(map_heads, config)
    rows = []
    for position in range(len(read[0])):
        row = apply(weight, [array[position] for array in read]).reshape(-1)
        if f"{side}.{layer}.bias" in tensors:
            row = row + tensors[f"{side}.{layer}.bias"]
        rows.append(row.view(geometry["kv_heads"], dim))
    return torch.stack(rows)


def mix_heads(weight: Tensor, read: Sequence[Tensor]) -> Tensor:
    """A token's map that reads every head: each layer's heads stacked, layers in order."""
    return weight @ torch.cat([array.reshape(-1) for array in read])


def map_heads(config: dict[str, Any], weight: Tensor, read: Sequence[Tensor]) -> Tensor:
    """A token's head-wise map: target head h reads its one source head in every layer."""
    targets, sources = len(weight), len(read[0])
    head_map = config.get("head_map") or [h // (targets // sources) for h in range(targets)]
    return torch.stack(
        [weight[h] @ torch.cat([array[head_map[h]] for array in read]) for h in range(targets)]
    )


def finish(
    model: Model, layer: int, keys: Tensor, origin: str, goal: str, first_position: int = 0
) -> Tensor:
    """Take (T, H, D) keys from one capture point to a later one, with the model's modules."""
    steps = POINTS[POINTS.index(origin) : POINTS.index(goal)]
    attention = model.model.layers[layer].self_attn
    if "pre_norm" in steps and hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    if "post_norm" in steps:
        positions = torch.arange(first_position, first_position + len(keys))[None]
        gemma = model.config.model_type == "gemma3_text"
        kind = (attention.layer_type,) if gemma else ()  # a rotation for each kind of layer
        cos, sin = model.model.rotary_emb(keys, positions, *kind)
        modeling = sys.modules[type(model).__module__]
        heads_first = keys.transpose(0, 1)[None]
        _, rotated = modeling.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
        keys = rotated[0].transpose(0, 1)
    return keys


def decode(model: Model, keys: Sequence[Tensor], values: Sequence[Tensor], token: int) -> Reference:
    """Run one token over (T, H, D) keys and values as the model's cache.

    The cache holds every token; what lies before a window, transformers masks.
    """
    cache = DynamicCache()
    keys = [array.transpose(0, 1).contiguous() for array in keys]
    values = [array.transpose(0, 1).contiguous() for array in values]
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key[None], value[None], layer)
    logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    rounded = [[a.float().numpy() for a in side] for side in (keys, values)]
    return Reference(*rounded, logits.float().numpy())
