"""The second moments that a closed form needs, summed once each: one tile per pair of states.

NumPy only; until they are solved, the sums may be another library's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlingo_mlx.group import Group
from kvlingo_mlx.stage1.closed_form import Moments

State = tuple[str, int]  # (side, layer)


@dataclass(frozen=True)
class Regression:
    """What a map reads of the source and writes of the target.

    Attributes:
        reads: The source's states, in the order of the map's input columns; where source layers
            are yet to be chosen, all that it may read.
        writes: The target's states, in the order of its output rows.
        row: The row of the tokens' weights that counts for it.
    """

    reads: tuple[State, ...]
    writes: tuple[State, ...]
    row: int = 0


@dataclass
class Tiles:
    """Second moments in float64, one tile per pair of states.

    ``xx[row, i, j]`` (i <= j) is the sum over tokens of w x_i^T x_j for states of the source,
    ``xy[row, i, o]`` that of w x_i^T y_o with a state of the target, and ``yy[row, o]`` that of
    w y_o^2, where w is the token's weight in that row. Maps that read the same states share their
    tiles. Those of ``xx`` that are still of use stay when the data are read again for other maps
    (:meth:`turn_to`).
    """

    maps: Mapping[str, Regression]
    tokens: int = 0
    xx: dict[tuple[int, State, State], Any] = field(default_factory=dict)
    xy: dict[tuple[int, State, State], Any] = field(default_factory=dict)
    yy: dict[tuple[int, State], Any] = field(default_factory=dict)
    _settled: set[tuple[int, State, State]] = field(default_factory=set)

    def turn_to(self, maps: Mapping[str, Regression]) -> None:
        """Drop what other maps do not share, before the same data are read for them."""
        self.maps, self.tokens, self.xy, self.yy = maps, 0, {}, {}
        kept = between(maps.values())
        self.xx = {key: tile for key, tile in self.xx.items() if key in kept}
        self._settled = set(self.xx)

    def total(
        self,
        group: Group,
        widths: Callable[[State], int],
        outputs: Callable[[State], int],
        array: Callable[[np.ndarray], Any],
    ) -> None:
        """Add up what all processes of a group have summed since the maps were turned to.

        Args:
            group: The processes; each may have added no token at all.
            widths, outputs: As for :func:`batches`.
            array: An array where the sums are.
        """
        every = self.maps.values()
        xx = sorted(between(every) - self._settled)
        xy = sorted({(m.row, i, o) for m in every for i in m.reads for o in m.writes})
        yy = sorted({(m.row, o) for m in every for o in m.writes})
        sums: tuple[tuple[dict, Sequence[Any], Callable[..., tuple[int, ...]]], ...] = (
            (self.xx, xx, lambda row, i, j: (widths(i), widths(j))),
            (self.xy, xy, lambda row, i, o: (widths(i), outputs(o))),
            (self.yy, yy, lambda row, o: (outputs(o),)),
        )
        for tiles, keys, shape in sums:
            own = (as_numpy(tiles[k]) if k in tiles else np.zeros(shape(*k)) for k in keys)
            for key, found in zip(keys, group.totals(own), strict=True):
                tiles[key] = array(found)

    def clear(self) -> None:
        """Forget what was added since the maps were turned to; another process has it."""
        self.xx = {key: self.xx[key] for key in self._settled}
        self.xy, self.yy = {}, {}

    def tensors(self) -> dict[str, Any]:
        """All tiles by name, for a file."""
        found = {}
        for kind in ("xx", "xy", "yy"):
            for key, tile in getattr(self, kind).items():
                row, *states = key
                told = "settled" if kind == "xx" and key in self._settled else kind
                names = [f"{side}.{layer}" for side, layer in states]
                found["/".join([told, str(row), *names])] = tile
        return found

    @classmethod
    def restored(cls, tensors: Mapping[str, Any], tokens: int) -> Tiles:
        """The tiles that gave :meth:`tensors`, but for the maps."""
        made, settled = cls({}, tokens), set[Any]()
        for name, tile in tensors.items():
            told, row, *names = name.split("/")
            pairs = [state.split(".") for state in names]
            key = (int(row), *((side, int(layer)) for side, layer in pairs))
            getattr(made, "xx" if told == "settled" else told)[key] = tile
            if told == "settled":
                settled.add(key)
        made._settled = {key for key in made.xx if key in settled}
        return made

    def add(
        self, x: Callable[[State], Any], y: Callable[[State], Any], weights: Any = None
    ) -> None:
        """Add tokens: ``x`` and ``y`` give the (T, d) of a state in float64.

        ``weights`` are (rows, T), or None. Products are taken in float64: float32 sums leave noise
        of 1e-7 of the largest eigenvalue, above the tolerance at which eigenvalues count as zero.
        """

        def weighted(array: Any, row: int) -> Any:
            return array if weights is None else array * weights[row][:, None]

        number = 0
        for m in self.maps.values():
            for o in m.writes:
                right = y(o)
                number = len(right)
                for i in m.reads:
                    _add(self.xy, (m.row, i, o), weighted(x(i), m.row).T @ right)
                _add(self.yy, (m.row, o), weighted(right * right, m.row).sum(0))
        for row, i, j in sorted(between(self.maps.values()) - self._settled):
            right = x(j)
            # The product of an array with itself takes half of the work.
            left = right if i == j and weights is None else weighted(x(i), row)
            _add(self.xx, (row, i, j), left.T @ right)
        self.tokens += number

    def moments(self, name: str, reads: Sequence[State] | None = None) -> Moments:
        """The moments of a map from all that it reads, or from the states that were chosen."""
        m = self.maps[name]
        reads = m.reads if reads is None else reads
        cross = np.concatenate([self.cross(name, i) for i in reads])
        found = Moments(len(cross), cross.shape[1], self.tokens)
        found.xx = np.block([[self.gram(i, j, m.row) for j in reads] for i in reads])
        found.xy, found.yy = cross, self.squares(name)
        return found

    def cross(self, name: str, i: State) -> np.ndarray:
        """The tiles of a source state with all that a map writes."""
        m = self.maps[name]
        return np.concatenate([as_numpy(self.xy[m.row, i, o]) for o in m.writes], axis=1)

    def squares(self, name: str) -> np.ndarray:
        """The sums of squares of all that a map writes."""
        m = self.maps[name]
        return np.concatenate([as_numpy(self.yy[m.row, o]) for o in m.writes])

    def gram(self, i: State, j: State, row: int = 0) -> np.ndarray:
        """The tile of two source states, given in either order."""
        return as_numpy(self.xx[row, i, j]) if i <= j else as_numpy(self.xx[row, j, i]).T


def between(maps: Iterable[Regression]) -> set[tuple[int, State, State]]:
    """The pairs of source states that these maps need, by row."""
    reads = {(m.row, tuple(sorted(m.reads))) for m in maps}
    return {(row, i, j) for row, own in reads for n, i in enumerate(own) for j in own[n:]}


def batches(
    maps: Mapping[str, Regression],
    widths: Callable[[State], int],
    outputs: Callable[[State], int],
    memory: int,
) -> list[dict[str, Regression]]:
    """Maps in batches whose tiles fit into ``memory`` bytes, with at least one map each.

    Those that read alike stand beside each other, so that later batches find their tiles made.

    Args:
        maps: What each map reads and writes.
        widths: The width of a state of the source.
        outputs: The width of a state of the target.
        memory: In bytes.
    """
    made: list[dict[str, Regression]] = []
    pairs: set[tuple[int, State, State]] = set()
    size = 0
    for name, m in sorted(maps.items(), key=lambda item: (item[1].row, item[1].reads)):
        fresh = between([m])
        own = sum(widths(i) for i in m.reads) * sum(outputs(o) for o in m.writes)
        more = own + sum(widths(i) * widths(j) for _, i, j in fresh - pairs)
        if not made or 8 * (size + more) > memory:
            made.append({})
            pairs, size, more = set(), 0, own + sum(widths(i) * widths(j) for _, i, j in fresh)
        made[-1][name] = m
        pairs |= fresh
        size += more
    return made


def as_numpy(array: Any) -> np.ndarray:
    """Sums of either runtime as a NumPy array."""
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def _add(sums: dict, key: Any, part: Any) -> None:
    if key in sums:
        sums[key] += part
    else:
        sums[key] = part
