"""A linear translator applied to a whole prefix at once, straight into the target's cache.

For a GPU: maps of all layers lie stacked, so a product is one for many layers; k_norm, RoPE, cast
and the cache's layout are one kernel; nothing is allocated beside a small buffer. Without Triton
(:mod:`.kernels`) the same is done in plain PyTorch, which is also what the kernels are tested
against. Forward only; training translates layer by layer (:mod:`.translator`).

Legend: Ls source layers, L target layers, T tokens, Hs and H KV heads, Ds and D head widths.

    states in     (Ls, T, Hs * Ds), as projections write them, or (Ls, Hs, T, Ds), as caches do
    caches out    (L, H, capacity, D), written at positions start to start + T
    maps          (L, H, nu * Hs * Ds, D); head-wise (L, H, nu * Ds, D)

All layers of a model must be alike, as Qwen3's and Llama's are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvlingo_mlx.assignment import Layers
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.geometry import LayerGeometry
from kvlingo_mlx.training.families import POINTS, TorchFamily
from kvlingo_mlx.training.families.llama import Llama
from kvlingo_mlx.training.torch_model import TorchModel
from kvlingo_mlx.translator_config import SIDES, ModelSpec, TranslatorConfig, head_map_of

# torch: products, then the rest in plain PyTorch. products: the same, the rest one kernel.
# fused: everything one kernel a side.
METHODS = ("torch", "products", "fused")
MIN_WIDTH = 16  # of a product in Triton, whose outputs are a power of two besides


@dataclass(frozen=True)
class Cut:
    """How products are cut.

    Attributes:
        tokens: At most so many at a time, where products pass through a buffer: one that stays
            within a GPU's L2 cache is not written to memory and read again.
        layers: At most so many in one product.
        direct: Products that need nothing more are written where they belong, a head at a time;
            otherwise they pass through the buffer too.
    """

    tokens: int = 4096
    layers: int = 4
    direct: bool = True


@dataclass(frozen=True)
class Tile:
    """How the fused kernel is cut: tokens and inputs at a time, warps, stages of its pipeline."""

    tokens: int
    inputs: int
    warps: int
    stages: int


class Filled(DynamicLayer):
    """A layer of a transformers cache that grows within memory of its own, without copies."""

    def __init__(self, room: tuple[torch.Tensor, torch.Tensor], num_tokens: int) -> None:
        super().__init__()
        self.room = room
        self.dtype, self.device = room[0].dtype, room[0].device
        self.is_initialized = True
        self._show(num_tokens)

    def _show(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (array[:, :, :num_tokens] for array in self.room)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens after what is there; keys and values of all of them."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        return self._show(end)


@dataclass(frozen=True)
class Memory:
    """Room for a target's keys and values, (L, H, capacity, D) each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> Memory:
        """For ``capacity`` tokens; what is in it is not set."""
        geometry = alike(spec)
        return cls(
            *(
                torch.empty(
                    (len(spec.layers), geometry.kv_heads, capacity, geometry.head_dim(side)),
                    dtype=dtype, device=device,
                )
                for side in SIDES
            )
        )  # fmt: skip

    def cache(self, num_tokens: int) -> Cache:
        """A cache to decode from, which holds the first ``num_tokens`` of this and grows in it."""
        rooms = zip(self.keys[:, None], self.values[:, None], strict=True)
        return Cache(layers=[Filled(room, num_tokens) for room in rooms])


@dataclass(frozen=True)
class Maps:
    """One side's maps, stacked.

    Attributes:
        weight: (L, H, nu * inputs, D), see the module's legend; keys that are yet to be rotated
            are in pairs (:func:`in_pairs`).
        bias: (L, H, D), laid out alike, or None.
        width: Ds, of a source's head.
        layers: The source layers that each target layer reads.
        sources: The same, (L, nu), int32.
        heads: The source head that each target head reads; None for maps that mix heads.
        heads_there: The same, int32.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    width: int
    layers: Layers
    sources: torch.Tensor
    heads: tuple[int, ...] | None
    heads_there: torch.Tensor | None

    def check(self, states: torch.Tensor, out: torch.Tensor) -> None:
        """Refuse (ValueError) arrays that a kernel would read or write beyond their ends."""
        layers, heads, tokens, width = states.shape
        target, count, inputs, dim = self.weight.shape
        enough = heads * width * len(self.layers[0]) == inputs
        if self.heads is not None:
            enough = max(self.heads) < heads
        fits = (
            enough
            and width == self.width
            and max(map(max, self.layers)) < layers
            and tuple(out.shape) == (target, count, tokens, dim)
            and states.dtype == out.dtype == self.weight.dtype
            and states.stride(-1) == out.stride(-1) == 1
        )
        if not fits:
            raise ValueError(
                f"states {tuple(states.shape)} ({states.dtype}) and a cache {tuple(out.shape)} "
                f"({out.dtype}) do not fit this translator"
            )

    def runs(self, most: int) -> Iterator[Run]:
        """The target layers, cut where the source layers that they read cease to be strided."""
        first = 0
        while first < len(self.layers):
            end, steps = first + 1, (0,) * len(self.layers[first])
            while end < min(first + most, len(self.layers)):
                pairs = zip(self.layers[end - 1], self.layers[end], strict=True)
                found = tuple(after - before for before, after in pairs)
                if min(found) < 0 or (end > first + 1 and found != steps):
                    break
                steps, end = found, end + 1
            yield Run(first, end, self.layers[first], steps)
            first = end


@dataclass(frozen=True)
class Run:
    """Target layers ``first`` to ``end``, and the strided source layers that they read."""

    first: int
    end: int
    starts: tuple[int, ...]
    steps: tuple[int, ...]

    def read(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Views (G, Hs, T, Ds) of states, one for each layer that a target layer reads."""
        count, found = self.end - self.first, []
        for start, step in zip(self.starts, self.steps, strict=True):
            if step:
                found.append(states[start : start + step * (count - 1) + 1 : step])
            else:
                found.append(states[start : start + 1].expand(count, -1, -1, -1))
        return found


@dataclass(frozen=True)
class Finish:
    """What is done to translated keys: k_norm and RoPE, whichever there are.

    Attributes:
        norm: (L, D), float32 at least, in pairs; None where the capture point is after it.
        eps: Of the norm.
        cos: (positions, D / 2), float32 at least.
        sin: The same.
    """

    norm: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class FastTranslation:
    """A linear translator laid out for whole prefixes; see the module's legend.

    Attributes:
        keys: Maps of the keys.
        values: Maps of the values.
        finish: What becomes of translated keys; None where they are captured after RoPE.
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
    ) -> FastTranslation:
        """Lay out a translator's tensors (by the format's names) on the target's device.

        Args:
            config: Its facts.
            tensors: Its weights, and biases where it has them.
            target: Whose norms and rotation its keys get.
            positions: Tokens that the longest prefix has; cosines are worked out once.
            dtype: Of states, maps and caches; default the target's.

        Raises:
            UnsupportedModelError: The layers of one of the models differ, or its family does
                something else to its keys.
            ValueError: The translator is not linear, or joint.
        """
        if config.kind != "linear" or config.joint:
            raise ValueError(f"only linear maps a side can be stacked; this is {config.form}")
        if config.alignment is not None:
            raise ValueError(
                "a whole prefix has one entry a token; this translator is between two tokenizers "
                f"({config.alignment})"
            )
        if type(target.family) not in (TorchFamily, Llama):
            raise UnsupportedModelError(
                f"{target.name} ({target.geometry.model_type}) finishes its keys in a way of its "
                "own; translate layer by layer"
            )
        for spec in (config.source, config.target):
            alike(spec)
        if len(set(target.geometry.rope)) > 1:
            raise UnsupportedModelError(f"{target.name} has more than one rotation")
        dtype = dtype or target.dtype
        exact = torch.promote_types(dtype, torch.float32)
        finish = None
        if config.capture != "post_rope":
            finish = _finish_of(target, config.capture, positions, exact)
        keys, values = (
            _maps(config, side, tensors, target.device, dtype, finish) for side in SIDES
        )
        return cls(keys, values, finish)

    @property
    def methods(self) -> tuple[str, ...]:
        """Those of ``METHODS`` that there are for these shapes on this device."""
        fit = all(
            dim >= MIN_WIDTH and dim & (dim - 1) == 0 and maps.width % MIN_WIDTH == 0
            for maps in (self.keys, self.values)
            for dim in maps.weight.shape[-1:]
        )
        weight = self.keys.weight
        fit = fit and weight.dtype != torch.float64  # kernels count in float32
        on_gpu = weight.device.type == "cuda" and find_spec("triton") is not None
        return METHODS if fit and on_gpu else METHODS[:1]

    @property
    def nbytes(self) -> int:
        """Bytes that maps and tables take."""
        tables = () if self.finish is None else (self.finish.cos, self.finish.sin, self.finish.norm)
        arrays = (self.keys.weight, self.keys.bias, self.values.weight, self.values.bias, *tables)
        return sum(a.numel() * a.element_size() for a in arrays if a is not None)

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the products, as ``translator_config.flops_of`` counts."""
        return 2 * (self.keys.weight.numel() + self.values.weight.numel())

    @torch.no_grad()
    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        memory: Memory,
        start: int = 0,
        *,
        method: str | None = None,
        cut: Cut | None = None,
        tile: Tile | None = None,
    ) -> None:
        """Translate a span that begins at position ``start`` into ``memory``.

        Args:
            keys: The source's, at the translator's capture point; (Ls, T, Hs * Ds) or
                (Ls, Hs, T, Ds). Head-mixing products copy the latter, chunk by chunk.
            values: The same.
            memory: Where to write; the rest of it is left alone.
            start: Position of the first token.
            method: One of :attr:`methods`; by default the last of them, but products where maps
                mix heads.
            cut: How products are cut.
            tile: How the fused kernel is.

        Raises:
            ValueError: The span or the arrays do not fit, or the device has no such method.
        """
        there = self.methods
        if method is None:
            mixing = self.keys.heads is None
            method = "products" if mixing and "products" in there else there[-1]
        if method not in there:
            raise ValueError(f"method is {method!r}; here it must be one of {', '.join(there)}")
        end = start + keys.shape[-2]
        positions = end if self.finish is None else len(self.finish.cos)
        if start < 0 or end > min(memory.keys.shape[2], positions):
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
            span = out[:, :, start:end]
            maps.check(states, span)
            if method == "fused":
                _fused(maps, states, span, finish, start, tile)
            else:
                _products(maps, states, span, finish, start, method, cut or Cut())


def alike(spec: ModelSpec) -> LayerGeometry:
    """The shape that all layers of a model share.

    Raises:
        UnsupportedModelError: They do not.
    """
    shapes = {(g.kv_heads, g.key_dim, g.value_dim, g.attention, g.window) for g in spec.layers}
    if len(shapes) > 1 or spec.layers[0].attention != "full":
        raise UnsupportedModelError(
            f"the layers of {spec.name} differ or keep windows or latents; translate layer by layer"
        )
    return spec.layers[0]


def in_pairs(array: torch.Tensor) -> torch.Tensor:
    """The last axis of (..., D) reordered: what RoPE turns together side by side."""
    return array.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


# ---- layout --------------------------------------------------------------------------------


def _finish_of(target: TorchModel, capture: str, positions: int, exact: torch.dtype) -> Finish:
    attentions, norm, eps = target.attentions, None, 0.0
    if capture == POINTS[0] and hasattr(attentions[0], "k_norm"):
        weights = [attention.k_norm.weight.to(exact) for attention in attentions]
        norm, eps = in_pairs(torch.stack(weights)), attentions[0].k_norm.variance_epsilon
    places = torch.arange(positions, device=target.device)[None]
    like = torch.empty(0, dtype=exact, device=target.device)
    with torch.no_grad():
        both = target.family.cosines(target.model, attentions[0], like, places)
    cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in both)
    if 2 * cos.shape[-1] != target.geometry.layers[0].key_dim:
        raise UnsupportedModelError(f"{target.name} rotates a part of each key only")
    return Finish(norm, eps, cos, sin)


def _maps(
    config: TranslatorConfig,
    side: str,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    finish: Finish | None,
) -> Maps:
    geometry = config.target.layers[0]
    heads = None if config.head_mixing else head_map_of(config)
    count, dim = geometry.kv_heads, geometry.head_dim(side)
    paired = side == "keys" and finish is not None
    weights, biases = [], []
    for layer in range(len(config.target.layers)):
        weight = tensors[f"{side}.{layer}.weight"].detach().to(device)
        # As stored: (H * D, inputs), or (H, D, inputs). Mixing maps keep all outputs of an input
        # side by side, (inputs, H, D), so that they can be one product.
        weight = weight.T.unflatten(-1, (count, dim)) if heads is None else weight.mT
        weights.append((in_pairs(weight) if paired else weight).to(dtype))
        bias = tensors.get(f"{side}.{layer}.bias")
        if bias is not None:
            bias = bias.detach().to(device).view(count, dim)
            biases.append((in_pairs(bias) if paired else bias).to(dtype))
    stacked = torch.stack(weights).contiguous()
    layers = config.assignment.side(side)
    there: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return Maps(
        weight=stacked if heads is not None else stacked.transpose(1, 2),
        bias=torch.stack(biases) if biases else None,
        width=config.source.layers[0].head_dim(side),
        layers=layers,
        sources=torch.tensor(layers, **there),
        heads=heads,
        heads_there=None if heads is None else torch.tensor(heads, **there),
    )


# ---- translation ---------------------------------------------------------------------------


def _fused(
    maps: Maps,
    states: torch.Tensor,
    out: torch.Tensor,
    finish: Finish | None,
    start: int,
    tile: Tile | None,
) -> None:
    from kvlingo_mlx.training import kernels  # needs Triton

    tokens = out.shape[2]
    norm, eps, table = None, 0.0, None
    if finish is not None:
        norm, eps, table = finish.norm, finish.eps, _table(finish, start, tokens)
    kernels.translate(out, states, maps.weight, maps.bias, maps.sources, maps.heads_there,
                      norm, eps, table, tile)  # fmt: skip


def _products(
    maps: Maps,
    states: torch.Tensor,
    out: torch.Tensor,
    finish: Finish | None,
    start: int,
    method: str,
    cut: Cut,
) -> None:
    _, heads, tokens, dim = out.shape
    direct = finish is None and cut.direct
    runs = list(maps.runs(cut.layers))
    # Strided products need no buffer; heads that lie apart are copied side by side for mixing ones.
    strided = maps.heads is not None or states.stride(1) == states.shape[3]
    step = tokens if direct and strided else min(cut.tokens, tokens)
    most = 0 if direct else max(run.end - run.first for run in runs) * step
    buffer = out.new_empty(most * heads * dim)
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        for run in runs:
            read = [array[:, :, begin:end] for array in run.read(states)]
            to, layers = out[run.first : run.end, :, begin:end], slice(run.first, run.end)
            if direct:
                _multiply(maps, layers, read, to)
                continue
            shape = (len(to), end - begin, heads, dim)
            product = buffer[: to.numel()].view(shape)
            _multiply(maps, layers, read, product.transpose(1, 2))
            if finish is None:
                to.copy_(product.transpose(1, 2))
                continue
            norm = None if finish.norm is None else finish.norm[layers]
            table = _table(finish, start + begin, end - begin)
            if method == "torch":
                finish_plainly(to, product, norm, finish.eps, table)
            else:
                from kvlingo_mlx.training import kernels  # needs Triton

                kernels.finish(to, product.flatten(2), norm, finish.eps, table)


def _multiply(maps: Maps, layers: slice, read: list[torch.Tensor], out: torch.Tensor) -> None:
    """The products of some layers, of (G, Hs, T, Ds) each, into (G, H, T, D) of any strides.

    Several source layers are summed in ``out``, rounded as it is.
    """
    weight = maps.weight[layers]
    if maps.bias is not None:
        out.copy_(maps.bias[layers][:, :, None])
    inputs = weight.shape[2] // len(read)
    for nth, states in enumerate(read):
        maps_of_it = weight[:, :, nth * inputs : (nth + 1) * inputs]
        add = bool(nth) or maps.bias is not None
        if maps.heads is not None:  # a head of all layers at a time: strided states need no copy
            for head, source in enumerate(maps.heads):
                _product(out[:, head], states[:, source], maps_of_it[:, head], add)
            continue
        wide = states.transpose(1, 2).flatten(2)  # (G, T, Hs * Ds), a view of token-major states
        whole = out.transpose(1, 2)
        if whole.is_contiguous():
            _product(whole.flatten(2), wide, maps_of_it.transpose(1, 2).flatten(2), add)
            continue
        for to, x, w in zip(out, wide, maps_of_it, strict=True):  # a layer's heads at a time
            _product(to, x.expand(len(to), -1, -1), w, add)


def _product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, add: bool) -> None:
    if add:
        out.baddbmm_(x, weight)
    else:
        torch.bmm(x, weight, out=out)


def _table(finish: Finish, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return finish.cos[start : start + tokens], finish.sin[start : start + tokens]


def finish_plainly(
    out: torch.Tensor,
    product: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    table: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """k_norm, RoPE, cast and layout of keys in pairs, (G, T, H, D), into (G, H, T, D)."""
    keys = product.to(table[0].dtype)
    if norm is not None:
        keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + eps)
        keys = keys * norm[:, None, None]
    first, second = keys.unflatten(-1, (-1, 2)).transpose(1, 2).unbind(-1)
    cos, sin = table
    half = cos.shape[-1]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
