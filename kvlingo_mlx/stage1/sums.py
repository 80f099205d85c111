"""The second moments that closed forms need, of as many maps as fit into memory. NumPy only;
until they are solved, the sums may be another library's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.group import Group
from kvlingo_mlx.stage1.closed_form import Moments

State = tuple[str, int]  # (side, layer)
Width = Callable[[State], int]


@dataclass(frozen=True)
class Regression:
    """What a map reads of the source and writes of the target."""

    reads: tuple[State, ...]  # in the order of its input columns
    writes: tuple[State, ...]  # in the order of its output rows
    row: int = 0  # the row of the tokens' weights that counts for it

    @property
    def inputs(self) -> tuple[int, tuple[State, ...]]:
        """What maps that share a sum of x x^T have in common."""
        return self.row, self.reads


class Sums:
    """Sums over tokens of w x x^T, w x y^T and w y^2, in float64.

    Maps that read the same states share the first one. Products are taken in float64: float32 sums
    leave noise of 1e-7 of the largest eigenvalue, above the tolerance at which eigenvalues count as
    zero.
    """

    def __init__(self, maps: Mapping[str, Regression], source: Width, target: Width) -> None:
        self.maps, self.tokens = maps, 0
        self._widths = source, target
        self._sums: dict[Any, Any] = {}

    def add(
        self,
        x: Callable[[State], Any],
        y: Callable[[State], Any],
        joined: Callable[[list[Any]], Any],
        weights: Any = None,
    ) -> None:
        """Add tokens: ``x`` and ``y`` give the (T, d) of a state in float64.

        ``joined`` concatenates such arrays by columns. ``weights`` are (rows, T), or None.
        """
        for inputs in dict.fromkeys(m.inputs for m in self.maps.values()):
            row, reads = inputs
            read = joined([x(state) for state in reads])
            weighted = read if weights is None else read * weights[row][:, None]
            # The product of an array with itself takes half of the work.
            self._plus(inputs, weighted.T @ read)
            for name, m in self.maps.items():
                if m.inputs == inputs:
                    wanted = joined([y(state) for state in m.writes])
                    squares = wanted * wanted
                    squares = squares if weights is None else squares * weights[row][:, None]
                    self._plus((name, "xy"), weighted.T @ wanted)
                    self._plus((name, "yy"), squares.sum(0))
        self.tokens += len(read)

    def _plus(self, key: Any, part: Any) -> None:
        if key in self._sums:
            self._sums[key] += part
        else:
            self._sums[key] = part

    def total(self, group: Group) -> None:
        """Add up what all processes of a group have summed; each may have added no token."""
        shapes: dict[Any, tuple[int, ...]] = {}
        for name, m in self.maps.items():
            width, out = (
                sum(map(of, states))
                for of, states in zip(self._widths, (m.reads, m.writes), strict=True)
            )
            shapes |= {m.inputs: (width, width), (name, "xy"): (width, out), (name, "yy"): (out,)}
        own = (as_numpy(self._sums.get(key, np.zeros(shape))) for key, shape in shapes.items())
        self._sums = dict(zip(shapes, group.totals(own), strict=True))

    def moments(self, name: str) -> Moments:
        """The moments of a map."""
        m = self.maps[name]
        keys = m.inputs, (name, "xy"), (name, "yy")
        xx, xy, yy = (as_numpy(self._sums[key]) for key in keys)
        found = Moments(xy.shape[0], xy.shape[1], self.tokens)
        found.xx, found.xy, found.yy = xx, xy, yy
        return found


def batches(
    maps: Mapping[str, Regression], source: Width, target: Width, memory: int
) -> list[dict[str, Regression]]:
    """Maps in batches whose sums fit into ``memory`` bytes, with at least one map each.

    Those that read alike stand beside each other. ``source`` and ``target`` give the width of a
    state of the two.
    """
    made: list[dict[str, Regression]] = []
    size = 0
    for name, m in sorted(maps.items(), key=lambda item: item[1].inputs):
        width, out = sum(map(source, m.reads)), sum(map(target, m.writes))
        alike = made and any(each.inputs == m.inputs for each in made[-1].values())
        more = 8 * width * (out + (0 if alike else width))
        if not made or size + more > memory:
            made.append({})
            size, more = 0, 8 * width * (out + width)
        made[-1][name] = m
        size += more
    return made


def as_numpy(array: Any) -> np.ndarray:
    """Sums of either runtime as a NumPy array."""
    return array.cpu().numpy() if hasattr(array, "cpu") else array
