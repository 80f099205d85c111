"""Memory for a target's cache on a GPU, written in place and used for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.translator_config import ModelSpec


class Filled(DynamicLayer):
    """A layer of a transformers cache that grows within preallocated memory, without copies."""

    def __init__(self, room: tuple[torch.Tensor, torch.Tensor], num_tokens: int) -> None:
        super().__init__()
        self.room = room
        self.dtype, self.device = room[0].dtype, room[0].device
        self.is_initialized = True
        self._show(num_tokens)

    def _show(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (array[:, :, :num_tokens] for array in self.room)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens after the existing ones; returns the keys and values of all tokens."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        return self._show(end)


class FilledWindow(DynamicSlidingWindowLayer):
    """A layer with a window, filled with its last tokens without a copy."""

    def __init__(
        self, room: tuple[torch.Tensor, torch.Tensor], num_tokens: int, window: int
    ) -> None:
        super().__init__(window)
        kept = kept_of(window, num_tokens)
        self.keys, self.values = (array[:, :, :kept] for array in room)
        self.dtype, self.device = room[0].dtype, room[0].device
        self.is_initialized, self.cumulative_length = True, num_tokens


def kept_of(window: int | None, num_tokens: int) -> int:
    """How many of ``num_tokens`` tokens a layer of a cache holds: the next one sees itself too."""
    return num_tokens if window is None else min(num_tokens, window - 1)


@dataclass(frozen=True)
class Memory:
    """Preallocated memory for a target's keys and values, (L, H, capacity, D) each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: Sequence[int] | None = None,
    ) -> Memory:
        """Allocate uninitialised memory for ``capacity`` tokens of some layers, or of all."""
        geometry = alike(spec, layers)
        count = len(spec.layers if layers is None else layers)
        return cls(
            *(
                torch.empty(
                    (count, geometry.kv_heads, capacity, geometry.head_dim(side)),
                    dtype=dtype,
                    device=device,
                )
                for side in SIDES
            )
        )

    def rooms(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values, (1, H, capacity, D)."""
        return list(zip(self.keys[:, None], self.values[:, None], strict=True))

    def cache(self, num_tokens: int) -> Cache:
        """A cache for decoding, with the first ``num_tokens`` of this memory and room to grow."""
        return Cache(layers=[Filled(room, num_tokens) for room in self.rooms()])


def alike(spec: ModelSpec, layers: Sequence[int] | None = None) -> LayerGeometry:
    """The shape that all layers of a model share, or that some of them do, windows included.

    Raises:
        UnsupportedModelError: The shapes differ, or the layers keep latents; of all layers, also
            where they keep windows.
    """
    those = [spec.layers[i] for i in (range(len(spec.layers)) if layers is None else layers)]
    shapes = {(g.kv_heads, g.key_dim, g.value_dim, g.attention, g.window) for g in those}
    kinds = ("full",) if layers is None else ("full", "sliding")
    if len(shapes) > 1 or those[0].attention not in kinds:
        raise UnsupportedModelError(
            f"the layers of {spec.name} differ or keep windows or latents; translate layer by layer"
        )
    return those[0]


def one_width(spec: ModelSpec) -> None:
    """Refuse (UnsupportedModelError) a source whose layers' states differ in shape.

    Windows do not matter: states are recorded for every token.
    """
    shapes = {(g.kv_heads, g.key_dim, g.value_dim) for g in spec.layers}
    if len(shapes) > 1 or spec.layers[0].attention == "latent":
        raise UnsupportedModelError(
            f"the states of {spec.name}'s layers differ in shape or are latents; translate layer "
            "by layer"
        )
