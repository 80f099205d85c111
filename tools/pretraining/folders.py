"""A trained model's folder, in the spelling of released ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from pretraining.models import GLOBAL, LOCAL


def write_folder(
    out: Path, model: Any, tokenizer: Any, weights: dict[str, torch.Tensor], recipe: dict[str, Any]
) -> None:
    """Save in the released spelling: mlx-lm does not read all of transformers 5's keys.

    ``weights`` are of one dtype and take the place of the model's; ``recipe`` says how they were
    made.
    """
    temporary, dtype = out.with_name(out.name + ".tmp"), next(iter(weights.values())).dtype
    shutil.rmtree(temporary, ignore_errors=True)
    model.config.output_router_logits = False
    if "kv_lora_rank" in model.config.to_dict():  # mlx-lm's latent families know no tied head
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        weights = {**weights, "lm_head.weight": model.lm_head.weight}
    model.save_pretrained(temporary, state_dict=dict(weights))  # it empties what it is given
    for path in temporary.glob("*.safetensors"):
        path.chmod(0o644)
    tokenizer.save_pretrained(temporary)
    path = temporary / "config.json"
    config = json.loads(path.read_text()) | {"dtype": dtype}
    config = released_spelling(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    recipe |= {"parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__}
    (temporary / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)


def released_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A config as transformers 5 writes it, by the keys that mlx-lm reads too."""
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope[LOCAL]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("layer_types").index(GLOBAL) + 1
        rope = rope[GLOBAL]
    if per_layer := config.pop("per_layer_config", None):  # transformers 5.23's, for Gemma-4
        config["global_head_dim"] = next(iter(per_layer.values()))["head_dim"]
    if config["model_type"] != "gemma4_text":
        config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None
        del config["rope_parameters"]
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config["torch_dtype"] = str(config.pop("dtype")).removeprefix("torch.")
    if config["model_type"] == "qwen3_5_text":  # mlx-lm reads this one within its wrapper
        config["rope_parameters"] = rope
        config["full_attention_interval"] = config["layer_types"].index(GLOBAL) + 1
        config = {"model_type": "qwen3_5", "text_config": config} | {
            name: config[name] for name in ("eos_token_id", "pad_token_id", "torch_dtype")
        }
    return config
