"""A small model as the first heads and channels of a large one (appendix "Head alignment")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

# Which of the model's widths each axis of a weight has.
AXES = {
    "embed_tokens": ("all", "hidden"), "lm_head": ("all", "hidden"),
    "q_proj": ("queries", "hidden"), "k_proj": ("keys", "hidden"), "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"), "q_norm": ("all",), "k_norm": ("all",),
    "gate_proj": ("inner", "hidden"), "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"), "norm": ("hidden",),
    "input_layernorm": ("hidden",), "post_attention_layernorm": ("hidden",),
}  # fmt: skip
SAME = ("model_type", "vocab_size", "head_dim", "tie_word_embeddings", "rms_norm_eps",
        "rope_parameters")  # fmt: skip


def sliced(weights: Mapping[str, torch.Tensor], large: Any, small: Any) -> dict[str, torch.Tensor]:
    """The weights of a model of config ``small`` out of those of one of config ``large``.

    The first layers, channels and key-value heads are taken, and of each of these heads' queries
    the first. A norm divides by the root mean square over all channels. So its weight is multiplied
    by sqrt(large width / small width): channels that are zero then change nothing when they go.
    The paper does not say whether it does that.

    Raises:
        ValueError: The small model is no part of the large one.
    """
    _check(large, small)
    dim, groups = large.head_dim, large.num_attention_heads // large.num_key_value_heads
    keys, own = small.num_key_value_heads, small.num_attention_heads // small.num_key_value_heads
    heads = torch.arange(large.num_attention_heads * dim).view(-1, groups, dim)
    kept = {
        "hidden": torch.arange(small.hidden_size),
        "inner": torch.arange(small.intermediate_size),
        "keys": torch.arange(keys * dim),
        "queries": heads[:keys, :own].flatten(),
    }
    wider = math.sqrt(large.hidden_size / small.hidden_size)
    found = {}
    for name, tensor in weights.items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= small.num_hidden_layers:
            continue
        axes = AXES[name.split(".")[-2]]
        for axis, width in enumerate(axes):
            if width != "all":
                tensor = tensor.index_select(axis, kept[width].to(tensor.device))
        found[name] = tensor * wider if axes == ("hidden",) else tensor
    return found


def _check(large: Any, small: Any) -> None:
    """Refuse (ValueError) a model that is no part of the large one."""
    if large.model_type != "qwen3":
        raise ValueError(
            f"a model of model_type {large.model_type!r} cannot be sliced; give a dense Qwen3"
        )
    wrong = [
        f"{name} is {getattr(large, name)} there, {getattr(small, name)} here"
        for name in SAME
        if getattr(large, name) != getattr(small, name)
    ]
    sizes = {
        name: (getattr(large, name), getattr(small, name))
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")
    }
    sizes["queries for a key-value head"] = tuple(
        config.num_attention_heads // config.num_key_value_heads for config in (large, small)
    )
    wrong += [f"{n} is {most} there, {wanted} here" for n, (most, wanted) in sizes.items()
              if wanted > most]  # fmt: skip
    if wrong:
        raise ValueError(
            f"the small model is no slice of the large one: {'; '.join(wrong)}; give a model that "
            "is as large in everything and alike in the rest"
        )
