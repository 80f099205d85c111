"""Translators as trainable tensors: every kind of the format, by the format's own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.training.coordinates import apart
from kvlingo_mlx.training.forward import Operations, Trainable

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TorchTranslator(Trainable):
    """A translator whose tensors PyTorch trains."""

    operations: ClassVar[Operations] = Operations(
        joined=lambda arrays: torch.cat(list(arrays), dim=-1),
        cast=torch.Tensor.to,
        float32=torch.float32,
        gelu=torch.nn.functional.gelu,
        sigmoid=torch.sigmoid,
    )

    @classmethod
    def from_arrays(
        cls, config: TranslatorConfig, arrays: Mapping[str, np.ndarray], device: torch.device | str
    ) -> TorchTranslator:
        """Trainable copies of ``arrays``, in float32 (float64 is kept), and their coordinates."""
        wide = any(array.dtype == np.float64 for array in arrays.values())

        def copied(array: np.ndarray) -> torch.Tensor:
            kept = np.asarray(array, np.float64 if wide else np.float32)
            return torch.tensor(kept, device=device)

        tensors, learnt = apart(arrays, config, copied)
        for tensor in tensors.values():
            tensor.requires_grad_()
        return cls(config, tensors, learnt)

    def descend(
        self, layer: int, error: Callable[[dict[str, torch.Tensor]], torch.Tensor], scale: float
    ) -> float:
        with torch.set_grad_enabled(scale != 0.0):
            found = error(self.tensors)
            if scale != 0.0:
                (found * scale).backward()
        return found.item()

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """The optimizer, without weight decay."""
        return torch.optim.AdamW(list(self.tensors.values()), weight_decay=0.0)

    @torch.no_grad()
    def arrays(self) -> dict[str, np.ndarray]:
        plain = {n: self.coordinates.plain(n, t) for n, t in self.tensors.items()}
        return {n: t.float().cpu().numpy().copy() for n, t in plain.items()}

    def state(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, tensor in self.tensors.items():
            moments = self.optimizer.state.get(tensor, {})
            kept = {name: tensor.detach(), **{f"{name}/{m}": moments[m] for m in moments}}
            found |= {n: np.atleast_1d(t.cpu().numpy()).copy() for n, t in kept.items()}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.tensor(state[name]))
            if f"{name}/step" in state:
                moments = {m: torch.tensor(state[f"{name}/{m}"]).to(tensor) for m in MOMENTS}
                step = torch.tensor(state[f"{name}/step"], dtype=torch.float32).reshape(())
                self.optimizer.state[tensor] = {"step": step, **moments}

    def gather(self, group: Group) -> bool:
        for tensor in self.tensors.values():
            if tensor.grad is None:  # this process had no conversation of the batch
                tensor.grad = torch.zeros_like(tensor)
        gradients = [t.grad for t in self.tensors.values() if t.grad is not None]
        group.add(gradients)
        return all(bool(g.isfinite().all()) for g in gradients)

    @torch.no_grad()
    def update(self, rate: float, clip: float) -> None:
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        torch.nn.utils.clip_grad_norm_(self.tensors.values(), clip)
        self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None
