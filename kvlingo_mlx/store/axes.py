"""Axes of other people's tensors, spelt as einops spells them, brought into our order. NumPy only.

``heads (sources source_heads source_dim) dim`` is a tensor of three axes, the second of which runs
over the source layers that are read, their heads and each head's numbers, the last one fastest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# What an axis counts. The first one is there where a tensor holds all target layers.
AXES = {
    "layers": "target layers",
    "heads": "KV heads of the target layer",
    "dim": "width of one target head",
    "sources": "source layers that a target layer reads",
    "source_heads": "KV heads of a source layer",
    "source_dim": "width of one source head",
}
# What may stand in braces in a tensor's name, with the axis that it takes the place of.
FIELDS = {
    "layer": "layers",
    "head": "heads",
    "source": "sources",  # the index of the source layer in its model
    "place": "sources",  # its place among those that the target layer reads, from 0
    "source_head": "source_heads",
}
OUTPUTS = ("heads", "dim")
GROUP = re.compile(r"\(([^()]*)\)|(\w+)")


@dataclass(frozen=True)
class Form:
    """The names and the axes of the tensors that together are one kind of tensor of all layers.

    Attributes:
        name: A tensor's name, with fields in braces (``FIELDS``).
        groups: For each axis of such a tensor, what it runs over, the last one fastest.
    """

    name: str
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, name: str, axes: str, wanted: Sequence[str]) -> Form:
        """Parse a name and its axes, which together have each of ``wanted`` and no other.

        Raises:
            ValueError: An axis is missing, unknown, or there twice.
        """
        groups = tuple(
            tuple((inside or alone).split())
            for inside, alone in GROUP.findall(axes)
            if inside or alone
        )
        fields = re.findall(r"\{(\w+)\}", name)
        unknown = [f for f in fields if f not in FIELDS]
        if unknown or re.sub(r"\{\w+\}", "", name).strip("{}") != re.sub(r"\{\w+\}", "", name):
            known = ", ".join(f"{{{f}}}" for f in FIELDS)
            raise ValueError(f"the name {name!r} has a field that is none of {known}")
        if GROUP.sub("", axes).strip():
            raise ValueError(f"the axes {axes!r} are not words and (words in brackets)")
        flat = [axis for group in groups for axis in group]
        for axis in dict.fromkeys([*flat, *wanted]):
            there = flat.count(axis) + len({f for f in fields if FIELDS[f] == axis})
            if axis not in (*wanted, "layers") or (there != 1 and (axis, there) != ("layers", 0)):
                times = {0: "is not there", 1: "is there"}.get(there, "is there twice")
                raise ValueError(
                    f"{name!r} with axes {axes!r}: {axis!r} {times}; expected each of "
                    f"{', '.join(wanted)} once, in the axes or as a field of the name"
                )
        if "layers" not in flat and "layer" not in fields:
            raise ValueError(
                f"{name!r} with axes {axes!r} says nothing of target layers; write {{layer}} into "
                "the name, or layers among the axes"
            )
        return cls(name, groups)

    @property
    def _split(self) -> list[str]:
        """The axes whose parts are tensors of their own, but for target layers."""
        fields = (FIELDS[f] for f in re.findall(r"\{(\w+)\}", self.name))
        return [axis for axis in dict.fromkeys(fields) if axis != "layers"]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one tensor."""
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.groups)

    def named(self, layer: int, sources: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
        """The names of a target layer's tensors, in the order of the axes that they split."""
        found = []
        for at in itertools.product(*(range(sizes[axis]) for axis in self._split)):
            place = dict(zip(self._split, at, strict=True))
            number = place.get("sources", 0)
            fields = {
                "layer": layer, "head": place.get("heads"), "place": number,
                "source": sources[number] if sources else None,
                "source_head": place.get("source_heads"),
            }  # fmt: skip
            found.append(self.name.format(**fields))
        return found

    def taken(
        self,
        read: Callable[[str], np.ndarray],
        layer: int,
        sources: Sequence[int],
        sizes: Mapping[str, int],
        order: Sequence[Sequence[str]],
    ) -> np.ndarray:
        """A target layer's numbers, with the axes ``order``.

        Args:
            read: Gives a tensor by its name.
            layer: The target layer.
            sources: The source layers that it reads.
            sizes: What each axis counts.
            order: What each axis of the result runs over, the last one fastest.
        """
        flat = [axis for group in self.groups for axis in group]
        parts = []
        for name in self.named(layer, sources, sizes):
            part = read(name).reshape([sizes[axis] for axis in flat])
            parts.append(
                part[(slice(None),) * flat.index("layers") + (layer,)] if "layers" in flat else part
            )
        axes = [*self._split, *(axis for axis in flat if axis != "layers")]
        whole = parts[0] if len(parts) == 1 else np.stack(parts)
        whole = whole.reshape([sizes[axis] for axis in axes])
        wanted = [axis for group in order for axis in group]
        shape = [math.prod(sizes[axis] for axis in group) for group in order]
        return np.ascontiguousarray(whole.transpose([axes.index(axis) for axis in wanted])).reshape(
            shape
        )
