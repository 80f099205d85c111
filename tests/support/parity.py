"""How near a hand-over must be to the reference, and how far what is wrong must be."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
from mlx_lm.models.cache import RotatingKVCache

from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny

CACHE_TOLERANCE = 1e-5  # Frobenius norm, relative, of every layer and side
LOGITS_TOLERANCE = 1e-4  # absolute
WRONG = 1e-2  # what a mistake must exceed


@dataclass(frozen=True)
class Outcome:
    """A target's cache, (H, T, D) a layer, and its logits for the last token."""

    keys: Sequence[np.ndarray]
    values: Sequence[np.ndarray]
    logits: np.ndarray


def decode(model: LanguageModel, cache: list[Any], token: int) -> Outcome:
    """Take a copy of an mlx-lm cache, oldest token first, then run one token with it."""
    keys, values = ([in_order(c, array) for c, array in zip(cache, side, strict=True)]
                    for side in ([c.keys for c in cache], [c.values for c in cache]))  # fmt: skip
    logits = model.model(mx.array([[token]]), cache=cache)
    return Outcome(keys, values, np.array(logits[0, -1]))


def in_order(cache: Any, buffer: mx.array) -> np.ndarray:
    """What a cache's buffer (1, H, room, D) holds, (H, T, D): of a ring its last tokens."""
    if isinstance(cache, RotatingKVCache):
        kept = min(cache.offset, cache.max_size)
        return np.array(cache._temporal_order(buffer)[0, :, -kept:])
    return np.array(buffer[0, :, : cache.offset])


def within_windows(folder: Path, outcome: Outcome) -> Outcome:
    """The last tokens alone where a model's layer attends to no more."""
    config = json.loads((folder / "config.json").read_text())
    keys, values = (
        [array[:, -(tiny.layer_window(config, t) or array.shape[1]) :] for t, array in enumerate(s)]
        for s in (outcome.keys, outcome.values)
    )
    return Outcome(keys, values, outcome.logits)


def errors(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """The relative Frobenius error of each layer."""
    pairs = list(zip(found, expected, strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])


def logits_error(found: Outcome, expected: Outcome) -> float:
    """The largest difference of a logit."""
    assert found.logits.shape == expected.logits.shape
    return float(np.abs(found.logits - expected.logits).max())


def assert_same(found: Outcome, expected: Outcome, tolerance: float = CACHE_TOLERANCE) -> None:
    """Every layer's keys and values and the logits agree; a NaN agrees with nothing."""
    assert errors(found.keys, expected.keys).max() <= tolerance
    assert errors(found.values, expected.values).max() <= tolerance
    assert logits_error(found, expected) <= LOGITS_TOLERANCE
