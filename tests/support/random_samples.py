"""Samples of random tokens."""

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


class Numbered:
    """Samples of random tokens by number, whose lengths differ much."""

    def sample(self, index: int) -> Sample:
        rng = np.random.default_rng(index)
        length = 10 + int(rng.integers(60))
        tokens = rng.integers(5, 280, length + 8).tolist()
        return Sample(tuple(tokens[:length]), tuple(tokens[length:]))

    def held_out(self, count: int = 64) -> list[Sample]:
        return [self.sample(1000 + i) for i in range(count)]
