"""A translator in training, on the arrays of either runtime: what its maps compute."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar
from weakref import ref

import numpy as np

from kvlingo_mlx.format.maps import Map, StateMap, head_map_of, maps_of, state_maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.training.coordinates import Coordinates

# A side, a source layer and some of the tokens, to their states (T, d).
Read = Callable[[str, int, slice], Any]


@dataclass(frozen=True)
class Operations:
    """What the two runtimes spell differently."""

    joined: Callable[[Sequence[Any]], Any]  # arrays along their last axis
    cast: Callable[[Any, Any], Any]  # an array in a dtype
    float32: Any  # that dtype
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
class Trainable(ABC):
    """A translator in training, with its AdamW optimizer and the gradients so far."""

    operations: ClassVar[Operations]

    config: TranslatorConfig
    tensors: dict[str, Any]  # float32 by name, in their coordinates
    coordinates: Coordinates
    inputs: Inputs = field(default_factory=Inputs, kw_only=True)  # of the latest conversation

    # ---- what each runtime does in its own way ----------------------------------------------

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of its tensors by name, in float32."""

    @abstractmethod
    def descend(self, layer: int, error: Callable[[Any], Any], scale: float) -> float:
        """An error of a target layer's tensors; adds ``scale`` times its gradient, if not 0."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Its tensors in their coordinates; of AdamW ``NAME/exp_avg``, ``/exp_avg_sq``, ``/step``.

        They are as PyTorch has them.
        """

    @abstractmethod
    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Become what gave :meth:`state`, in either runtime."""

    @abstractmethod
    def gather(self, group: Group) -> bool:
        """Sum the gradients over all processes; returns whether they are finite."""

    @abstractmethod
    def update(self, rate: float, clip: float) -> None:
        """Take one AdamW step, the gradients clipped to the norm ``clip``; drop the gradients."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the gradients."""

    # ---- what maps compute ------------------------------------------------------------------

    def layer(
        self,
        t: int,
        states: Any,
        tensors: Mapping[str, Any] | None = None,
        dtype: Any = None,
        rows: slice = slice(None),
    ) -> tuple[Any, Any]:
        """The keys and values of target layer ``t``, (T, width) each, of some of the tokens.

        They are made from the source's states, in ``dtype`` if there is one. ``tensors`` stand in
        for its own.
        """

        def read(side: str, s: int, rows: slice) -> Any:
            array = states.side(side)[s]
            array = array.reshape(array.shape[-2:])[rows]
            return array if dtype is None else self.operations.cast(array, dtype)

        if self.coordinates.white:
            self.inputs.begin(states)
        own = self.tensors if tensors is None else tensors
        found: dict[str, Any] = {}
        for m in self._by_layer[t]:
            both, start = self._apply(m, own, self._inputs(m, read, rows)), 0
            for side in m.writes:
                stop = start + self.config.target.layers[t].width(side)
                found[side], start = both[:, start:stop], stop
        return found["keys"], found["values"]

    def of_layer(self, t: int) -> dict[str, Any]:
        """The tensors of target layer ``t``."""
        own = [self.state_maps[t]] if t in self.state_maps else self._by_layer[t]
        begins = tuple(f"{m.name}." for m in own)
        return {name: each for name, each in self.tensors.items() if name.startswith(begins)}

    @cached_property
    def state_maps(self) -> dict[int, StateMap]:
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
            made[first] = cast(cast(own, white.dtype) @ white, own.dtype)
        return made[first][..., rows, :]

    def _joined(self, m: Map, read: Read, rows: slice) -> Any:
        """The states of the layers read, joined: (T, in), or for head-wise maps (H, T, in)."""
        own = [read(side, s, rows) for side, s in m.reads]
        if m.heads is None:
            return own[0] if len(own) == 1 else self.operations.joined(own)
        heads = self.config.source.layers[0].kv_heads
        by_head = self.operations.joined([r.reshape(len(r), heads, -1) for r in own])
        return by_head.swapaxes(0, 1)[list(head_map_of(self.config))]

    def _apply(self, m: Map, tensors: Mapping[str, Any], x: Any) -> Any:
        """Apply one map to (T, in) or (H, T, in); returns (T, width) in the inputs' dtype."""
        head, do = f"{m.name}.", self.operations
        get = {
            name.removeprefix(head): do.cast(self.coordinates.applied(name, tensor), x.dtype)
            for name, tensor in tensors.items()
            if name.startswith(head)
        }
        return self.config.spec.apply(get, x, do.gelu, do.sigmoid)
