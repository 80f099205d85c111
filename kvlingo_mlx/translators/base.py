"""A translator on the device."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

from kvlingo_mlx.backend import mx, nn, on_gpu

import numpy as np

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import Read, head_map_of
from kvlingo_mlx.format.tensor_file import DType, Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.states import KVStates, LayerGroup, Stacked, TranslatedStates
from kvlingo_mlx.translators.products import ProductGroup, together
from kvlingo_mlx.translators.quantised import Quantised
from kvlingo_mlx.translators.state_maps import StateMapped


def _gelu(product: mx.array, bias: mx.array) -> mx.array:
    """GELU with erf, in float32, as biases are; the result in the product's dtype."""
    return nn.gelu(product + bias).astype(product.dtype)


@dataclass(frozen=True)
class Translator:
    """Maps a source's keys and values to a target's, token by token (paper: equation (3.1)).

    Attributes:
        config: Which models it is for, what it computes, and its provenance.
        dtype: The dtype in which its weights are stored on disk.
        groups: The maps by target side, arranged for this machine.
        of_states: The maps of recurrent states, in layer order.
        bits: The bits of its quantised matrices (:mod:`.quantised` leaves some as floats), or None.
        path: The folder from which it was loaded; None if it was made in this process.
    """

    config: TranslatorConfig
    dtype: DType
    groups: dict[str, tuple[ProductGroup, ...]]
    of_states: tuple[StateMapped, ...] = ()
    bits: int | None = None
    path: Path | None = None

    def __repr__(self) -> str:
        """One line; the weights are left out."""
        facts = f"{self.config.form}, {self.num_parameters:,} parameters in {self.dtype}"
        return f"<Translator, {self.config.title.removeprefix('the ')}: {facts}>"

    def linear_map(
        self, side: str, layer: int
    ) -> tuple[tuple[tuple[Read, ...], ...], tuple[mx.array, ...], mx.array | None]:
        """The map to one side of a target layer, as matrices that share this translator's memory.

        Returns:
            For each matrix the sides and source layers that its columns read; the matrices,
            (H, rows, in) each, of which the map is the sum of products; and the bias (H, rows) in
            float32, or None.

        Raises:
            IncompatibleTranslatorError: The translator is not linear.
        """
        if not self.config.spec.folds:
            raise IncompatibleTranslatorError(
                f"a translator of kind {self.config.kind} is not linear, so there are no matrices "
                "of its maps alone"
            )
        group = next(group for group in self.groups[side] if layer in group.layers)
        index = group.layers.index(layer)
        bias = group.vector("bias")[index, 0, :, 0] if "bias" in group.tensors else None
        reads = tuple(cut[index] for cut in group.cuts)
        return reads, tuple(part[index, 0] for part in group.floats_of("weight")), bias

    def __call__(self, states: KVStates, first: Sequence[int] | None = None) -> TranslatedStates:
        """Translate a span whose keys are at ``config.capture``; nothing is evaluated.

        Args:
            states: The source's states.
            first: For each target cache layer, the first position that it will hold; a layer with
                a window needs nothing earlier. Default: all positions.

        Raises:
            ValueError: Recurrent states are mapped, and ``states`` were recorded without them.
        """
        if self.of_states and states.kept is None:
            raise ValueError(
                f"{self.config.title} maps recurrent states, and what it is given has none; record "
                "it with kept=True"
            )
        keys, values = (
            tuple(
                LayerGroup(group.layers, start, self._apply(group, states, start), group.by_token)
                for group in self.groups[side]
                if (start := max(states.start, first[group.layers[0]] if first else 0)) < states.end
            )
            for side in SIDES
        )
        kept = {m.map.layer: m(states.kept) for m in self.of_states if states.kept}
        return TranslatedStates(keys, values, states.capture, kept)

    def above(self, layers: int) -> Self:
        """A translator to only the target layers from ``layers`` on; the arrays are shared."""
        groups = {
            side: tuple(part for group in found if (part := group.above(layers)) is not None)
            for side, found in self.groups.items()
        }
        kept = tuple(m for m in self.of_states if m.map.layer >= layers)
        return replace(self, groups=groups, of_states=kept) if layers else self

    def in_full(self) -> Self:
        """A translator that makes all numbers of each token, also what only a tail needs."""
        groups = {
            side: tuple(replace(group, late=None) for group in found)
            for side, found in self.groups.items()
        }
        return replace(self, groups=groups)

    def _apply(self, group: ProductGroup, states: KVStates, start: int) -> mx.array:
        # The source's rings hold no more than their windows.
        held = max(states.first(layer) for cut in group.cuts for reads in cut for _, layer in reads)
        begin = min(start, max(held, states.end - group.needed(states.end - start)))
        split = not (self.config.head_mixing or group.segmented)
        inputs = group.inputs(partial(self._read, states, begin, split))
        result = self.config.spec.formula(group.project, group.vector, inputs, _gelu)
        result = result[..., start - begin :, :]
        if "gate" in group.tensors:
            result = mx.sigmoid(group.vector("gate")) * result
        return result + group.vector("bias") if "bias" in group.tensors else result

    def _read(self, states: KVStates, start: int, split: bool, reads: Sequence[Read]) -> mx.array:
        """N states of one side from ``start``, (N, B, 1, T, Hs * d), or (N, B, H, T, d).

        The latter are by target head, if ``split``.
        """
        (side, *_), layers = zip(*reads, strict=True)
        for layer in layers:
            if start < states.first(layer):
                raise ValueError(
                    f"source layer {layer} holds nothing before position {states.first(layer)}, "
                    f"and {start} is to be translated; prefill the source, or give windows' starts"
                )
        held = states.side(side)
        if isinstance(held, Stacked) and len(layers) > 1:
            alone = layers == tuple(range(len(held)))
            array = held.whole if alone else mx.take(held.whole, mx.array(layers), axis=0)
            array = array[:, :, start - states.first(layers[0]) :]
        else:
            arrays = [held[layer][:, start - states.first(layer) :] for layer in layers]
            array = mx.stack(arrays) if len(arrays) > 1 else arrays[0][None]
        if not split:
            return array[:, :, None]
        heads = self.config.source.layers[layers[0]].kv_heads
        parted = mx.unflatten(array, -1, (heads, -1)).swapaxes(2, 3)
        if self._head_index is not None:
            return mx.take(parted, self._head_index, axis=2)
        # A CPU's matmul copies non-contiguous inputs, three times slower than this.
        return parted if on_gpu() else mx.contiguous(parted)

    @cached_property
    def _head_index(self) -> mx.array | None:
        head_map = head_map_of(self.config)
        sources = self.config.source.layers[0].kv_heads
        return None if head_map == tuple(range(sources)) else mx.array(head_map)

    def to_weights(self) -> Weights:
        """The tensors as the format stores them, bit-identical to those that were loaded.

        Raises:
            ValueError: The translator is quantised.
        """
        if self.bits is not None:
            raise ValueError(
                f"this translator is quantised to {self.bits} bits, and a translator folder holds "
                "float weights only; load it without quantize"
            )
        weights = Weights.from_float32(self.floats(), self.dtype)
        return together(weights) if self.config.joint else weights

    def floats(self) -> dict[str, np.ndarray]:
        """The numbers with which the maps compute, in float32; quantised matrices are dequantised.

        They are named by target side and have the shapes of the format (joint maps by their rows).
        """
        found = {
            f"{side}.{layer}.{name}": array
            for side in SIDES
            for group in self.groups[side]
            for (layer, name), array in group.stored(self.config.head_mixing).items()
        }
        for m in self.of_states:
            found |= {n: np.array(a.astype(mx.float32)) for n, a in m.tensors.items()}
        return found

    @cached_property
    def digest(self) -> str:
        """Sha256 of what it computes (:func:`kvlingo_mlx.format.translator_folder.digest`).

        If it is quantised, its dequantised matrices count, however this machine splits them.
        """
        quantised = self.bits is not None
        weights = Weights("float32", self.floats()) if quantised else self.to_weights()
        return translator_folder.digest(self.config, weights, self.bits)

    @property
    def name(self) -> str:
        """The translator's folder and the first digits of its digest, for messages."""
        return f"{self.path or 'made in this process'} (sha256 {self.digest[:12]})"

    @property
    def num_parameters(self) -> int:
        """The number of parameters in all maps."""
        return sum(part.size for _, part in self.tensors())

    @property
    def nbytes(self) -> int:
        """The bytes that the maps take in memory."""
        return sum(part.nbytes for _, part in self.tensors())

    def tensors(self) -> Iterator[tuple[str, mx.array | Quantised]]:
        """All tensors, by the last part of their names or, for maps of states, by the whole."""
        for group in (group for side in SIDES for group in self.groups[side]):
            yield from ((name, part) for name, parts in group.tensors.items() for part in parts)
        for m in self.of_states:
            yield from m.tensors.items()

    @checked
    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write a translator folder so that all of it appears, or nothing.

        Raises:
            ValueError: ``folder`` exists and is not a translator folder; or it holds another
                translator and ``overwrite`` is off; or this translator is quantised.
        """
        return translator_folder.write(folder, self.config, self.to_weights(), overwrite=overwrite)
