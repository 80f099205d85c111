"""The PyTorch side of `training_throughput.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.gpu.switch import build_target, seconds
from benchmarks.paper.timing.widths import shape_of
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.tokenization.samples import Sample


class Side:
    """See :class:`training_throughput.Side`."""

    def __init__(self, args: argparse.Namespace, sample: Sample) -> None:
        if args.threads:
            torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        source, target = (
            build_target(name, shape_of(name, args.layers), args.device, getattr(torch, args.dtype))
            for name in (args.source, args.target)
        )
        self.ends, self.sample = (source, target), sample
        count, spec = len(sample.prefix) - 1, target.geometry.layers[0]
        shape = (1, spec.kv_heads, count, spec.key_dim)
        self._native = [
            [torch.randn(shape, device=target.device, dtype=target.dtype) for _ in range(2)]
            for _ in target.attentions
        ]
        self._device = args.device
        if args.device != "cpu":
            torch.cuda.reset_peak_memory_stats()

    @torch.no_grad()
    def read(self, model: TorchModel) -> None:
        model.hidden(self.sample.prefix[:-1])

    def continue_(self, *, backward: bool) -> None:
        target, sample = self.ends[1], self.sample
        tokens = (sample.prefix[-1], *sample.continuation[:-1])
        labels = torch.tensor(sample.continuation, device=target.device)
        leaves = [tuple(a.detach().requires_grad_(backward) for a in p) for p in self._native]
        with torch.set_grad_enabled(backward):
            hidden = target.hidden(tokens, target.cache(leaves, len(sample.prefix) - 1))
            loss = cross_entropy(target.logits(hidden), labels)
        if backward:
            loss.backward()

    def timed(self, action: Callable[[], object]) -> float:
        return seconds(action, self._device)

    def facts(self) -> dict[str, Any]:
        if self._device == "cpu":
            return {}
        peak = torch.cuda.max_memory_allocated()
        return {"gpu": torch.cuda.get_device_name(), "peak_bytes": peak}
