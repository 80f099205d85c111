"""A linear translator applied to a whole prefix at once, straight into the target's cache.

It is made for a GPU. The maps of all layers are stacked, so one product serves many layers. One
kernel does k_norm, RoPE, cast and the cache's layout. Only a small buffer is allocated. Without
Triton (:mod:`.kernels`) plain PyTorch does the same; the kernels are tested against it. It is
forward only; training translates layer by layer (``training.translator``).

Legend: Ls source layers, L target layers, T tokens, Hs and H KV heads, Ds and D head widths.

    states in     (Ls, T, Hs * Ds), as projections write them, or (Ls, Hs, T, Ds), as caches do
    caches out    (L, H, capacity, D), written at positions start to start + T
    maps          (L, H, nu * Hs * Ds, D); head-wise (L, H, nu * Ds, D)

All layers that it translates have the same shape, as in Qwen3 and Llama; :mod:`.grouped` takes a
model with windows apart into such groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvlingo_mlx.cuda.families import TorchFamily
from kvlingo_mlx.cuda.families.gemma3 import Gemma3
from kvlingo_mlx.cuda.families.llama import Llama
from kvlingo_mlx.cuda.finish import Finish, finish_of
from kvlingo_mlx.cuda.maps import Cut, Maps, stacked_maps
from kvlingo_mlx.cuda.memory import Memory, alike, one_width
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.cuda.products import MAX_WIDTH, MIN_WIDTH, fused, products
from kvlingo_mlx.cuda.tile import Tile
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.translator_config import TranslatorConfig

# "torch": products, then the rest in plain PyTorch. "products": products, then one kernel for the
# rest. "fused": one kernel per side for everything.
METHODS = ("torch", "products", "fused")


@dataclass(frozen=True)
class FastTranslation:
    """A linear translator laid out for whole prefixes; see the module's legend.

    Attributes:
        keys: The maps of the keys.
        values: The maps of the values.
        finish: The k_norm and RoPE of translated keys; None if they are captured after RoPE.
    """

    keys: Maps
    values: Maps
    finish: Finish | None

    @classmethod
    def build(
        cls,
        config: TranslatorConfig,
        tensors: Mapping[str, torch.Tensor],
        target: TorchModel,
        positions: int,
        dtype: torch.dtype | None = None,
        layers: Sequence[int] | None = None,
    ) -> FastTranslation:
        """Lay out a translator's tensors (by the format's names) on the target's device.

        Args:
            config: The translator's config.
            tensors: Its weights, and its biases if it has any.
            target: The model whose norms and rotation the keys get.
            positions: The tokens of the longest prefix; cosines are computed once for all of them.
            dtype: The dtype of states, maps and caches; default the target's.
            layers: The target's layers that are translated, alike in shape and rotation; default
                all, of which none may keep a window then (:mod:`.grouped` serves those).

        Raises:
            UnsupportedModelError: The layers of one of the models differ, or its family processes
                keys in another way.
            ValueError: The translator is not linear, or it is joint.
        """
        if not config.spec.folds or config.joint:
            raise ValueError(f"only linear maps a side can be stacked; this is {config.form}")
        if config.alignment is not None:
            raise ValueError(
                "a whole prefix has one entry a token; this translator is between two tokenizers "
                f"({config.alignment})"
            )
        if type(target.family) not in (TorchFamily, Llama, Gemma3):
            raise UnsupportedModelError(
                f"{target.name} ({target.geometry.model_type}) finishes its keys in a way of its "
                "own; translate layer by layer"
            )
        one_width(config.source)
        alike(config.target, layers)
        layers = range(len(config.target.layers)) if layers is None else layers
        if len({target.geometry.rope[layer] for layer in layers}) > 1:
            raise UnsupportedModelError(f"{target.name} has more than one rotation")
        dtype = dtype or target.dtype
        exact = torch.promote_types(dtype, torch.float32)
        finish = None
        if config.capture != "post_rope":
            finish = finish_of(target, config.capture, positions, exact, layers)
        keys, values = (
            stacked_maps(config, side, tensors, target.device, dtype, finish, layers)
            for side in SIDES
        )
        return cls(keys, values, finish)

    @property
    def methods(self) -> tuple[str, ...]:
        """The ``METHODS`` that are available for these shapes on this device."""
        fit = all(
            dim >= MIN_WIDTH and dim & (dim - 1) == 0 and maps.width % MIN_WIDTH == 0
            for maps in (self.keys, self.values)
            for dim in maps.weight.shape[-1:]
        )
        weight = self.keys.weight
        fit = fit and weight.dtype != torch.float64  # kernels accumulate in float32
        narrow = max(weight.shape[-1], self.values.weight.shape[-1]) <= MAX_WIDTH
        on_gpu = weight.device.type == "cuda" and find_spec("triton") is not None
        if not (fit and on_gpu):
            return METHODS[:1]
        return METHODS if narrow else METHODS[:2]

    @property
    def nbytes(self) -> int:
        """The bytes of maps and tables."""
        tables = () if self.finish is None else (self.finish.cos, self.finish.sin, self.finish.norm)
        arrays = (self.keys.weight, self.keys.bias, self.values.weight, self.values.bias, *tables)
        return sum(a.numel() * a.element_size() for a in arrays if a is not None)

    @property
    def flops_per_token(self) -> int:
        """The products' floating-point operations, counted as in ``format.maps.flops_of``."""
        return 2 * (self.keys.weight.numel() + self.values.weight.numel())

    @torch.no_grad()
    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        memory: Memory,
        start: int = 0,
        *,
        at: int | None = None,
        method: str | None = None,
        cut: Cut | None = None,
        tile: Tile | None = None,
    ) -> None:
        """Translate a span that begins at position ``start`` into ``memory``.

        Args:
            keys: The source's keys at the translator's capture point; (Ls, T, Hs * Ds) or (Ls, Hs,
                T, Ds). Head-mixing products copy the latter, chunk by chunk.
            values: The source's values, in the same layout.
            memory: The memory to write to; only the span is changed.
            start: The position of the first token.
            at: The first token's place in the memory; default ``start``. A window's memory holds
                the last tokens alone.
            method: One of :attr:`methods`; by default the last of them, but "products" if maps mix
                heads.
            cut: How products are cut.
            tile: How the fused kernel is cut.

        Raises:
            ValueError: The span or the arrays do not fit, or the device lacks the method.
        """
        there = self.methods
        if method is None:
            mixing = self.keys.heads is None
            method = "products" if mixing and "products" in there else there[-1]
        if method not in there:
            raise ValueError(f"method is {method!r}; here it must be one of {', '.join(there)}")
        at, end = start if at is None else at, start + keys.shape[-2]
        last = at + keys.shape[-2]
        positions = end if self.finish is None else len(self.finish.cos)
        if min(start, at) < 0 or last > memory.keys.shape[2] or end > positions:
            raise ValueError(
                f"positions {start} to {end} are asked for; there is room for "
                f"{memory.keys.shape[2]} and cosines for {positions}"
            )
        work = (
            (self.keys, keys, memory.keys, self.finish),
            (self.values, values, memory.values, None),
        )
        for maps, states, out, finish in work:
            if states.ndim == 3:
                states = states.unflatten(-1, (-1, maps.width)).transpose(1, 2)
            span = out[:, :, at:last]
            maps.check(states, span)
            if method == "fused":
                fused(maps, states, span, finish, start, tile)
            else:
                products(maps, states, span, finish, start, method, cut or Cut())
