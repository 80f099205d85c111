"""A linear translator applied to a whole prefix at once, straight into the target's cache.

The maps of all like layers are stacked: one Triton kernel a side (:mod:`.kernels`) does the
products, k_norm, RoPE, the cast and the cache's layout. Where that kernel cannot run, plain PyTorch
does the same layer by layer; the kernel is tested against it. It is forward only, made to be timed.

Legend: Ls source layers, L like target layers, T tokens, Hs and H KV heads, Ds and D head widths.

    states in     (Ls, T, Hs * Ds), as projections write them, or (Ls, Hs, T, Ds), as caches do
    cache out     (L, H, capacity, D)
    maps          (L, H, nu * Hs * Ds, D); head-wise (L, H, nu * Ds, D)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvlingo_mlx.cuda.families import POINTS
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.format.assignment import Layers
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import head_map_of
from kvlingo_mlx.format.translator_config import TranslatorConfig

METHODS = ("torch", "fused")
# The kernel's widths of a head: Triton multiplies by powers of two from 16 on, and the pipeline of
# a wider head's outputs exceeds a block's shared memory.
WIDTHS = (16, 32, 64, 128)


# ---- the cache ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LikeLayers:
    """Target layers of one shape, rotation and window (None: they see every token)."""

    layers: tuple[int, ...]
    window: int | None

    def kept(self, num_tokens: int) -> int:
        """How many of ``num_tokens`` tokens a layer holds: the next one sees itself too."""
        return num_tokens if self.window is None else min(num_tokens, self.window - 1)


def like_layers(target: TorchModel) -> tuple[LikeLayers, ...]:
    """A target's layers in groups; a model without windows, such as Qwen3, is one."""
    found: dict[Any, list[int]] = {}
    for index, layer in enumerate(target.geometry.layers):
        shape = (layer.kv_heads, layer.key_dim, layer.value_dim, layer.window)
        found.setdefault((shape, target.geometry.rope[index]), []).append(index)
    windows = [target.geometry.layers[layers[0]].window for layers in found.values()]
    return tuple(LikeLayers(tuple(n), w) for n, w in zip(found.values(), windows, strict=True))


def key_norm(attention: Any) -> tuple[torch.Tensor, float]:
    """What a key is multiplied by after it was divided by its root mean square, and epsilon."""
    norm = attention.k_norm
    if type(norm).__name__ == "Gemma3RMSNorm":  # it stores what is added to one
        return 1 + norm.weight.float(), norm.eps
    return norm.weight, norm.variance_epsilon


class PreallocatedLayer(DynamicLayer):
    """A layer of a transformers cache that grows within preallocated memory, without copies."""

    def __init__(self, room: Sequence[torch.Tensor], num_tokens: int) -> None:
        super().__init__()
        self.room, self.is_initialized = room, True
        self.dtype, self.device = room[0].dtype, room[0].device
        self._show(num_tokens)

    def _show(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (array[:, :, :num_tokens] for array in self.room)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens after the existing ones; returns the keys and values of all tokens."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        return self._show(end)


def _windowed(room: Sequence[torch.Tensor], like: LikeLayers, num_tokens: int) -> Any:
    """A layer of a transformers cache with a window, filled with its last tokens."""
    layer: Any = DynamicSlidingWindowLayer(like.window or 0)
    layer.keys, layer.values = (array[:, :, : like.kept(num_tokens)] for array in room)
    layer.dtype, layer.device = room[0].dtype, room[0].device
    layer.is_initialized, layer.cumulative_length = True, num_tokens
    return layer


@dataclass(frozen=True)
class CacheMemory:
    """Preallocated keys and values (L, H, capacity, D) of each group of a target's layers."""

    groups: tuple[LikeLayers, ...]
    arrays: tuple[tuple[torch.Tensor, ...], ...]

    @classmethod
    def allocate(
        cls, target: TorchModel, num_tokens: int, dtype: torch.dtype, room: int = 1
    ) -> CacheMemory:
        """Uninitialised memory for ``num_tokens`` tokens, and ``room`` more without a window."""
        groups, arrays = like_layers(target), []
        for like in groups:
            shape, capacity = target.geometry.layers[like.layers[0]], like.kept(num_tokens)
            capacity += room if like.window is None else 0
            sizes = [(len(like.layers), shape.kv_heads, capacity, shape.head_dim(s)) for s in SIDES]
            arrays.append(tuple(torch.empty(s, dtype=dtype, device=target.device) for s in sizes))
        return cls(groups, tuple(arrays))

    @property
    def nbytes(self) -> int:
        return nbytes(*(array for sides in self.arrays for array in sides))

    def rooms(self) -> list[tuple[LikeLayers, list[torch.Tensor]]]:
        """Each target layer's group, and its keys and values (1, H, capacity, D)."""
        found: dict[int, Any] = {}
        for like, sides in zip(self.groups, self.arrays, strict=True):
            for nth, layer in enumerate(like.layers):
                found[layer] = like, [array[nth : nth + 1] for array in sides]
        return [found[layer] for layer in sorted(found)]

    def cache(self, num_tokens: int) -> Cache:
        """A transformers cache of the first ``num_tokens`` tokens, without a copy."""
        layers = [
            PreallocatedLayer(room, num_tokens)
            if like.window is None
            else _windowed(room, like, num_tokens)
            for like, room in self.rooms()
        ]
        return Cache(layers=layers)


def nbytes(*arrays: torch.Tensor) -> int:
    return sum(array.numel() * array.element_size() for array in arrays)


# ---- the maps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormAndRope:
    """The k_norm and RoPE that translated keys still need, in float32 or wider.

    Keys and norms come *in pairs*: the two numbers of a head that RoPE rotates together, D / 2
    apart in a cache, are adjacent (:func:`in_pairs`).
    """

    norm: torch.Tensor | None  # (L, D); None where keys are captured after it
    eps: float
    cos: torch.Tensor  # (positions, D / 2)
    sin: torch.Tensor

    @classmethod
    def of(
        cls, target: TorchModel, capture: str, positions: int, exact: torch.dtype, like: LikeLayers
    ) -> NormAndRope:
        """What the keys of like layers need after a capture point."""
        attentions, norm, eps = [target.attentions[layer] for layer in like.layers], None, 0.0
        if capture == POINTS[0] and hasattr(attentions[0], "k_norm"):
            norms = list(map(key_norm, attentions))
            norm, eps = in_pairs(torch.stack([w.to(exact) for w, _ in norms])), norms[0][1]
        places = torch.arange(positions, device=target.device)[None]
        empty = torch.empty(0, dtype=exact, device=target.device)
        both = target.family.cosines(target.model, attentions[0], empty, places)
        cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in both)
        return cls(norm, eps, cos, sin)

    def table(self, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[start : start + tokens], self.sin[start : start + tokens]

    def __call__(self, keys: torch.Tensor, layer: int, start: int) -> torch.Tensor:
        """Keys (H, T, D) in pairs, from position ``start`` on, as a cache holds them."""
        keys = keys.to(self.cos.dtype)
        if self.norm is not None:
            keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + self.eps)
            keys = keys * self.norm[layer]
        cos, sin = self.table(start, keys.shape[1])
        first, second = keys.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def in_pairs(array: torch.Tensor) -> torch.Tensor:
    """The last axis of (..., D) reordered: numbers that RoPE rotates together are adjacent."""
    return array.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@dataclass(frozen=True)
class StackedMaps:
    """The maps of one side of like layers."""

    weight: torch.Tensor  # as in the module's legend; keys that get a rotation are in pairs
    layers: Layers  # the source layers that each target layer reads
    heads: tuple[int, ...] | None  # the source head that each target head reads; None: all heads
    finish: NormAndRope | None
    width: int  # Ds
    on_device: tuple[torch.Tensor, torch.Tensor | None]  # ``layers`` and ``heads``, int32

    @classmethod
    def build(
        cls,
        config: TranslatorConfig,
        side: str,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        finish: NormAndRope | None,
        like: LikeLayers,
    ) -> StackedMaps:
        """Stack a translator's tensors, which have the format's names."""
        shape, weights = config.target.layers[like.layers[0]], []
        heads = None if config.head_mixing else head_map_of(config)
        split = (shape.kv_heads, shape.head_dim(side))
        for layer in like.layers:
            weight = tensors[f"{side}.{layer}.weight"]
            # Stored as (H * D, inputs), or (H, D, inputs). Mixing maps keep all outputs of an input
            # adjacent, (inputs, H, D), so that they can be one product.
            weight = weight.T.unflatten(-1, split) if heads is None else weight.mT
            weights.append((weight if finish is None else in_pairs(weight)).to(dtype))
        stacked = torch.stack(weights).contiguous()
        stacked = stacked.transpose(1, 2) if heads is None else stacked
        read = tuple(config.assignment.side(side)[layer] for layer in like.layers)
        there: dict[str, Any] = {"dtype": torch.int32, "device": stacked.device}
        given = None if heads is None else torch.tensor(heads, **there)
        width = config.source.layers[0].head_dim(side)
        return cls(stacked, read, heads, finish, width, (torch.tensor(read, **there), given))

    def check(self, states: torch.Tensor, out: torch.Tensor) -> None:
        """Refuse (ValueError) arrays that a kernel would read or write beyond their ends."""
        layers, heads, tokens, width = states.shape
        count, target_heads, inputs, dim = self.weight.shape
        read = heads if self.heads is None else 1
        fits = (
            width == self.width
            and read * width * len(self.layers[0]) == inputs
            and max(self.heads or (0,)) < heads
            and max(map(max, self.layers)) < layers
            and tuple(out.shape) == (count, target_heads, tokens, dim)
            and states.dtype == out.dtype == self.weight.dtype
            and states.stride(-1) == out.stride(-1) == 1
        )
        if not fits:
            raise ValueError(
                f"states {tuple(states.shape)} ({states.dtype}) and a cache {tuple(out.shape)} "
                f"({out.dtype}) do not fit this translator"
            )

    def plain(self, states: torch.Tensor, out: torch.Tensor, start: int) -> None:
        """Translate (Ls, Hs, T, Ds) into (L, H, T, D) layer by layer."""
        for layer, read in enumerate(self.layers):
            weight = self.weight[layer]
            if self.heads is None:
                given = torch.cat([states[s].transpose(0, 1).flatten(1) for s in read], dim=-1)
                product = given @ weight.transpose(0, 1).flatten(1)
                product = product.unflatten(-1, (len(weight), -1)).transpose(0, 1)
            else:
                product = torch.cat([states[s][list(self.heads)] for s in read], dim=-1) @ weight
            out[layer] = product if self.finish is None else self.finish(product, layer, start)

    def fused(self, states: torch.Tensor, out: torch.Tensor, start: int) -> None:
        """The same by one kernel."""
        from benchmarks.paper.gpu import kernels  # needs Triton

        finish = None
        if self.finish is not None:
            finish = self.finish.norm, self.finish.eps, *self.finish.table(start, out.shape[2])
        kernels.translate(out, states, self.weight, *self.on_device, finish)


@dataclass(frozen=True)
class PrefixTranslation:
    """A linear translator laid out for whole prefixes: for each group the maps of both sides."""

    groups: tuple[LikeLayers, ...]
    maps: tuple[tuple[StackedMaps, ...], ...]

    @classmethod
    @torch.no_grad()
    def build(
        cls,
        config: TranslatorConfig,
        tensors: Mapping[str, torch.Tensor],
        target: TorchModel,
        positions: int,
        dtype: torch.dtype | None = None,
    ) -> PrefixTranslation:
        """Lay out a linear translator without biases, between models of one tokenizer.

        Args:
            config: The translator's config.
            tensors: Its weights by the format's names, on the target's device.
            target: The model whose norms and rotation the keys get.
            positions: The tokens of the longest prefix.
            dtype: The dtype of states, maps and caches; default the target's.
        """
        groups, dtype = like_layers(target), dtype or target.dtype
        exact, maps = torch.promote_types(dtype, torch.float32), []
        for like in groups:
            finish = None
            if config.capture != "post_rope":
                finish = NormAndRope.of(target, config.capture, positions, exact, like)
            both = zip(SIDES, (finish, None), strict=True)
            maps.append(
                tuple(StackedMaps.build(config, s, tensors, dtype, f, like) for s, f in both)
            )
        return cls(groups, tuple(maps))

    @property
    def methods(self) -> tuple[str, ...]:
        """The ``METHODS`` that are available for these shapes on this device."""
        weights = [m.weight for sides in self.maps for m in sides]
        widths = {n for sides in self.maps for m in sides for n in (m.weight.shape[-1], m.width)}
        fit = all(w.shape[-1] in WIDTHS and w.dtype != torch.float64 for w in weights)
        fit = fit and all(n % WIDTHS[0] == 0 for n in widths)
        there = weights[0].device.type == "cuda" and find_spec("triton") is not None
        return METHODS if fit and there else METHODS[:1]

    @property
    def nbytes(self) -> int:
        """The bytes of maps and tables."""
        finishes = [m.finish for sides in self.maps for m in sides if m.finish is not None]
        tables = [t for f in finishes for t in (f.cos, f.sin, f.norm) if t is not None]
        return nbytes(*(m.weight for sides in self.maps for m in sides), *tables)

    def flops(self, num_tokens: int) -> int:
        """The products' floating-point operations, counted as in ``format.maps.flops_of``."""
        both = zip(self.groups, self.maps, strict=True)
        return sum(
            2 * like.kept(num_tokens) * m.weight.numel() for like, maps in both for m in maps
        )

    @torch.no_grad()
    def __call__(
        self,
        states: Sequence[torch.Tensor],
        memory: CacheMemory,
        start: int = 0,
        method: str | None = None,
    ) -> None:
        """Translate a whole prefix into the beginning of ``memory``.

        Args:
            states: The source's keys at the translator's capture point, and its values, of every
                token; layouts as in the module's legend.
            memory: Memory for as many tokens; windows get the last of them.
            start: The position of the first token.
            method: One of :attr:`methods`; by default the last of them, which is the fastest.

        Raises:
            ValueError: The arrays do not fit, or the device lacks the method.
        """
        method = method or self.methods[-1]
        if method not in self.methods:
            there = ", ".join(self.methods)
            raise ValueError(f"method is {method!r}; here it must be one of {there}")
        tokens = states[0].shape[-2]
        for like, maps, arrays in zip(self.groups, self.maps, memory.arrays, strict=True):
            first = tokens - like.kept(tokens)
            for side, given, out in zip(maps, states, arrays, strict=True):
                if given.ndim == 3:
                    given = given.unflatten(-1, (-1, side.width)).transpose(1, 2)
                given, span = given[:, :, first:], out[:, :, : tokens - first]
                side.check(given, span)
                if side.finish is not None and start + tokens > len(side.finish.cos):
                    raise ValueError(
                        f"positions to {start + tokens}, but there are cosines for "
                        f"{len(side.finish.cos)}"
                    )
                work = side.fused if method == "fused" else side.plain
                work(given, span, start + first)
