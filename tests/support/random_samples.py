"""Samples of random tokens, and maps of random numbers."""

import math

import numpy as np

from kvlingo_mlx.format.maps import expected_shapes
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator


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


def random_arrays(config: TranslatorConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of the size a translator has, for every kind."""
    rng = np.random.default_rng(seed)
    gates = [f"keys.{t}.gate" for t in range(len(config.target.layers))]
    out = {}
    for name, shape in expected_shapes(config, gates if config.kind == "mlp" else ()).items():
        shape = tuple(6 if n == -1 else n for n in shape)
        out[name] = rng.normal(size=shape) / math.sqrt(shape[-1])
    return out


def random_translator(config: TranslatorConfig, seed: int = 0) -> Translator:
    return build(config, Weights.from_float32(random_arrays(config, seed), "float32"))
