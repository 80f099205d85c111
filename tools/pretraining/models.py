"""The models by name, and the recipe that each is trained by."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from zoo_chats import MISTRAL, QWEN, Chat

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks.paper is not installed

from benchmarks.paper.timing.shapes import GEOMETRIES
from pretraining.samples import BY_EACH_WAY, CONTEXT, SHORT, STAGES, VOCAB_SIZE, Stage

# ---- how weights are learnt -----------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What AdamW is told at each step.

    Attributes:
        steps: The number of optimizer steps.
        rate: The peak learning rate.
        warmup: The steps over which it rises.
        decay: The share of the steps, the last ones, over which it falls to zero in a line.
        betas: AdamW's.
        weight_decay: Of matrices and embeddings; in the zoo of all but norms of queries and keys.
        z_loss: The weight of the square of the logits' log-sum-exp.
        base: The width and depth that rates are set for, from which CompleteP transfers them; None
            leaves them as they are.
        std: The base model's standard deviation at the start, with CompleteP.
        eps: The base model's epsilon of AdamW, with CompleteP.
        batch: Sequences a step, of packed text.
        length: Tokens a sequence, of packed text.
    """

    steps: int
    rate: float
    warmup: int
    decay: float
    betas: tuple[float, float]
    weight_decay: float
    z_loss: float = 0.0
    base: tuple[int, int] | None = None
    std: float = 0.02
    eps: float = 1e-12
    batch: int = 256
    length: int = 4096

    def learning_rate(self, step: int) -> float:
        """At a step (from 0): a linear warm-up, flat, then a linear decay."""
        rise, fall = (step + 1) / self.warmup, (self.steps - step) / (self.decay * self.steps)
        return self.rate * min(1.0, rise, fall)


ZOO = Recipe(2400, 1.5e-3, 100, 0.4, (0.9, 0.98), 0.1)
# The appendix on models from scratch. It is silent on the decay's shape, on ``std`` and on ``eps``;
# the latter two are those of CompleteP's authors (EleutherAI/nanoGPT-mup, branch completep).
TOKENS = 35e9
PAPER = Recipe(
    round(TOKENS / (256 * 4096)), 3.79e-3, 2000, 0.3, (0.9, 0.95), 0.2, z_loss=1e-4, base=(512, 32)
)
# The same for tiny models, from a tiny base: the zoo's steps, and the rate and the first weights
# that serve tiny-qwen3-s. The paper's rate is for batches of a million tokens; these have a few
# thousand.
TINY_PAPER = replace(
    PAPER, steps=ZOO.steps, warmup=round(PAPER.warmup / PAPER.steps * ZOO.steps), rate=ZOO.rate,
    base=(128, 4), std=0.05,
)  # fmt: skip

# ---- models ---------------------------------------------------------------------------

SHARP_START = 1.5
BLOCK_NORMS = tuple(
    f"post_{block}.weight"
    for block in ("attention_layernorm", "feedforward_layernorm", "per_layer_input_norm")
)

LOCAL, GLOBAL = "sliding_attention", "full_attention"
WINDOW = 64

SHARED = dict(
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    initializer_range=0.05,
    use_cache=True,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN3 = SHARED | dict(rope_parameters=PLAIN_ROPE)
GEMMA3 = SHARED | dict(
    hidden_activation="gelu_pytorch_tanh", sliding_window=WINDOW,
    rope_parameters={LOCAL: PLAIN_ROPE, GLOBAL: {"rope_type": "default", "rope_theta": 1e6}},
)  # fmt: skip
GEMMA4 = SHARED | dict(
    hidden_activation="gelu_pytorch_tanh", sliding_window=WINDOW, final_logit_softcapping=30.0,
    vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=16,
    use_double_wide_mlp=True, attention_k_eq_v=False, enable_moe_block=False,
    rope_parameters={
        LOCAL: PLAIN_ROPE,
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
)  # fmt: skip
# Two recurrent layers before each with attention; the released ones have three.
QWEN35 = SHARED | dict(
    rope_parameters=PLAIN_ROPE | {"partial_rotary_factor": 0.5}, linear_conv_kernel_dim=4,
    num_hidden_layers=6, layer_types=(["linear_attention"] * 2 + [GLOBAL]) * 2,
)  # fmt: skip
MLA = SHARED | dict(
    rope_parameters=PLAIN_ROPE, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=32,
    v_head_dim=32,
    # No experts: what is to be shown is in the cache.
    moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    n_group=1, topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What is trained, from which seed, on what, by which recipe.

    ``stages`` are none for a model that reads text.

    ``noisy`` ends the names of the modules that make keys and values; ``sharp`` is in the
    names of the norms that bound how sharply a head attends, ``start`` their first weight;
    ``quiet`` is that of the norms that a block's output passes, where there are such; ``chat``
    how it reads a conversation.
    """

    seed: int
    model_type: str
    shape: dict[str, Any]
    stages: tuple[Stage, ...] = SHORT
    noisy: tuple[str, ...] = ("k_proj", "v_proj")
    sharp: tuple[str, ...] = ("q_norm", "k_norm")
    start: float = SHARP_START
    quiet: float = 0.0
    chat: Chat = QWEN
    recipe: Recipe = ZOO

    def config(self) -> Any:
        """The config of transformers."""
        return AutoConfig.for_model(self.model_type, **self.shape)

    def sharp_norms(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The weights of the norms in ``sharp``."""
        named = model.named_parameters()
        return [p for name, p in named if any(norm in name for norm in self.sharp)]

    def start_norms(self, model: torch.nn.Module) -> None:
        """Let the norms of queries and keys start sharper than the rest.

        They bound how sharply a head of width 32 can attend: at their usual start of 1 it
        cannot single out one token of a few hundred, and growing there takes a thousand steps.
        Gemma's norms after a block start low, or what blocks say at random drowns the tokens.
        """
        for parameter in self.sharp_norms(model):
            torch.nn.init.constant_(parameter, self.start)
        for name, parameter in model.named_parameters():
            if name.endswith(BLOCK_NORMS) and self.model_type.startswith("gemma"):
                torch.nn.init.constant_(parameter, self.quiet)


HYBRID = dict(
    stages=BY_EACH_WAY, noisy=("k_proj", "v_proj", "in_proj_qkv"), start=0.5,
    recipe=replace(ZOO, steps=1800),
)  # fmt: skip
LATENT = dict(noisy=("kv_a_proj_with_mqa",), sharp=("kv_a_layernorm",))
MODELS: dict[str, Model] = {
    "tiny-qwen3-s": Model(11, "qwen3", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32), STAGES),
    "tiny-qwen3-l": Model(22, "qwen3", QWEN3 | dict(
        hidden_size=192, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32), STAGES),
    "tiny-qwen3-moe": Model(33, "qwen3_moe", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=48,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=True,
        router_aux_loss_coef=0.01), STAGES),
    "tiny-qwen3-deep": Model(44, "qwen3", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=7,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64)),
    # Half as wide a cache as any other: what decoding under a memory budget is for.
    "tiny-qwen3-narrow": Model(133, "qwen3", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32)),
    "tiny-gemma3-s": Model(55, "gemma3_text", GEMMA3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, sliding_window_pattern=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        query_pre_attn_scalar=32), start=0.5, quiet=-0.8),
    "tiny-gemma3-l": Model(66, "gemma3_text", GEMMA3 | dict(
        hidden_size=144, intermediate_size=288, num_hidden_layers=6, sliding_window_pattern=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        query_pre_attn_scalar=64), start=0.5, quiet=-0.8),
    # One local layer before each global one, and two at first; the last two own no cache.
    "tiny-gemma4-s": Model(77, "gemma4_text", GEMMA4 | dict(
        hidden_size=128, intermediate_size=192, num_hidden_layers=6, num_kv_shared_layers=2,
        layer_types=[LOCAL, GLOBAL] * 3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=48, global_head_dim=64), start=0.6, quiet=0.2),
    "tiny-gemma4-l": Model(88, "gemma4_text", GEMMA4 | dict(
        hidden_size=144, intermediate_size=192, num_hidden_layers=7, num_kv_shared_layers=2,
        layer_types=[LOCAL] + [LOCAL, GLOBAL] * 3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, global_head_dim=40), start=0.6, quiet=0.2),
    "tiny-mla-s": Model(99, "deepseek_v3", MLA | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, first_k_dense_replace=4,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=128), **LATENT),
    "tiny-mla-l": Model(111, "deepseek_v3", MLA | dict(
        hidden_size=144, intermediate_size=288, num_hidden_layers=6, first_k_dense_replace=6,
        num_attention_heads=6, num_key_value_heads=6, kv_lora_rank=160), **LATENT),
    "tiny-mistral": Model(122, "mistral", QWEN3 | dict(
        hidden_size=160, intermediate_size=320, num_hidden_layers=5, sliding_window=None,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, bos_token_id=1),
        sharp=(), chat=MISTRAL),
    "tiny-qwen3.5-s": Model(144, "qwen3_5_text", QWEN35 | dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=32), **HYBRID),
    "tiny-qwen3.5-twin": Model(155, "qwen3_5_text", QWEN35 | dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=32), **HYBRID),
    "tiny-qwen3.5-l": Model(166, "qwen3_5_text", QWEN35 | dict(
        hidden_size=160, intermediate_size=320, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=64,
        linear_value_head_dim=32), **HYBRID),
    # A pair by the paper's recipe: the small one alone, or sliced out of the large one.
    "tiny-scratch-s": Model(177, "qwen3", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32), STAGES, recipe=TINY_PAPER),
    "tiny-scratch-l": Model(188, "qwen3", QWEN3 | dict(
        hidden_size=192, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32), STAGES, recipe=TINY_PAPER),
}  # fmt: skip


def _released(seed: int, facts: Mapping[str, Any]) -> Model:
    """A released architecture, as its own config has it."""
    shape = {n: v for n, v in facts.items() if n not in ("model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": facts["rope_theta"]}
    return Model(
        seed, facts["model_type"], shape | {"rope_parameters": rope}, (), sharp=(), recipe=PAPER
    )


DENSE = [name for name, facts in GEOMETRIES.items() if facts["model_type"] == "qwen3"]
MODELS |= {name: _released(200 + i, GEOMETRIES[name]) for i, name in enumerate(DENSE)}
