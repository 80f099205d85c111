"""Translators as trainable MLX arrays: every kind of the format, by the format's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
from mlx.optimizers import AdamW

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import unit
from kvlingo_mlx.training.coordinates import Coordinates, apart
from kvlingo_mlx.training.forward import Maps, Operations
from kvlingo_mlx.translators.state_maps import mapped

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}  # MLX's names, and those of checkpoints


def _chosen(array: mx.array, rows: Sequence[int]) -> mx.array:
    return array[mx.array(list(rows))]


OPERATIONS = Operations(
    joined=lambda arrays: mx.concatenate(list(arrays), axis=-1),
    chosen=_chosen,
    cast=lambda tensor, like: tensor.astype(like.dtype),
    gelu=nn.gelu,
    sigmoid=mx.sigmoid,
)


@dataclass(frozen=True)
class MLXTranslator:
    """A translator's float32 tensors by name, in their coordinates, and their computation."""

    config: TranslatorConfig
    tensors: dict[str, mx.array]
    coordinates: Coordinates
    gradients: dict[str, mx.array] = field(default_factory=dict)

    @classmethod
    def from_arrays(
        cls, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]
    ) -> MLXTranslator:
        """Trainable copies of ``arrays``, in float32, and their coordinates."""
        return cls(config, *apart(arrays, config, lambda a: mx.array(np.asarray(a, np.float32))))

    def layer(
        self,
        t: int,
        states: KVStates,
        tensors: Mapping[str, mx.array] | None = None,
        dtype: mx.Dtype | None = None,
        rows: slice = slice(None),
    ) -> tuple[mx.array, mx.array]:
        """The keys and values of target layer ``t``, (T, width) each, of some of the tokens.

        They are made from the source's states, in ``dtype`` if there is one. ``tensors`` stand in
        for its own.
        """

        def read(side: str, s: int, rows: slice) -> mx.array:
            array = states.side(side)[s][0, rows]
            return array if dtype is None else array.astype(dtype)

        own = self.tensors if tensors is None else tensors
        return self._maps.layer(own, t, states, read, rows)

    def mapped_state(
        self, t: int, kept: Mapping[int, mx.array], tensors: Mapping[str, mx.array] | None = None
    ) -> mx.array:
        """The mapped state of target layer ``t`` from the source's by layer.

        ``tensors`` stand in for its own.
        """
        own, m = self.tensors if tensors is None else tensors, self._maps.states[t]
        return mapped(m, kept, *(own[f"{m.name}.{name}"] for name in m.shapes))

    def of_layer(self, t: int) -> dict[str, mx.array]:
        """The tensors of target layer ``t``."""
        begins = tuple(self._maps.names(t))
        return {name: a for name, a in self.tensors.items() if name.startswith(begins)}

    @cached_property
    def _maps(self) -> Maps:
        return Maps(self.config, OPERATIONS, self.coordinates)

    @cached_property
    def _optimizer(self) -> AdamW:
        """PyTorch's AdamW, without weight decay."""
        made = AdamW(0.0, weight_decay=0.0, bias_correction=True)
        made.init(self.tensors)
        return made

    @unit
    def learn(self, gradients: Mapping[str, mx.array]) -> None:
        """Add to the gradients."""
        for name, gradient in gradients.items():
            there = self.gradients.get(name)
            self.gradients[name] = gradient if there is None else there + gradient
        mx.eval(self.gradients)

    def arrays(self) -> dict[str, np.ndarray]:
        """The translator's tensors, in float32."""
        return {n: np.array(self.coordinates.plain(n, a)) for n, a in self.tensors.items()}

    def state(self) -> dict[str, np.ndarray]:
        """The tensors in their coordinates, and the optimizer's moments as PyTorch has them."""
        kept = self._optimizer.state
        found = {name: np.array(array) for name, array in self.tensors.items()}
        if not self._optimizer.step.item():
            return found
        for name in self.tensors:
            found |= {f"{name}/{MOMENTS[m]}": np.array(a) for m, a in kept[name].items()}
            found[f"{name}/step"] = np.array([self._optimizer.step.item()], np.float32)
        return found

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Become what gave :meth:`state`."""
        kept: dict[str, Any] = self._optimizer.state
        for name in self.tensors:
            self.tensors[name] = mx.array(state[name])
            if f"{name}/step" in state:
                kept[name] = {m: mx.array(state[f"{name}/{n}"]) for m, n in MOMENTS.items()}
                kept["step"] = mx.array(int(state[f"{name}/step"].item()), mx.uint64)

    def gather(self, group: Group) -> bool:
        """Sum the gradients over all processes; returns whether they are finite."""
        for name, tensor in self.tensors.items():
            self.gradients.setdefault(name, mx.zeros_like(tensor))
        if group.size > 1:
            sums = group.add(self.gradients[name] for name in self.tensors)
            # In one order everywhere, so that their norm is rounded alike: a process without a
            # conversation has the tensors' order, others that in which gradients came.
            self.gradients.clear()
            self.gradients.update(zip(self.tensors, sums, strict=True))
        return all(mx.isfinite(g).all().item() for g in self.gradients.values())

    @unit
    def update(self, rate: float, clip: float) -> None:
        """Take one clipped AdamW step, tensor by tensor.

        All at once they would take the memory of five more translators.
        """
        squares = [mx.square(gradient).sum() for gradient in self.gradients.values()]
        norm = mx.sqrt(mx.stack(squares).sum())
        scale = mx.minimum(clip / (norm + 1e-6), 1.0)  # as PyTorch clips
        optimizer, kept = self._optimizer, self._optimizer.state
        optimizer.learning_rate = rate
        kept["step"] = optimizer.step + 1
        for name, tensor in self.tensors.items():
            gradient = scale * self.gradients.pop(name)
            self.tensors[name] = optimizer.apply_single(gradient, tensor, kept[name])
            mx.eval(self.tensors[name], kept[name])

    def forget(self) -> None:
        """Drop the gradients."""
        self.gradients.clear()
