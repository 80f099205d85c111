"""Random hybrids made by transformers, in folders that mlx-lm reads."""

import json
from pathlib import Path
from typing import Any

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


def write(folder: Path, name: str, more: Settings, seed: int = 1) -> Model:
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
