"""Samples of random tokens."""

from __future__ import annotations

import numpy as np

from kvlingo_mlx.tokenization.samples import Sample


def samples(count: int, tokens: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            tuple(rng.integers(5, 280, tokens).tolist()), tuple(rng.integers(5, 280, 9).tolist())
        )
        for _ in range(count)
    ]
