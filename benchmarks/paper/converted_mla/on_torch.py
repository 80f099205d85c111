"""transformers' side of converted models: what ``on_mlx`` computes through MLX.

Importing this registers them with ``AutoConfig`` and ``AutoModelForCausalLM``, and for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3Model,
    eager_attention_forward,
)

from benchmarks.paper.converted_mla import MODEL_TYPE
from kvlingo_mlx.cuda.families import FAMILIES, KeysValues, Latent, Positions, places
from kvlingo_mlx.format.geometry import RopeSpec


class ConvertedMLAConfig(Qwen3Config):
    """Qwen3's settings and those of the latents, as ``on_mlx`` explains them."""

    model_type = MODEL_TYPE

    kv_lora_ranks: list[int] | None = None
    qk_rope_head_dim: int = 0
    rotary_slots: list[list[int]] | None = None
    rotary_frequencies: list[float] | None = None
    qk_norm: bool = True


class PerHeadRMSNorm(nn.Module):
    """A norm of each head with a weight per head."""

    def __init__(self, heads: int, dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, dims))


class ListedRotary(nn.Module):
    """Cosines and sines (B, T, D / 2) of listed frequencies, float32."""

    def __init__(self, frequencies: list[float]) -> None:
        super().__init__()
        self.frequencies = frequencies

    def forward(
        self, states: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of ``position_ids`` (B, T)."""
        listed = torch.tensor(self.frequencies, dtype=torch.float32, device=states.device)
        angles = position_ids[..., None].float() * listed
        return angles.cos(), angles.sin()


class ConvertedMLAAttention(nn.Module):
    """Latent attention with one key and value per KV head, expanded from the cached latents."""

    is_causal = True

    def __init__(self, config: ConvertedMLAConfig, layer_idx: int) -> None:
        super().__init__()
        width, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.config, self.layer_idx, self.head_dim = config, layer_idx, dim
        self.num_heads, self.num_kv_heads = heads, config.num_key_value_heads or heads
        self.num_key_value_groups = heads // self.num_kv_heads
        assert config.kv_lora_ranks is not None and config.rotary_slots is not None
        self.kv_lora_rank = rank = config.kv_lora_ranks[layer_idx]
        self.qk_rope_head_dim = rotary = config.qk_rope_head_dim
        self.scaling = dim**-0.5
        self.eps = config.rms_norm_eps if config.qk_norm else None
        self.slots = config.rotary_slots[layer_idx]
        self.q_proj = nn.Linear(width, heads * (dim + rotary), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, rank + rotary, bias=False)
        self.k_b_proj = nn.Linear(rank, self.num_kv_heads * dim, bias=False)
        self.v_b_proj = nn.Linear(rank, self.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        self.q_norm = PerHeadRMSNorm(1, dim)
        self.k_norm = PerHeadRMSNorm(self.num_kv_heads, dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention as transformers' decoder layers call it, by either name of the cache."""
        cache = past_key_values if cache is None else cache
        latent, rotary = self.split(self.kv_a_proj_with_mqa(hidden_states))
        latent, rotary = latent[:, None], self.turned(rotary[:, None], position_embeddings)
        if cache is not None:
            latent, rotary = cache.update(latent, rotary, self.layer_idx)
        keys, values = self.expanded(latent, rotary)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            self.queries(self.q_proj(hidden_states), position_embeddings),
            keys,
            values,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents (..., T, r) and rotary keys (..., T, dr), normed and not rotated."""
        latent, rotary = projected.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        if self.eps is None:
            return latent, rotary
        unit = self._unit(self._heads(self.k_b_proj(latent)))[..., 0]
        heads = [slot // (self.head_dim // 2) for slot in self.slots] * 2
        return latent, (rotary * unit[..., heads]).to(rotary.dtype)

    def expanded(
        self, latent: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, G, T, D + dr) and values (B, G, T, D) of each KV head from what is cached."""
        raw = self._heads(self.k_b_proj(latent[:, 0]))
        plain = (raw * self._unit(raw) * self.k_norm.weight).to(latent.dtype).transpose(1, 2)
        shared = rotary.expand(*plain.shape[:3], self.qk_rope_head_dim)
        values = self._heads(self.v_b_proj(latent[:, 0])).transpose(1, 2)
        return torch.cat([plain, shared], dim=-1), values

    def queries(
        self, projected: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Queries (B, H, T, D + dr): the part without positions, then the rotated part."""
        heads = projected.view(*projected.shape[:2], self.num_heads, -1)
        plain, rotary = heads.split([self.head_dim, self.qk_rope_head_dim], dim=-1)
        unit = self._unit(plain)
        plain = (plain * unit * self.q_norm.weight).to(projected.dtype).transpose(1, 2)
        rotary = (rotary * unit).to(projected.dtype).transpose(1, 2)
        return torch.cat([plain, self.turned(rotary, angles)], dim=-1)

    def turned(
        self, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Rotary keys or queries (B, H, T, dr) rotated, each pair by its slot's frequency."""
        pairs = [slot % (self.head_dim // 2) for slot in self.slots]
        cos, sin = (table[:, None, :, pairs] for table in angles)
        first, second = states.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return turned.to(states.dtype)

    def _heads(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.view(*keys.shape[:-1], self.num_kv_heads, self.head_dim)

    def _unit(self, heads: torch.Tensor) -> torch.Tensor:
        """What brings each head (..., D) to a root mean square of 1, (..., 1) in float32."""
        if self.eps is None:
            return heads.new_ones((*heads.shape[:-1], 1))
        return torch.rsqrt(heads.float().square().mean(dim=-1, keepdim=True) + self.eps)


class ConvertedMLAModel(Qwen3Model):
    """Qwen3's decoder with this attention."""

    config_class = ConvertedMLAConfig
    _supports_flash_attn = False  # keys are wider than values
    _can_record_outputs = {  # noqa: RUF012  (as in the base class)
        "hidden_states": Qwen3DecoderLayer,
        "attentions": ConvertedMLAAttention,
    }

    def __init__(self, config: ConvertedMLAConfig) -> None:
        super().__init__(config)
        self.add_module("rotary_emb", ListedRotary(config.rotary_frequencies or []))
        for index, layer in enumerate(self.layers):
            layer.self_attn = ConvertedMLAAttention(config, index)


class ConvertedMLAForCausalLM(Qwen3ForCausalLM):
    """transformers' Qwen3 with this attention; Llama's and Mistral's other parts are the same."""

    config_class = ConvertedMLAConfig
    _supports_flash_attn = False

    def __init__(self, config: ConvertedMLAConfig) -> None:
        super().__init__(config)
        self.model = ConvertedMLAModel(config)


AutoConfig.register(MODEL_TYPE, ConvertedMLAConfig, exist_ok=True)
AutoModelForCausalLM.register(ConvertedMLAConfig, ConvertedMLAForCausalLM, exist_ok=True)


class TorchConvertedMLA(Latent):
    """Latents without a norm of their own; ``keys`` are the chosen pairs, before rotation."""

    def states(self, attention: Any, outputs: Sequence[torch.Tensor]) -> KeysValues:
        """The rotary keys (T, dr), with their heads' norms, and the latents (T, r)."""
        latent, rotary = attention.split(outputs[0])
        return rotary, latent

    def rotate(
        self, model: Any, attention: Any, heads: torch.Tensor, start: Positions
    ) -> torch.Tensor:
        """Each pair by its slot's frequency."""
        states = heads.transpose(0, 1)[None]
        angles = self.cosines(model, attention, states, places(start, heads))
        return attention.turned(states, angles)

    def rope(self, model: Any, attention: Any) -> RopeSpec:
        """The rotation of the chosen pairs, by their frequencies."""
        config, half = attention.config, attention.head_dim // 2
        listed = tuple(config.rotary_frequencies[slot % half] for slot in attention.slots)
        base, dims = float(config.rope_parameters["rope_theta"]), attention.qk_rope_head_dim
        return RopeSpec("listed", base, dims, scaling=(("frequencies", listed),))


FAMILIES[MODEL_TYPE] = TorchConvertedMLA(MODEL_TYPE)
