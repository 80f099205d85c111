"""Translators as trainable MLX arrays: every kind of the format, by the format's own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from kvlingo_mlx.backend import mx, nn

import numpy as np
from mlx.optimizers import AdamW

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.threads import unit
from kvlingo_mlx.training.coordinates import apart
from kvlingo_mlx.training.forward import Operations, Trainable
from kvlingo_mlx.translators.state_maps import mapped

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}  # MLX's names, and those of checkpoints


@dataclass(frozen=True)
class MLXTranslator(Trainable):
    """A translator whose tensors MLX trains."""

    operations: ClassVar[Operations] = Operations(
        joined=lambda arrays: mx.concatenate(list(arrays), axis=-1),
        cast=mx.array.astype,
        float32=mx.float32,
        gelu=nn.gelu,
        sigmoid=mx.sigmoid,
    )

    gradients: dict[str, mx.array] = field(default_factory=dict)

    @classmethod
    def from_arrays(
        cls, config: TranslatorConfig, arrays: Mapping[str, np.ndarray]
    ) -> MLXTranslator:
        """Trainable copies of ``arrays``, in float32, and their coordinates."""
        return cls(config, *apart(arrays, config, lambda a: mx.array(np.asarray(a, np.float32))))

    def mapped_state(
        self, t: int, kept: Mapping[int, mx.array], tensors: Mapping[str, mx.array] | None = None
    ) -> mx.array:
        """The mapped state of target layer ``t`` from the source's by layer.

        ``tensors`` stand in for its own.
        """
        own, m = self.tensors if tensors is None else tensors, self.state_maps[t]
        return mapped(m, kept, *(own[f"{m.name}.{name}"] for name in m.shapes))

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

    @unit
    def descend(
        self, layer: int, error: Callable[[dict[str, mx.array]], mx.array], scale: float
    ) -> float:
        tensors = self.of_layer(layer)
        if scale == 0.0:
            return float(error(tensors).item())  # type: ignore[arg-type]
        value, gradients = mx.value_and_grad(error)(tensors)
        self.learn({name: scale * g for name, g in gradients.items()})
        return float(value.item())  # type: ignore[arg-type]

    def arrays(self) -> dict[str, np.ndarray]:
        return {n: np.array(self.coordinates.plain(n, a)) for n, a in self.tensors.items()}

    def state(self) -> dict[str, np.ndarray]:
        kept = self._optimizer.state
        found = {name: np.array(array) for name, array in self.tensors.items()}
        if not self._optimizer.step.item():
            return found
        for name in self.tensors:
            found |= {f"{name}/{MOMENTS[m]}": np.array(a) for m, a in kept[name].items()}
            found[f"{name}/step"] = np.array([self._optimizer.step.item()], np.float32)
        return found

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        kept: dict[str, Any] = self._optimizer.state
        for name in self.tensors:
            self.tensors[name] = mx.array(state[name])
            if f"{name}/step" in state:
                kept[name] = {m: mx.array(state[f"{name}/{n}"]) for m, n in MOMENTS.items()}
                kept["step"] = mx.array(int(state[f"{name}/step"].item()), mx.uint64)

    def gather(self, group: Group) -> bool:
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
        self.gradients.clear()
