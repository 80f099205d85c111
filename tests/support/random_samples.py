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


class Random:
    """Samples of random tokens, by number: only ``different`` ones, held out or not."""

    def __init__(self, prefix: int = 40, continuation: int = 8, different: int = 3) -> None:
        self.lengths, self.different = (prefix, continuation), different

    def sample(self, index: int) -> Sample:
        rng = np.random.default_rng(index % self.different)
        prefix, continuation = self.lengths
        length = prefix // 2 + int(rng.integers(prefix))
        tokens = rng.integers(5, 280, length + continuation).tolist()
        return Sample(tuple(tokens[:length]), tuple(tokens[length:]))

    def held_out(self, count: int = 64) -> list[Sample]:
        return [Random.sample(self, i) for i in range(count)]
