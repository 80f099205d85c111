"""The caches that mlx-lm's own prefill leaves, and what is decoded from them."""

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from kvlingo_mlx import backend, caches
from kvlingo_mlx.models.language_model import LanguageModel

TOKENS = [(7 * i * i + 3 * i + 5) % 280 for i in range(60)]
WINDOW = 16
STEPS = 20
WRONG = 1e-2  # what a mistake must exceed, of a layer's norm or in a logit
LENGTHS = [WINDOW - 5, WINDOW + 1, len(TOKENS)]  # before, at and far beyond a window's wrap


def native(model: LanguageModel, tokens: list[int], step: int) -> list[Any]:
    """The cache that mlx-lm's own prefill leaves."""
    cache = make_prompt_cache(model.model)
    for start in range(0, len(tokens), step):
        model.model(mx.array([tokens[start : start + step]]), cache=cache)
        mx.eval([c.state for c in cache])
    return cache


def held(cache: Any) -> list[np.ndarray]:
    """The keys and values that decoding still sees, oldest first."""
    arrays = cache.keys_and_values()
    if isinstance(cache, RotatingKVCache):
        kept = min(cache.offset, cache.max_size)
        arrays = [cache._temporal_order(a)[..., -kept:, :] for a in (cache.keys, cache.values)]
    return [np.array(array.astype(mx.float32)) for array in arrays]


def entries(cache: Sequence[Any]) -> list[np.ndarray]:
    """What the layers' caches hold, in order: keys and values up to their ends, or states."""
    return [
        np.array((a if caches.is_recurrent(each) else a[..., : each.offset, :]).astype(mx.float32))
        for each in cache
        for a in caches.held(each).values()
    ]


def logits(model: LanguageModel, cache: list[Any], first: int, steps: int = STEPS) -> np.ndarray:
    rows, token = [], first
    for _ in range(steps):
        row = model.model(mx.array([[token]]), cache=cache)[0, -1]
        rows.append(np.array(row.astype(mx.float32)))
        token = int(rows[-1].argmax())
    return np.stack(rows)


def alike(found: Any, expected: Any, rounding: float = 1e-5) -> bool:
    """Equal to the bit; on a GPU, whose sums go by shape and layout, to a share of the largest."""
    most = rounding * np.abs(np.array(expected)).max() if backend.on_gpu() else 0
    return found.shape == expected.shape and np.allclose(found, expected, rtol=0, atol=most)


def errors(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """The relative Frobenius error of each layer."""
    pairs = list(zip(found, expected, strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])
