"""Keys and values of a span of tokens, as a source writes them or a translator returns them.

Legend: B batch, T tokens, H KV heads, D head dim, N cache layers, G layers of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvlingo_mlx.backend import mx


class Stacked(tuple[mx.array, ...]):
    """One side's arrays of all layers, as views of one array, which a product reads as a batch."""

    whole: mx.array  # (N, B, T, H * D)

    @classmethod
    def of(cls, whole: mx.array) -> Stacked:
        """The layers of an array (N, B, T, H * D)."""
        made = cls(whole[layer] for layer in range(len(whole)))
        made.whole = whole
        return made


def stacked(side: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """Arrays of equal shape as one array: a copy, made once where it was not made yet."""
    if isinstance(side, Stacked) or len({array.shape for array in side}) != 1:
        return side
    return Stacked.of(mx.stack(list(side)))


@dataclass(frozen=True)
class KVStates:
    """Keys and values as a model's projections write them, one array per cache layer.

    The array of a layer with a window may hold only the last tokens of the span.
    """

    keys: tuple[mx.array, ...]  # N arrays (B, T, H * D), heads stacked in head order
    values: tuple[mx.array, ...]  # N arrays (B, T, H * D)
    # The capture point: "pre_norm", "post_norm", "post_rope" or "latent" (MLA: keys are k_R before
    # RoPE, values are c_KV)
    capture: str
    start: int  # position of the first token
    # A hybrid's recurrent states after the last token, float32 (B, heads, value dim, key dim) by
    # layer: in the place of what went into them, whose arrays hold no token then. Empty where they
    # are not known for the last token, None where they were not recorded.
    kept: Mapping[int, mx.array] | None = None

    def side(self, side: str) -> tuple[mx.array, ...]:
        """The arrays of one side, ``"keys"`` or ``"values"``."""
        return self.keys if side == "keys" else self.values

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, so that they can be evaluated together."""
        return [*self.keys, *self.values, *(self.kept or {}).values()]

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens in the span."""
        return max(array.shape[1] for array in self.keys)

    @cached_property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.num_tokens

    def first(self, layer: int) -> int:
        """The position of the first token that a layer's arrays hold."""
        return self.end - self.keys[layer].shape[1]

    def part(self, start: int, stop: int) -> KVStates:
        """The states from position ``start`` to ``stop``, as far as each layer holds them."""
        if (start, stop) == (self.start, self.end):
            return self
        held = [self.first(layer) for layer in range(len(self.keys))]

        def cut(side: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
            places = [slice(max(0, start - first), max(0, stop - first)) for first in held]
            if isinstance(side, Stacked):
                return Stacked.of(side.whole[:, :, places[0]])
            return tuple(array[:, place] for array, place in zip(side, places, strict=True))

        keys, values = map(cut, (self.keys, self.values))
        kept = self.kept if self.kept is None or stop == self.end else {}
        return KVStates(keys, values, self.capture, start, kept)

    def gathered(self, rows: mx.array, start: int) -> KVStates:
        """Tokens by their places (T,) in the span, as a new span that begins at ``start``."""
        keys, values = (tuple(a[:, rows] for a in side) for side in (self.keys, self.values))
        return KVStates(keys, values, self.capture, start)


@dataclass(frozen=True)
class LayerGroup:
    """One side of several target layers that were mapped together."""

    layers: tuple[int, ...]  # G target cache layers, in the order of the first axis
    start: int  # position of the first token
    states: mx.array  # (G, B, H, T, D), the axes of caches
    by_token: bool = False  # whether a token's heads lie side by side in memory


@dataclass(frozen=True)
class TranslatedStates:
    """A translator's output for a span: the values, and the keys at its capture point.

    ``kept`` are mapped recurrent states by target layer, (B, heads, value dim, key dim), of layers
    that have no keys and values then; empty before a span's last token.
    """

    keys: tuple[LayerGroup, ...]
    values: tuple[LayerGroup, ...]
    capture: str
    kept: Mapping[int, mx.array] = field(default_factory=dict)

    def states(self, num_layers: int, dtype: mx.Dtype = mx.float32) -> KVStates:
        """The same states per layer, as a model of ``num_layers`` cache layers writes them."""
        sides, none = [], mx.zeros((1, 0, 0))
        for groups in (self.keys, self.values):
            arrays = {t: flat(a) for g in groups for t, a in zip(g.layers, g.states, strict=True)}
            found = (arrays.get(layer, none).astype(dtype) for layer in range(num_layers))
            sides.append(tuple(found))
        keys, values = sides
        return KVStates(keys, values, self.capture, self.keys[0].start, dict(self.kept))


def joined(parts: Sequence[KVStates]) -> KVStates:
    """Consecutive spans as one span."""
    if len(parts) == 1:
        return parts[0]
    keys, values = (
        tuple(map(_together, zip(*sides, strict=True)))
        for sides in ([p.keys for p in parts], [p.values for p in parts])
    )
    return replace(parts[0], keys=keys, values=values, kept=parts[-1].kept)


def _together(arrays: Sequence[mx.array]) -> mx.array:
    """A layer's arrays as one; those without tokens, of a layer whose states are mapped, left out.

    They may have another width.
    """
    full = [array for array in arrays if array.shape[1]]
    return mx.concatenate(full, axis=1) if full else arrays[0]


def flat(heads: mx.array) -> mx.array:
    """Reshape (B, H, T, D), as caches store it, to (B, T, H * D)."""
    batch, _, tokens, _ = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, tokens, -1)
