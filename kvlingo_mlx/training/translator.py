"""Translators as trainable tensors: every kind of the format, by the format's own names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvlingo_mlx.format.kinds import TENSORS
from kvlingo_mlx.format.maps import Map, head_map_of, maps_of, shapes_of
from kvlingo_mlx.format.tensor_file import DType, Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.training.torch_model import States


@dataclass(frozen=True)
class TorchTranslator:
    """A translator's float32 tensors by name, and their computation."""

    config: TranslatorConfig
    tensors: dict[str, torch.Tensor]

    @classmethod
    def from_arrays(
        cls, config: TranslatorConfig, arrays: Mapping[str, np.ndarray], device: torch.device | str
    ) -> TorchTranslator:
        """Trainable copies of ``arrays``, in float32 (float64 is kept)."""
        tensors = {}
        for name, array in arrays.items():
            array = array if array.dtype == np.float64 else np.asarray(array, np.float32)
            tensors[name] = torch.tensor(array, device=device).requires_grad_()
        return cls(config, tensors)

    def to_weights(self, dtype: DType = "float32") -> Weights:
        """The tensors in the form in which they are written to disk."""
        arrays = {name: t.detach().float().cpu().numpy() for name, t in self.tensors.items()}
        return Weights.from_float32(arrays, dtype)

    def layer(self, t: int, states: States, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of target layer ``t``, (T, width) each, from the source's states.

        Only the tokens from ``start`` on are translated.
        """
        found: dict[str, torch.Tensor] = {}
        for m in self._maps[t]:
            both = self._apply(m, self._inputs(m, states, start))
            widths = [self.config.target.layers[t].width(side) for side in m.writes]
            found |= zip(m.writes, both.split(widths, dim=-1), strict=True)
        return found["keys"], found["values"]

    @cached_property
    def _maps(self) -> dict[int, list[Map]]:
        found: dict[int, list[Map]] = defaultdict(list)
        for m in maps_of(self.config):
            found[m.layer].append(m)
        return found

    def _inputs(self, m: Map, states: States, start: int) -> torch.Tensor:
        """The states of the layers read, joined: (T, in), or for head-wise maps (H, T, in)."""
        read = [states.side(side)[s][start:] for side, s in m.reads]
        if m.heads is None:
            return read[0] if len(read) == 1 else torch.cat(read, dim=-1)
        layers = self.config.source.layers
        heads = [r.view(len(r), layers[0].kv_heads, -1) for r in read]
        return torch.cat(heads, dim=-1).transpose(0, 1)[list(head_map_of(self.config))]

    def _apply(self, m: Map, x: torch.Tensor) -> torch.Tensor:
        """Apply one map to (T, in) or (H, T, in); returns (T, width) in the inputs' dtype."""
        get = self._tensors_of(m.name, x.dtype)
        y = self.config.spec.formula(get, x, torch.nn.functional.gelu)
        y = y if y.ndim == 2 else y.transpose(0, 1).flatten(1)
        if "gate" in get:
            gate = torch.sigmoid(get["gate"])[:, None]
            y = (y.view(len(y), len(gate), -1) * gate).flatten(1)
        return y + get["bias"] if "bias" in get else y

    def _tensors_of(self, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        head = f"{name}."
        found = {n.removeprefix(head): t for n, t in self.tensors.items() if n.startswith(head)}
        return {n: tensor.to(dtype) for n, tensor in found.items()}


def initial(
    config: TranslatorConfig, hidden: int, seed: int, *, gated: bool
) -> dict[str, np.ndarray]:
    """The initial tensors that no closed form gives (appendix "Training protocol").

    An MLP starts as PyTorch starts a linear layer, with gates (``gated``) at sigmoid(4). An MLP
    beside a linear map starts with an output of zero.
    """
    generator, spec = torch.Generator().manual_seed(seed), config.spec
    gates = ("gate",) if gated and "gate" in spec.optional else ()
    arrays: dict[str, np.ndarray] = {}
    for m in maps_of(config):
        shapes = shapes_of(config, m, (*spec.learnt, *gates), hidden)
        for name, shape in shapes.items():
            start = TENSORS[name].start
            if isinstance(start, str):
                draw = torch.rand(shape, generator=generator) * 2 - 1
                many = {"inputs": m.inputs, "hidden": hidden}[start]
                bound = 0.0 if name in spec.silent else 1 / math.sqrt(many)
                arrays[f"{m.name}.{name}"] = (bound * draw).numpy()
            else:
                arrays[f"{m.name}.{name}"] = np.full(shape, start, np.float32)
    return arrays
