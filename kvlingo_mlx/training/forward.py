"""What a translator's maps compute, on the arrays of either runtime."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ref

from kvlingo_mlx.format.maps import Map, StateMap, head_map_of, maps_of, state_maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.training.coordinates import Coordinates

# A side, a source layer and some of the tokens, to their states (T, d).
Read = Callable[[str, int, slice], Any]


@dataclass(frozen=True)
class Operations:
    """What the two runtimes spell differently."""

    joined: Callable[[Sequence[Any]], Any]  # arrays along their last axis
    chosen: Callable[[Any, Sequence[int]], Any]  # an array's rows by their numbers
    cast: Callable[[Any, Any], Any]  # an array in another's dtype
    gelu: Callable[[Any], Any]  # the exact one
    sigmoid: Callable[[Any], Any]


@dataclass
class Inputs:
    """What maps read of one conversation, made white once for all layers."""

    white: dict[str, Any] = field(default_factory=dict)  # by the first map that reads it
    of: Callable[[], Any] = lambda: None  # the conversation's states, while somebody has them

    def begin(self, states: Any) -> None:
        """Forget what is of other states; what is of these goes when they go."""
        if self.of() is not states:
            white = self.white = dict[str, Any]()
            self.of = ref(states, lambda _: white.clear())


@dataclass(frozen=True)
class Maps:
    """The maps of a translator."""

    config: TranslatorConfig
    operations: Operations
    coordinates: Coordinates
    inputs: Inputs = field(default_factory=Inputs)  # of the latest conversation

    def layer(
        self, tensors: Mapping[str, Any], t: int, states: Any, read: Read, rows: slice
    ) -> tuple[Any, Any]:
        """The keys and values of target layer ``t``, (T, width) each, of some of the tokens.

        ``states`` are those that ``read`` reads.
        """
        if self.coordinates.white:
            self.inputs.begin(states)
        found: dict[str, Any] = {}
        for m in self._by_layer[t]:
            both, start = self._apply(m, tensors, self._inputs(m, read, rows)), 0
            for side in m.writes:
                stop = start + self.config.target.layers[t].width(side)
                found[side], start = both[:, start:stop], stop
        return found["keys"], found["values"]

    def names(self, t: int) -> list[str]:
        """The beginnings of the names of a target layer's tensors."""
        own = [self.states[t]] if t in self.states else self._by_layer[t]
        return [f"{m.name}." for m in own]

    @cached_property
    def states(self) -> dict[int, StateMap]:
        """The maps of states, by target layer."""
        return {m.layer: m for m in state_maps_of(self.config)}

    @cached_property
    def _by_layer(self) -> dict[int, list[Map]]:
        found: dict[int, list[Map]] = defaultdict(list)
        for m in maps_of(self.config):
            found[m.layer].append(m)
        return found

    def _inputs(self, m: Map, read: Read, rows: slice) -> Any:
        """What a map is applied to: (T, in), or for head-wise maps (H, T, in)."""
        first = self.coordinates.first.get(m.name)
        if first is None:
            return self._joined(m, read, rows)
        white, made, cast = self.coordinates.white[first], self.inputs.white, self.operations.cast
        if first not in made:
            own = self._joined(m, read, slice(None))
            made[first] = cast(cast(own, white) @ white, own)
        return made[first][..., rows, :]

    def _joined(self, m: Map, read: Read, rows: slice) -> Any:
        """The states of the layers read, joined: (T, in), or for head-wise maps (H, T, in)."""
        own = [read(side, s, rows) for side, s in m.reads]
        if m.heads is None:
            return own[0] if len(own) == 1 else self.operations.joined(own)
        heads = self.config.source.layers[0].kv_heads
        by_head = self.operations.joined([r.reshape(len(r), heads, -1) for r in own])
        return self.operations.chosen(by_head.swapaxes(0, 1), head_map_of(self.config))

    def _apply(self, m: Map, tensors: Mapping[str, Any], x: Any) -> Any:
        """Apply one map to (T, in) or (H, T, in); returns (T, width) in the inputs' dtype."""
        head, do = f"{m.name}.", self.operations
        get = {
            name.removeprefix(head): do.cast(self.coordinates.applied(name, tensor), x)
            for name, tensor in tensors.items()
            if name.startswith(head)
        }
        y = self.config.spec.formula(get, x, do.gelu)
        y = y if y.ndim == 2 else y.swapaxes(0, 1).flatten(1)
        if "gate" in get:
            gate = do.sigmoid(get["gate"])[:, None]
            y = (y.reshape(len(y), len(gate), -1) * gate).flatten(1)
        return y + get["bias"] if "bias" in get else y
