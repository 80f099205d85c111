"""How the fused kernel is cut; a file of its own, since :mod:`.kernels` needs Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How the fused kernel is cut: tokens and inputs at a time, warps, pipeline stages."""

    tokens: int
    inputs: int
    warps: int
    stages: int
