"""Translators as trainable tensors: every kind of the format, by the format's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvlingo_mlx.cuda.model import States
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.training.coordinates import Coordinates, apart
from kvlingo_mlx.training.forward import Maps, Operations

MOMENTS = ("exp_avg", "exp_avg_sq")


OPERATIONS = Operations(
    joined=lambda arrays: torch.cat(list(arrays), dim=-1),
    chosen=lambda array, rows: array[list(rows)],
    cast=lambda tensor, like: tensor.to(like.dtype),
    gelu=torch.nn.functional.gelu,
    sigmoid=torch.sigmoid,
)


@dataclass(frozen=True)
class TorchTranslator:
    """A translator's float32 tensors by name, and their computation."""

    config: TranslatorConfig
    tensors: dict[str, torch.Tensor]
    coordinates: Coordinates

    @classmethod
    def from_arrays(
        cls, config: TranslatorConfig, arrays: Mapping[str, np.ndarray], device: torch.device | str
    ) -> TorchTranslator:
        """Trainable copies of ``arrays``, in float32 (float64 is kept), and their coordinates."""

        def copied(array: np.ndarray) -> torch.Tensor:
            array = array if array.dtype == np.float64 else np.asarray(array, np.float32)
            return torch.tensor(array, device=device)

        tensors, learnt = apart({n: copied(a) for n, a in arrays.items()}, config)
        for tensor in tensors.values():
            tensor.requires_grad_()
        return cls(config, tensors, learnt)

    def layer(self, t: int, states: States, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Target layer ``t``'s keys and values (T, width), of source tokens from ``start`` on."""
        return self._maps.layer(self.tensors, t, lambda side, s: states.side(side)[s][start:])

    @cached_property
    def _maps(self) -> Maps:
        return Maps(self.config, OPERATIONS)

    @cached_property
    def _steps(self) -> dict[str, torch.Tensor]:
        """Zeros from which the optimizer makes each tensor's step, in its coordinates."""
        return {n: torch.zeros_like(t, requires_grad=True) for n, t in self.tensors.items()}

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """The optimizer, without weight decay."""
        return torch.optim.AdamW(list(self._steps.values()), weight_decay=0.0)

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the tensors, in float32."""
        return {n: t.detach().float().cpu().numpy().copy() for n, t in self.tensors.items()}

    def state(self) -> dict[str, np.ndarray]:
        """The tensors and the optimizer's moments."""
        found: dict[str, np.ndarray] = {}
        for name, tensor in self.tensors.items():
            moments = self.optimizer.state.get(self._steps[name], {})
            kept = {name: tensor.detach(), **{f"{name}/{m}": moments[m] for m in moments}}
            found |= {n: np.atleast_1d(t.cpu().numpy()).copy() for n, t in kept.items()}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Become what gave :meth:`state`."""
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.tensor(state[name]))
            if f"{name}/step" in state:
                moments = {m: torch.tensor(state[f"{name}/{m}"]).to(tensor) for m in MOMENTS}
                step = torch.tensor(state[f"{name}/step"], dtype=torch.float32).reshape(())
                self.optimizer.state[self._steps[name]] = {"step": step, **moments}

    def gather(self, group: Group) -> bool:
        """Sum the gradients over all processes; returns whether they are finite."""
        for tensor in self.tensors.values():
            if tensor.grad is None:  # this process had no conversation of the batch
                tensor.grad = torch.zeros_like(tensor)
        gradients = [t.grad for t in self.tensors.values() if t.grad is not None]
        group.add(gradients)
        return all(bool(g.isfinite().all()) for g in gradients)

    @torch.no_grad()
    def update(self, rate: float, clip: float) -> None:
        """Take one clipped AdamW step."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        torch.nn.utils.clip_grad_norm_(self.tensors.values(), clip)
        for name, tensor in self.tensors.items():
            self._steps[name].grad = self.coordinates.turned(name, tensor.grad)
        self.optimizer.step()
        for name, tensor in self.tensors.items():
            tensor.add_(self.coordinates.turned(name, self._steps[name]))
            self._steps[name].zero_()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        for tensor in (*self.tensors.values(), *self._steps.values()):
            tensor.grad = None
