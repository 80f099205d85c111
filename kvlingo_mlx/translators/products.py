"""Maps as batched matmuls: how they are split for this machine, and what each product reads.

Legend: G layers of a group, B batch, H target heads, T tokens, D head width.

Every product is (G, B, 1 or H, T, in) @ (G, 1, 1 or H, in, rows), and every result has the axes of
caches, (G, B, H, T, D). A head-mixing map reads a token's whole width for each target head. A
head-wise map gives each target head its own source head. The hidden units of a head-mixing map
belong to no head: their axis H has length 1.

How the products are split depends on the machine, and only ``plan`` knows it:

- On a GPU, all target layers of equal shape go through one matmul, with the source layers of each
  concatenated, because separate matmuls would be launch-bound. All heads of a head-mixing map are
  one matrix, so the batch has one stride, which CUDA's library asks for, and no input is broadcast.
  A token's heads then lie side by side, and what follows reads them so.
- On a CPU, each source layer of each target layer has its own matmul, and these are summed in
  place, because stacking the inputs costs more than launching (paper/LOG.md). If each target
  head has its own source head, a head-wise map reads its heads side by side, as segments of one
  product, because laying them out one after another takes half as long as the product itself.

The rounding of a product's rows may depend on the product's shape, since a BLAS chooses its tiles
and threads by it. So layers with a window use products of ``BLOCK`` tokens, counted back from the
end of the span, where windows end as well. On a CPU a token's result is then bit-identical whether
its whole span is translated or only the window.

A recurrent layer needs some numbers of a span's last few tokens alone (``LayerGeometry.late``).
Their rows are a product of their own, of these tokens; elsewhere the numbers are zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlingo_mlx.backend import mx, on_gpu

import numpy as np

from kvlingo_mlx.format.kinds import SIDES, TENSORS
from kvlingo_mlx.format.maps import Read, head_map_of, maps_of
from kvlingo_mlx.format.tensor_file import DType, Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.translators.quantised import Quantised, fits

# The most hidden numbers per token in one group: half a GB in float32 for a chunk of 2048 tokens.
MAX_HIDDEN = 2**16
BLOCK = 256  # tokens: as fast as one product for all; 32 would take a third longer on a CPU


@dataclass(frozen=True)
class ProductGroup:
    """Target layers of one side that share their matmuls.

    Attributes:
        layers: The G target layers.
        cuts: The inputs of each matmul over the source's states: for each layer, the sides and
            source layers whose widths are concatenated.
        tensors: Tensors by the last part of their name in the format. Matrices are
            (G, 1, 1 or H, rows, in), some of them quantised if that was asked for; a matrix over
            the source's states has one part per cut. Vectors are (G, 1, 1 or H, 1, numbers) in
            float32.
        in_blocks: Whether products are split into ``BLOCK`` tokens, because layers have a window.
        segmented: Whether products over the source's states read all heads' widths side by side.
        wide: Whether a product makes all heads of a layer from one input.
        late: Rows that only the last tokens of a span need, and how many tokens those are.
    """

    layers: tuple[int, ...]
    cuts: tuple[tuple[tuple[Read, ...], ...], ...]
    tensors: dict[str, tuple[mx.array | Quantised, ...]]
    in_blocks: bool = False
    segmented: bool = False
    wide: bool = False
    late: tuple[range, int] | None = None

    @property
    def by_token(self) -> bool:
        """Whether a token's heads lie side by side in what the maps make."""
        return self.wide and set(self.tensors) == {"weight"}

    def above(self, layers: int) -> ProductGroup | None:
        """A group of only the target layers from ``layers`` on, or None; the arrays are shared."""
        skipped = sum(layer < layers for layer in self.layers)
        if skipped == len(self.layers):
            return None
        tensors = {n: tuple(part[skipped:] for part in parts) for n, parts in self.tensors.items()}
        cuts = tuple(cut[skipped:] for cut in self.cuts)
        return replace(self, layers=self.layers[skipped:], cuts=cuts, tensors=tensors)

    def needed(self, tokens: int) -> int:
        """How many of a span's last tokens must be read to translate the last ``tokens``."""
        return -(-tokens // BLOCK) * BLOCK if self.in_blocks else tokens

    def inputs(self, read: Callable[[Sequence[Read]], mx.array]) -> list[mx.array]:
        """The input of each cut, (G, B, 1 or H, T, in); ``read`` returns (N, B, 1 or H, T, in).

        If ``segmented``, the inputs are (1, B, 1, T, H * in).
        """
        inputs = []
        for cut in self.cuts:
            order = sorted({r for reads in cut for r in reads})
            if len(cut) > 1 < len(cut[0]) and len({side for side, _ in order}) == 1:
                inputs.append(_gathered(read(order), order, cut))
            else:
                inputs.append(_join([read(place) for place in zip(*cut, strict=True)]))
        return inputs

    def project(self, name: str, inputs: mx.array | Sequence[mx.array]) -> mx.array:
        """The sum of the products of ``inputs`` with the parts of a matrix.

        It is in float32, or in 16 bits if both factors are (docs/decisions/005).
        """
        inputs = [inputs] if isinstance(inputs, mx.array) else inputs
        tokens = inputs[0].shape[-2]
        if self.late is not None and TENSORS[name].axes[0] == "outputs":
            return self._by_need(name, inputs, *self.late)
        packed = isinstance(self.tensors[name][0], Quantised)  # a CPU multiplies these row by row
        if packed or not self.in_blocks or tokens < BLOCK:
            return self._product(name, inputs)
        rest = tokens % BLOCK
        blocks = [mx.unflatten(array[..., rest:, :], -2, (-1, BLOCK)) for array in inputs]
        result = mx.flatten(self._product(name, blocks), 3, 4)
        if rest:
            before = self._product(name, [array[..., :rest, :] for array in inputs])
            result = mx.concatenate([before, result], axis=-2)
        return result

    def _by_need(self, name: str, inputs: Sequence[mx.array], late: range, count: int) -> mx.array:
        """A product with zeros for rows ``late``, at one end, but for the last ``count`` tokens."""
        tokens = inputs[0].shape[-2]
        last = [array[..., -count:, :] for array in inputs]
        behind = self._product(name, last, slice(late.start, late.stop))
        padding = [(0, 0)] * (behind.ndim - 2) + [(max(0, tokens - count), 0), (0, 0)]
        behind = mx.pad(behind, padding)
        if not late.start:
            return mx.concatenate([behind, self._product(name, inputs, slice(late.stop, None))], -1)
        return mx.concatenate([self._product(name, inputs, slice(late.start)), behind], -1)

    def _product(
        self, name: str, inputs: Sequence[mx.array], rows: slice = slice(None)
    ) -> mx.array:
        """The product for inputs (G, B, 1 or H, T, in), or with an axis of blocks before T."""
        result: mx.array | None = None
        for array, part in zip(inputs, self.tensors[name], strict=True):
            matrix = part[..., rows, :]
            if isinstance(matrix, Quantised) and matrix.is_slow(array):
                matrix = matrix.unpacked()
            if isinstance(matrix, Quantised):
                product = matrix.product(array)
                result = product if result is None else result + product
                continue
            heads = matrix.shape[2] if self.wide and array.shape[2] == 1 else 1
            if heads > 1:
                matrix = mx.flatten(matrix, 2, 3)[:, :, None]
            matrix = matrix.swapaxes(-1, -2)
            if self.segmented and TENSORS[name].reads_states:
                product = _segmented(array, matrix)
                result = product if result is None else result + product
                continue
            if array.ndim > matrix.ndim:
                matrix = mx.expand_dims(matrix, 3)
            if heads > 1:
                product = mx.unflatten((array @ matrix)[:, :, 0], -1, (heads, -1))
                result = mx.moveaxis(product, -2, 2)
                continue
            result = array @ matrix if result is None else mx.addmm(result, array, matrix)
        assert result is not None  # every matrix has at least one part
        return result

    def vector(self, name: str) -> mx.array:
        """A bias or gate in float32, shaped to broadcast over tokens."""
        (array,) = self.tensors[name]
        assert isinstance(array, mx.array)  # only matrices are quantised
        return array

    def stored(self, head_mixing: bool) -> dict[tuple[int, str], np.ndarray]:
        """Float32 arrays by layer and last part of the name, with the shapes of the format."""
        out = {}
        for name in self.tensors:
            joined = _join(self.floats_of(name)).astype(mx.float32)
            for index, layer in enumerate(self.layers):
                array = np.array(joined[index, 0])  # (heads, rows, in) or (heads, 1, numbers)
                if not TENSORS[name].is_matrix:
                    flat = head_mixing or not TENSORS[name].by_head
                    array = array.reshape(-1) if flat else array[:, 0]
                elif head_mixing:
                    array = array.reshape(-1, array.shape[-1])
                out[layer, name] = array
        return out

    def floats_of(self, name: str) -> list[mx.array]:
        """The parts of a tensor, quantised ones as floats; others are shared, not copied."""
        return [p.floats() if isinstance(p, Quantised) else p for p in self.tensors[name]]


def _segmented(array: mx.array, matrix: mx.array) -> mx.array:
    """Multiply (1, B, 1, T, H * in) by (1, 1, H, in, rows) head by head: (1, B, H, T, rows)."""
    _, _, heads, width, rows = matrix.shape
    _, batch, _, tokens, _ = array.shape
    edges = mx.arange(0, heads * width, width, dtype=mx.uint32)
    product = mx.segmented_mm(
        array.reshape(batch * tokens, heads * width).astype(matrix.dtype),
        matrix.reshape(heads * width, rows),
        mx.stack([edges, edges + width], axis=1),
    )
    return product.reshape(1, heads, batch, tokens, rows).swapaxes(1, 2)


def plan(
    config: TranslatorConfig, weights: Weights, side: str, batched: bool, bits: int | None = None
) -> tuple[ProductGroup, ...]:
    """Split the maps to one target side, named ``{side}.{t}.*``, into groups and products.

    ``bits`` quantises the matrices that allow it.
    """
    reads = {m.layer: m.reads for m in maps_of(config) if side in m.writes}
    alike: dict[tuple, list[int]] = defaultdict(list)
    for layer, read in reads.items():
        own = config.target.layers[layer]
        widths, hidden = tuple(_width(config, r) for r in read), _hidden(weights, side, layer)
        shape = own.kv_heads, own.head_dim(side), own.reach, own.recurrence, widths, hidden
        alike[shape if batched else (layer,)].append(layer)
    groups = []
    for layers in alike.values():
        most = max(1, MAX_HIDDEN // max(1, _hidden(weights, side, layers[0])))
        for start in range(0, len(layers), most):
            cut = layers[start : start + most]
            groups.append(_group(config, weights, side, {n: reads[n] for n in cut}, batched, bits))
    return tuple(groups)


def _width(config: TranslatorConfig, read: Read) -> int:
    side, layer = read
    geometry = config.source.layers[layer]
    return geometry.width(side) if config.head_mixing else geometry.head_dim(side)


def _hidden(weights: Weights, side: str, layer: int) -> int:
    """The number of hidden units of one map over all heads; 0 if it has none."""
    name = f"{side}.{layer}.b1"
    return weights.arrays[name].size if name in weights.arrays else 0


def _group(
    config: TranslatorConfig,
    weights: Weights,
    side: str,
    reads_of: dict[int, tuple[Read, ...]],
    batched: bool,
    bits: int | None,
) -> ProductGroup:
    """A group of target layers of equal shape; ``reads_of`` lists the inputs of each one's map."""
    layers, reads = list(reads_of), list(reads_of.values())
    widths = [_width(config, read) for read in reads[0]]
    # If cuts would cross quantisation groups while whole rows would not, rows are not cut.
    crossing = bits is not None and fits(sum(widths)) and not all(map(fits, widths))
    whole = batched or crossing
    edges = [] if whole else np.cumsum(widths)[:-1].tolist()
    first = config.target.layers[layers[0]]
    heads = first.kv_heads
    own_heads = (
        not config.head_mixing
        and config.source.layers[0].kv_heads == heads
        and head_map_of(config) == tuple(range(heads))
    )
    # Segments exclude blocks: a segment's rows lie apart in memory, a block's do not.
    segmented = own_heads and not (batched or bits or first.reach or on_gpu())
    prefix = f"{side}.{layers[0]}."
    tensors: dict[str, tuple[mx.array | Quantised, ...]] = {}
    for name in (n.removeprefix(prefix) for n in weights.arrays if n.startswith(prefix)):
        own, kind = [f"{side}.{layer}.{name}" for layer in layers], TENSORS[name]
        lead = (len(layers), 1, 1 if config.head_mixing and kind.of_hidden else heads)
        if not kind.is_matrix:
            rows = np.stack([weights.as_float32(n) for n in own])
            tensors[name] = (mx.array(rows.reshape(*lead, 1, -1)),)
            continue
        stacked = np.stack([weights.arrays[n] for n in own])
        stacked = stacked.reshape(*lead, -1, stacked.shape[-1])
        parts = np.split(stacked, edges if kind.reads_states else [], axis=-1)
        if segmented and kind.reads_states:  # column-major, as segmented products read them
            made = (floats(p.swapaxes(-1, -2), weights).swapaxes(-1, -2) for p in parts)
            tensors[name] = tuple(made)
        elif bits is not None and fits(stacked.shape[-1]):
            how: Any = {"stack_heads": config.head_mixing, "wide": not on_gpu()}
            tensors[name] = tuple(
                Quantised.of(loaded(p, weights.dtype), bits, **how) for p in parts
            )
        else:
            tensors[name] = tuple(floats(p, weights) for p in parts)
    cuts = (tuple(reads),) if whole else tuple(((read,),) for read in reads[0])
    in_blocks = first.reach is not None and not on_gpu()
    wide = batched and config.head_mixing
    late = first.late(side)
    return ProductGroup(tuple(layers), cuts, tensors, in_blocks, segmented, wide, late)


def loaded(array: np.ndarray, dtype: DType) -> mx.array:
    """MLX's array of a file's, whose bfloat16 numbers are bits."""
    out = mx.array(np.ascontiguousarray(array))
    return out.view(mx.bfloat16) if dtype == "bfloat16" else out


def floats(array: np.ndarray, weights: Weights) -> mx.array:
    """An array of some weights; on a CPU in float32, because 16-bit matmuls are slow there."""
    out = loaded(array, weights.dtype)
    return out if on_gpu() else out.astype(mx.float32)


def _gathered(found: mx.array, order: list[Read], cut: Sequence[tuple[Read, ...]]) -> mx.array:
    """The inputs of layers that read several of (N, B, 1 or H, T, in), side by side: one gather."""
    rows = mx.flatten(found, 1, 3)
    picked = mx.array([[order.index(r) for r in reads] for reads in cut])
    joined = rows[picked[:, None], mx.arange(rows.shape[1])[:, None]]  # (G, rows, nu, in)
    return joined.reshape(len(cut), *found.shape[1:-1], -1)


def _join(arrays: Sequence[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=-1)


def apart(config: TranslatorConfig, weights: Weights) -> Weights:
    """Joint maps as two linear maps that both read keys and values.

    The upper rows of a joint map write keys, the lower ones values.
    """
    found: dict[str, np.ndarray] = {}
    for name, array in weights.arrays.items():
        _, layer, last = name.split(".")
        rows = np.split(array, [config.target.layers[int(layer)].width("keys")])
        found |= {f"{side}.{layer}.{last}": r for side, r in zip(SIDES, rows, strict=True)}
    return Weights(weights.dtype, found)


def together(weights: Weights) -> Weights:
    """Joint maps of what :func:`apart` made of them."""
    found = {}
    for name in (name for name in weights.arrays if name.startswith(SIDES[0])):
        _, layer, last = name.split(".")
        rows = [weights.arrays[f"{side}.{layer}.{last}"] for side in SIDES]
        found[f"joint.{layer}.{last}"] = np.concatenate(rows)
    return Weights(weights.dtype, found)
