"""The states that a model's projections wrote, kept until the other lines have them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.models.states import KVStates, joined

Run = tuple[int, int]  # positions from the first up to, not including, the second


@dataclass
class Recording:
    """Spans of one model's own states, in order of position; there may be gaps between them."""

    parts: list[KVStates] = field(default_factory=list)

    def add(self, states: KVStates) -> None:
        """Keep a span that begins where the last one ended, or later."""
        self.parts.append(states)

    def thin(self, ends: Collection[int]) -> None:
        """Drop recurrent states but those at ``ends`` and the last ones: each is a whole set."""
        self.parts = [
            part
            if part is self.parts[-1] or part.end in ends or not part.kept
            else replace(part, kept={})
            for part in self.parts
        ]

    def trim(self, length: int) -> None:
        """Drop position ``length`` and everything after it."""
        self._keep(0, length)

    def forget(self, position: int) -> None:
        """Drop everything before ``position``."""
        self._keep(position, self.parts[-1].end if self.parts else position)

    def _keep(self, start: int, stop: int) -> None:
        kept = self._within(start, stop)
        self.parts = [_alone(p, max(start, p.start), min(stop, p.end)) for p in kept]

    def _within(self, start: int, stop: int) -> list[KVStates]:
        return [p for p in self.parts if p.start < stop and p.end > start]

    def runs(self, most: int, *, kept: bool = False) -> list[Run]:
        """The positions before ``most`` of which the states are known, in order and apart.

        With ``kept``, runs end where recurrent states are known.
        """
        found, end = list[Run](), -1
        for part in self.parts:
            if not kept and not all(array.shape[-1] for array in part.keys):
                continue  # what went into recurrences was not recorded, since states are mapped
            if part.start != end:
                found.append((part.start, part.start))
            end = part.end
            if not kept or (part.kept and end <= most):
                found[-1] = found[-1][0], min(end, most)
        return [(start, stop) for start, stop in found if start < stop]

    def one_point(self, start: int, stop: int) -> int:
        """The end, at most ``stop``, of the states from ``start`` on of one capture point."""
        parts = self._within(start, stop)
        others = (p.start for p in parts if p.capture != parts[0].capture)
        return min([stop, *others])

    def read(self, start: int, stop: int) -> KVStates:
        """The states from ``start`` to ``stop``, both of one of :meth:`runs`."""
        parts = self._within(start, stop)
        return joined([p.part(max(start, p.start), min(stop, p.end)) for p in parts])

    def facts(self) -> list[dict[str, Any]]:
        """Everything, for JSON, in which something else stands for each array."""
        return [
            {
                "keys": part.keys,
                "values": part.values,
                "capture": part.capture,
                "start": part.start,
                "kept": list((part.kept or {}).items()),
            }
            for part in self.parts
        ]

    def restore(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Become the recording that gave ``facts``."""
        self.parts = [
            KVStates(
                tuple(fact["keys"]), tuple(fact["values"]), fact["capture"], fact["start"],
                dict(fact["kept"]),
            )
            for fact in facts
        ]  # fmt: skip

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for part in self.parts for array in part.arrays)


def _alone(states: KVStates, start: int, stop: int) -> KVStates:
    """A part in arrays of its own; a slice would keep the whole array in memory."""
    if (start, stop) == (states.start, states.end):
        return states
    part = states.part(start, stop)
    keys, values = (tuple(array * 1 for array in side) for side in (part.keys, part.values))
    mx.eval(keys, values)
    return replace(part, keys=keys, values=values)
