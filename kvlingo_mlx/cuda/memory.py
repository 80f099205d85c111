"""Memory for a target's cache on a GPU, written in place and used for decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

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


@dataclass(frozen=True)
class Memory:
    """Preallocated memory for a target's keys and values, (L, H, capacity, D) each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> Memory:
        """Allocate uninitialised memory for ``capacity`` tokens."""
        geometry = alike(spec)
        return cls(
            *(
                torch.empty(
                    (len(spec.layers), geometry.kv_heads, capacity, geometry.head_dim(side)),
                    dtype=dtype,
                    device=device,
                )
                for side in SIDES
            )
        )

    def cache(self, num_tokens: int) -> Cache:
        """A cache for decoding, with the first ``num_tokens`` of this memory and room to grow."""
        rooms = zip(self.keys[:, None], self.values[:, None], strict=True)
        return Cache(layers=[Filled(room, num_tokens) for room in rooms])


def alike(spec: ModelSpec) -> LayerGeometry:
    """The shape that all layers of a model share.

    Raises:
        UnsupportedModelError: The shapes differ, or the layers keep windows or latents.
    """
    shapes = {(g.kv_heads, g.key_dim, g.value_dim, g.attention, g.window) for g in spec.layers}
    if len(shapes) > 1 or spec.layers[0].attention != "full":
        raise UnsupportedModelError(
            f"the layers of {spec.name} differ or keep windows or latents; translate layer by layer"
        )
    return spec.layers[0]
