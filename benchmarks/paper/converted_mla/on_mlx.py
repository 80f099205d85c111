"""mlx-lm's side of converted models. Importing this registers them with mlx-lm and the package.

A token is cached as one latent and one rotary key, as in other families of latents. Two things are
unlike DeepSeek's: queries and keys keep their norm per head, and the rotary key consists of chosen
pairs of the original heads' numbers, each with its own frequency (docs/decisions/023).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

import mlx_lm.models
from mlx_lm.models import qwen3
from mlx_lm.models.base import scaled_dot_product_attention

from benchmarks.paper.converted_mla import MODEL_TYPE
from kvlingo_mlx import families
from kvlingo_mlx.families.base import Finish
from kvlingo_mlx.families.latent import AbsorbedFamily
from kvlingo_mlx.format.geometry import RopeSpec


@dataclass
class ModelArgs(qwen3.ModelArgs):
    """Qwen3's settings and those of the latents."""

    kv_lora_ranks: Sequence[int] = ()  # width of each layer's latents
    qk_rope_head_dim: int = 0  # width of a rotary key
    # For each layer and each pair of the rotary key, the KV head and the pair of that head from
    # which it was taken, as ``head * head_dim / 2 + pair``
    rotary_slots: Sequence[Sequence[int]] = ()
    # Radians a position, for each pair of an original head
    rotary_frequencies: Sequence[float] = ()
    qk_norm: bool = True  # whether queries and keys are normed per head

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, half = self.num_hidden_layers, self.head_dim // 2
        most, pairs = self.num_key_value_heads * half, self.qk_rope_head_dim // 2
        wanted = {
            f"kv_lora_ranks of {layers} layers": len(self.kv_lora_ranks) == layers,
            f"rotary_frequencies of {half} pairs": len(self.rotary_frequencies) == half,
            f"rotary_slots of {layers} layers with {pairs} pairs each, from 0 to {most - 1}": (
                len(self.rotary_slots) == layers
                and all(len(slots) == pairs for slots in self.rotary_slots)
                and all(0 <= slot < most for slots in self.rotary_slots for slot in slots)
            ),
        }
        if lacking := [what for what, found in wanted.items() if not found]:
            raise ValueError(
                f"a {MODEL_TYPE} needs {'; '.join(lacking)} in its config.json; convert the model "
                "again by tools/convert_mla.py"
            )


class HeadRMSNorm(nn.Module):
    """A norm of each head with a weight per head: 0 where a number is in the rotary key instead."""

    def __init__(self, heads: int, dims: int) -> None:
        super().__init__()
        self.weight = mx.ones((heads, dims))


class ListedRoPE(nn.Module):
    """A rotation of halves whose frequencies are listed, (dims / 2,) radians a position."""

    def __init__(self, frequencies: Sequence[float]) -> None:
        super().__init__()
        self.dims = 2 * len(frequencies)
        self._periods = 1 / mx.array(list(frequencies))

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x,
            self.dims,
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._periods,
        )


class Attention(nn.Module):
    """Latent attention with one key and value per KV head, expanded from the cached latents."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        width, heads, dim = args.hidden_size, args.num_attention_heads, args.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, args.num_key_value_heads, dim
        self.kv_lora_rank = rank = args.kv_lora_ranks[layer]
        self.qk_rope_head_dim = rotary = args.qk_rope_head_dim
        self.scale = dim**-0.5
        self.eps = args.rms_norm_eps if args.qk_norm else None
        self.q_proj = nn.Linear(width, heads * (dim + rotary), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, rank + rotary, bias=False)
        self.k_b_proj = nn.Linear(rank, self.num_kv_heads * dim, bias=False)
        self.v_b_proj = nn.Linear(rank, self.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        self.q_norm = HeadRMSNorm(1, dim)
        self.k_norm = HeadRMSNorm(self.num_kv_heads, dim)
        slots = args.rotary_slots[layer]
        self.frequencies = [args.rotary_frequencies[slot % (dim // 2)] for slot in slots]
        self._slot_heads = mx.array([slot // (dim // 2) for slot in slots] * 2)
        self.rope = ListedRoPE(self.frequencies)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, tokens, _ = x.shape
        offset = 0 if cache is None else cache.offset
        latent, rotary, units = self.split(self.kv_a_proj_with_mqa(x))
        stored = self.stored(latent[:, None], self.rope(rotary[:, None], offset=offset), units)
        if cache is not None:
            stored = cache.update_and_fetch(*stored)
        queries = self.queries(self.q_proj(x), offset)
        if tokens == 1:
            output = self._step(queries, *stored, mask)
        else:
            keys, values = self.expanded(*stored)
            output = scaled_dot_product_attention(
                queries, keys, values, cache=cache, scale=self.scale, mask=mask
            ).transpose(0, 2, 1, 3)
        return self.o_proj(output.reshape(batch, tokens, -1))

    def split(self, projected: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
        """Latents (B, T, r), rotary keys (B, T, dr), normed and not rotated, and ``units``."""
        latent, rotary = mx.split(projected, [self.kv_lora_rank], axis=-1)
        units = self.units(latent)
        if units is not None:
            # A head's pairs were divided by the root mean square of the whole head, and still are.
            rotary = (rotary * units[..., self._slot_heads]).astype(rotary.dtype)
        return latent, rotary, units

    def units(self, latent: mx.array) -> mx.array | None:
        """What the norm multiplies each head of keys by (B, T, G), float32; None without norms."""
        return None if self.eps is None else self._unit(self._heads(self.k_b_proj(latent)))[..., 0]

    def stored(
        self, latent: mx.array, rotary: mx.array, units: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """What is cached: latents (B, 1, T, r); rotated keys with the units (B, 1, T, dr + 2 G).

        With the units at hand a step need not expand the latents. They follow from these, so they
        are never translated. A 16-bit cache has them in two parts, as one would be too coarse: it
        would change all of a head's scores in one direction.
        """
        if units is None:
            return latent, rotary
        first = units.astype(rotary.dtype)
        second = (units - first.astype(mx.float32)).astype(rotary.dtype)
        return latent, mx.concatenate([rotary, first[:, None], second[:, None]], axis=-1)

    def expanded(self, latent: mx.array, stored: mx.array) -> tuple[mx.array, mx.array]:
        """Keys (B, G, T, D + dr) and values (B, G, T, D) of each KV head from what is cached."""
        rotary, raw = stored[..., : self.qk_rope_head_dim], self._heads(self.k_b_proj(latent[:, 0]))
        plain = (raw * self._unit(raw) * self.k_norm.weight).astype(latent.dtype)
        plain = plain.transpose(0, 2, 1, 3)
        shared = mx.broadcast_to(rotary, (*plain.shape[:3], self.qk_rope_head_dim))
        values = self._heads(self.v_b_proj(latent[:, 0])).transpose(0, 2, 1, 3)
        return mx.concatenate([plain, shared], axis=-1), values

    def _step(self, queries: mx.array, latent: mx.array, stored: mx.array, mask: Any) -> mx.array:
        """The output (B, 1, H, D) for one token: queries go to the latents, not these to keys."""
        batch, groups, dim = len(queries), self.num_kv_heads, self.head_dim
        queries = queries.reshape(batch, groups, -1, queries.shape[-1])
        plain, turned = mx.split(queries, [dim], axis=-1)
        plain = (plain * self.k_norm.weight[:, None]).astype(latent.dtype)
        inward = by_head(self.k_b_proj, plain, groups, transpose=False)
        rotary, units = mx.split(stored.astype(mx.float32), [self.qk_rope_head_dim], axis=-1)
        scores = inward.astype(mx.float32) @ latent.astype(mx.float32).swapaxes(-1, -2)
        if self.eps is not None:
            parts = units.reshape(batch, -1, 2, groups).sum(axis=2)
            scores = scores * parts.swapaxes(-1, -2)[:, :, None]
        scores = (scores + turned.astype(mx.float32) @ rotary.swapaxes(-1, -2)) * self.scale
        if isinstance(mask, mx.array):
            least = mx.finfo(mx.float32).min
            scores = mx.where(mask, scores, least) if mask.dtype == mx.bool_ else scores + mask
        mixed = mx.softmax(scores, axis=-1).astype(latent.dtype) @ latent
        return by_head(self.v_b_proj, mixed, groups, transpose=True).reshape(batch, 1, -1, dim)

    def queries(self, projected: mx.array, offset: int) -> mx.array:
        """Queries (B, H, T, D + dr): the part without positions, then the rotated part."""
        heads = projected.reshape(*projected.shape[:2], self.num_heads, -1)
        plain, rotary = mx.split(heads, [self.head_dim], axis=-1)
        unit = self._unit(plain)
        plain = (plain * unit * self.q_norm.weight).astype(projected.dtype).transpose(0, 2, 1, 3)
        rotary = (rotary * unit).astype(projected.dtype).transpose(0, 2, 1, 3)
        return mx.concatenate([plain, self.rope(rotary, offset=offset)], axis=-1)

    def _heads(self, keys: mx.array) -> mx.array:
        return keys.reshape(*keys.shape[:2], self.num_kv_heads, self.head_dim)

    def _unit(self, heads: mx.array) -> mx.array:
        """What brings each head (..., D) to a root mean square of 1, (..., 1) in float32."""
        if self.eps is None:
            return mx.ones((*heads.shape[:-1], 1))
        squares = heads.astype(mx.float32).square()
        return mx.rsqrt(squares.mean(axis=-1, keepdims=True) + self.eps)


def by_head(module: nn.Module, x: mx.array, heads: int, *, transpose: bool) -> mx.array:
    """Apply a projection, float or quantised, head by head: (B, G, N, r) to (B, G, N, D).

    Without ``transpose`` it goes the other way: queries of keys become queries of latents.
    """

    def split(array: mx.array) -> mx.array:
        return array.reshape(heads, -1, array.shape[-1])

    weight = split(module.weight)
    if not isinstance(module, nn.QuantizedLinear):
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)
    biases = module.get("biases")
    return mx.quantized_matmul(
        x,
        weight,
        scales=split(module.scales),
        biases=None if biases is None else split(biases),
        transpose=transpose,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


class Model(qwen3.Model):
    """mlx-lm's Qwen3 with this attention; Llama's and Mistral's other parts are the same."""

    # Qwen3's way to share it among ranks does not fit.
    shard = None  # type: ignore[assignment]

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        for index, layer in enumerate(self.layers):
            layer.self_attn = Attention(args, index)


@dataclass(frozen=True)
class ConvertedMLA(AbsorbedFamily):
    """Latents without a norm of their own; ``keys`` are the chosen pairs, before rotation."""

    traditional: bool = False

    def states(
        self, attention: nn.Module, outputs: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """The rotary keys (B, T, dr), with their heads' norms, and the latents (B, T, r)."""
        latent, rotary, _ = attention.split(outputs[0])
        return rotary, latent

    def stored(
        self, attention: nn.Module, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The latents (B, 1, T, r); the rotary keys and what a step needs of the latents' norms."""
        return attention.stored(values, keys, attention.units(values[:, 0]))

    def finish(self, attention: nn.Module, facts: Mapping[str, Any]) -> Finish:
        """The rotation alone: heads are normed when latents are expanded."""
        return Finish(None, 0.0, attention.rope, self.rope(attention, facts))

    def rope(self, attention: nn.Module, facts: Mapping[str, Any]) -> RopeSpec:
        """The rotation of the chosen pairs, by their frequencies."""
        listed = (("frequencies", tuple(attention.frequencies)),)
        return RopeSpec("listed", float(facts["rope_theta"]), attention.rope.dims, scaling=listed)


families.register(ConvertedMLA(MODEL_TYPE))
# mlx-lm imports a model's file by this name.
sys.modules[f"{mlx_lm.models.__name__}.{MODEL_TYPE}"] = sys.modules[__name__]
