"""A translation for models with windows: a :class:`FastTranslation` for each group of like layers.

A group's layers share shape, window and rotation. A model without windows, such as Qwen3, is one
group. A window's layers translate and hold its last tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvlingo_mlx.cuda.fast_translation import METHODS, FastTranslation
from kvlingo_mlx.cuda.memory import Filled, FilledWindow, Memory, kept_of
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.format.translator_config import TranslatorConfig


@dataclass(frozen=True)
class Group:
    """Target layers that are alike, and their window; None where they see every token."""

    layers: tuple[int, ...]
    window: int | None


def groups_of(target: TorchModel) -> list[Group]:
    """The groups of a target's layers, each layer in one of them."""
    found: dict[Any, list[int]] = {}
    rotations = target.geometry.rope
    for index, layer in enumerate(target.geometry.layers):
        shape = (layer.kv_heads, layer.key_dim, layer.value_dim, layer.window)
        found.setdefault((shape, rotations[index]), []).append(index)
    return [
        Group(tuple(layers), target.geometry.layers[layers[0]].window) for layers in found.values()
    ]


@dataclass(frozen=True)
class GroupedMemory:
    """Memory for a target's whole cache, group by group."""

    groups: tuple[Group, ...]
    memories: tuple[Memory, ...]

    @classmethod
    def allocate(
        cls, target: TorchModel, num_tokens: int, dtype: torch.dtype, room: int = 1
    ) -> GroupedMemory:
        """Uninitialised memory for ``num_tokens`` tokens, and ``room`` more without a window."""
        groups, spec = tuple(groups_of(target)), target.spec()
        memories = []
        for group in groups:
            full = group.window is None
            capacity = num_tokens + room if full else kept_of(group.window, num_tokens)
            memories.append(Memory.allocate(spec, capacity, dtype, target.device, group.layers))
        return cls(groups, tuple(memories))

    @property
    def nbytes(self) -> int:
        arrays = [array for m in self.memories for array in (m.keys, m.values)]
        return sum(array.numel() * array.element_size() for array in arrays)

    def fill(self, value: float) -> None:
        """Set every number, for tests of what is written."""
        for memory in self.memories:
            memory.keys.fill_(value)
            memory.values.fill_(value)

    def held(self, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each target layer's keys and values (H, T, D) of the last tokens that it holds."""
        return [
            (keys[0, :, : kept_of(window, num_tokens)], values[0, :, : kept_of(window, num_tokens)])
            for (keys, values), window in self._rooms()
        ]

    def cache(self, num_tokens: int) -> Cache:
        """A transformers cache of ``num_tokens`` tokens, without a copy."""
        layers: list[Any] = [
            Filled(room, num_tokens) if window is None else FilledWindow(room, num_tokens, window)
            for room, window in self._rooms()
        ]
        return Cache(layers=layers)

    def _rooms(self) -> list[tuple[tuple[torch.Tensor, torch.Tensor], int | None]]:
        """In the order of the target's layers, each one's memory and its window."""
        found: dict[int, Any] = {}
        for group, memory in zip(self.groups, self.memories, strict=True):
            for layer, room in zip(group.layers, memory.rooms(), strict=True):
                found[layer] = (room, group.window)
        return [found[layer] for layer in sorted(found)]


@dataclass(frozen=True)
class GroupedTranslation:
    """A linear translator laid out group by group."""

    groups: tuple[Group, ...]
    parts: tuple[FastTranslation, ...]

    @classmethod
    def build(
        cls,
        config: TranslatorConfig,
        tensors: Mapping[str, torch.Tensor],
        target: TorchModel,
        positions: int,
        dtype: torch.dtype | None = None,
    ) -> GroupedTranslation:
        """Lay out a translator's tensors, as :meth:`FastTranslation.build`."""
        groups = tuple(groups_of(target))
        parts = [
            FastTranslation.build(config, tensors, target, positions, dtype, group.layers)
            for group in groups
        ]
        return cls(groups, tuple(parts))

    @property
    def methods(self) -> tuple[str, ...]:
        """The ``METHODS`` that every group has here."""
        return tuple(m for m in METHODS if all(m in part.methods for part in self.parts))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def flops(self, num_tokens: int) -> int:
        """The products' floating-point operations for a prefix of so many tokens."""
        both = zip(self.groups, self.parts, strict=True)
        return sum(kept_of(g.window, num_tokens) * part.flops_per_token for g, part in both)

    def __call__(
        self,
        states: Sequence[torch.Tensor],
        memory: GroupedMemory,
        start: int = 0,
        **options: Any,
    ) -> None:
        """Translate a whole prefix into the beginning of ``memory``.

        Args:
            states: The source's keys and values of every token, as :class:`FastTranslation` reads
                them.
            memory: Memory for as many tokens; windows get the last of them.
            start: The position of the first token.
            options: The method and the cuts, as for :class:`FastTranslation`.
        """
        tokens = states[0].shape[-2]
        for group, part, to in zip(self.groups, self.parts, memory.memories, strict=True):
            first = tokens - kept_of(group.window, tokens)
            keys, values = (array[..., first:, :] for array in states)
            part(keys, values, to, start + first, at=0, **options)
