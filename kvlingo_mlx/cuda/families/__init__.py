"""The model families that can be trained, by their config's ``model_type``."""

from __future__ import annotations

from kvlingo_mlx.cuda.families.base import POINTS, TorchFamily
from kvlingo_mlx.cuda.families.converted_mla import FAMILY as CONVERTED
from kvlingo_mlx.cuda.families.gemma3 import Gemma3
from kvlingo_mlx.cuda.families.gemma4 import Gemma4
from kvlingo_mlx.cuda.families.latent import DeepseekV2, Latent
from kvlingo_mlx.cuda.families.llama import Llama, Ministral3
from kvlingo_mlx.errors import UnsupportedModelError

__all__ = ["FAMILIES", "POINTS", "TorchFamily", "family_of"]

FAMILIES = {
    "qwen3": TorchFamily("qwen3"),
    "qwen3_moe": TorchFamily("qwen3_moe", scaled_rope=False),
    "llama": Llama("llama"),
    "mistral": Llama("mistral"),
    "ministral3": Ministral3("ministral3"),
    "gemma3_text": Gemma3("gemma3_text"),
    "gemma3": Gemma3("gemma3_text"),
    "gemma4_text": Gemma4("gemma4_text"),
    "gemma4": Gemma4("gemma4_text"),
    "deepseek_v2": DeepseekV2("deepseek_v2"),
    "deepseek_v3": Latent("deepseek_v3"),
    CONVERTED.model_type: CONVERTED,
    "glm4_moe_lite": Latent("glm4_moe_lite", base=1e6),
}

# They keep recurrent states: a cache that PyTorch's path here cannot make.
HYBRIDS = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("granitemoehybrid", "nemotron_h", "lfm2", "lfm2_moe"),
)


def family_of(model_type: str) -> TorchFamily:
    """The adapter of a model type.

    Raises:
        UnsupportedModelError: There is no adapter; the message lists the supported families, or
            names the runtime that has one.
    """
    if model_type.removesuffix("_text") in HYBRIDS:
        raise UnsupportedModelError(
            f"model_type {model_type!r} keeps recurrent states, through which only MLX trains "
            "here: --device mlx"
        )
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} cannot be trained; "
            f"supported families: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
