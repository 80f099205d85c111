"""Wall times and memory of PyTorch's work on a GPU, and the rates that it could reach."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

SETTLED, MOST_WARM_UPS = 0.05, 10
Action = Callable[[], Any]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(action: Action, device: str) -> float:
    """The wall seconds of an action, between two synchronisations."""
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started


def warmed_up(action: Action, device: str) -> float:
    """Run until two times in a row are close to the best one; the best."""
    best, close = math.inf, 0
    for _ in range(MOST_WARM_UPS):
        found = seconds(action, device)
        close = close + 1 if abs(found - best) <= SETTLED * best else 0
        best = min(best, found)
        if close >= 2:
            break
    return best


def extra_bytes(action: Action, device: str) -> int | None:
    """Most bytes that an action allocates above what there is; PyTorch counts none on a CPU."""
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


def captured(action: Action) -> Action:
    """An action as a CUDA graph; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def rates(device: str, dtype: torch.dtype, size: int) -> dict[str, float]:
    """FLOP/s of a large product, bytes/s (read and written) of a large copy; the best of some."""
    there: dict[str, Any] = {"device": device, "dtype": dtype}
    a, b = (torch.randn(size, size, **there) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(4):
            torch.mm(a, b, out=out)

    product = min(seconds(products, device) for _ in range(10)) / 4
    long = torch.randn(16 * size * size, **there)
    other = torch.empty_like(long)
    copied = min(seconds(lambda: other.copy_(long), device) for _ in range(10))
    return {
        "gemm_flops": 2 * size**3 / product,
        "copy_bytes": 2 * long.numel() * long.element_size() / copied,
    }


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """All samples in seconds, with their median, least and distance between the quartiles."""
    low, high = np.percentile(samples, (25, 75))
    return {
        "samples_s": list(samples),
        "median_s": float(np.median(samples)),
        "min_s": min(samples),
        "iqr_s": float(high - low),
    }
