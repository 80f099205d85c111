"""What one machine asks of another: which tokens are read, and what of their states is sent.

Both sides compute from it what each chunk holds, so that nothing else has to be agreed on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from kvlingo_mlx.format.geometry import LayerGeometry, digest_of
from kvlingo_mlx.format.maps import maps_of, state_maps_of
from kvlingo_mlx.format.tensor_file import STORAGE, DType, Shapes
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.translators.products import BLOCK

NAME = re.compile(r"(keys|values|states)\.(0|[1-9]\d{0,3})")
KEPT = "states"  # the side of recurrent states, which the last chunk alone holds
Firsts = Mapping[str, int]


@dataclass(frozen=True)
class Order:
    """A prompt that another machine is to read."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # the server reads it
    model: str  # the digest of the source's facts, as the server told them
    session: str  # random: what is left of an order, asked for anew, goes on with its job
    tokens: tuple[int, ...]  # up to the last that is translated
    step_size: int  # tokens per prefill chunk, counted from the first token
    capture: str  # the capture point of the states that are sent
    # The tensors that are sent, ``keys.3`` for instance, each with the first position that is
    # needed of it; one is needed from the first position that is sent. ``states.3`` is a layer's
    # recurrent state after the last token.
    wanted: Firsts

    @property
    def key(self) -> str:
        """A digest of what is asked, which is the same from any position on."""
        return digest_of({**asdict(self), "wanted": sorted(self.wanted)})

    @property
    def start(self) -> int:
        """The first position that is sent."""
        return min(self.wanted.values())

    @property
    def spans(self) -> list[range]:
        """The positions of each chunk that is sent."""
        size, stop = self.step_size, len(self.tokens)
        starts = range(self.start // size * size, stop, size)
        return [range(max(begun, self.start), min(begun + size, stop)) for begun in starts]

    def rest(self, position: int) -> Order:
        """The same order from a position on, when what comes before has arrived."""
        wanted = {name: max(first, position) for name, first in self.wanted.items()}
        return replace(self, wanted=wanted)

    def rows(self, span: range) -> dict[str, int]:
        """The number of last positions that a chunk holds of each tensor, without empty ones.

        It is a number of whole blocks, as the products of windows need them.
        """
        found = {}
        for name, first in self.wanted.items():
            if split(name)[0] == KEPT:
                if span.stop == len(self.tokens):
                    found[name] = 1
                continue
            count = span.stop - max(first, span.start)
            count = min(-(-count // BLOCK) * BLOCK, len(span))
            if count > 0:
                found[name] = count
        return found

    def shapes(self, span: range, layers: Sequence[LayerGeometry]) -> Shapes:
        """The shapes of a chunk's tensors, of the source's ``layers``: (T, H * D).

        A recurrent state's is (heads, value dim, key dim).
        """
        found: dict[str, tuple[int, ...]] = {}
        for name, rows in self.rows(span).items():
            side, layer = split(name)
            of = layers[layer]
            if side == KEPT:
                assert of.recurrence is not None  # the server has checked it, or has made it
                found[name] = of.recurrence.parts[1]
            else:
                found[name] = (rows, of.width(side))
        return found

    def told(self, span: range) -> dict[str, str]:
        """What a chunk's metadata say."""
        return {"start": str(span.start), "stop": str(span.stop), "capture": self.capture}

    def nbytes(self, layers: Sequence[LayerGeometry], dtype: DType) -> int:
        """The bytes of the tensors of all chunks."""
        shapes = (s for span in self.spans for s in self.shapes(span, layers).values())
        return STORAGE[dtype]().itemsize * sum(map(math.prod, shapes))

    def check(self) -> None:
        """Refuse (ValueError) a stranger's order that makes no sense of any model."""
        if self.step_size < 1 or not self.tokens or not self.wanted:
            raise ValueError("step_size, tokens or wanted is empty, which an order cannot have")
        for name, first in self.wanted.items():
            if not (NAME.fullmatch(name) and 0 <= first < len(self.tokens)):
                raise ValueError(
                    f"wanted has {name!r:.40} from {first}, which an order cannot have"
                )


def split(name: str) -> tuple[str, int]:
    """The side and the layer of a tensor's name."""
    side, _, layer = name.partition(".")
    return side, int(layer)


def wanted_states(
    config: TranslatorConfig, layers: int, firsts: Sequence[int], start: int
) -> Firsts:
    """The source's sides and layers that maps read, with the first position needed of each.

    Both sides of a layer begin at one position. Where no layer is needed from ``start`` on, all
    of them are sent from there, since every chunk must say where it begins.

    Args:
        layers: The number of the target's first layers, which it reads itself.
        firsts: The first position that each of the target's layers will hold.
        start: The first position that is translated.
    """
    read: dict[tuple[str, int], None] = {}
    begun: dict[int, int] = {}
    for m in maps_of(config):
        if m.layer >= layers:
            for side, layer in m.reads:
                read[side, layer] = None
                begun[layer] = min(begun.get(layer, firsts[m.layer]), firsts[m.layer])
    wanted = {f"{side}.{layer}": begun[layer] for side, layer in read}
    every = [m.reads for m in state_maps_of(config) if m.layer >= layers]
    wanted |= {f"{KEPT}.{layer}": start for reads in every for layer in reads}
    later = {name: max(first, start) for name, first in wanted.items()}
    return later if min(later.values()) == start else dict.fromkeys(later, start)
