"""Reads a known continuation token by token from a cache: the target's prediction at each token.

Logits are computed one block of tokens at a time. Only the target's own predictions are kept for a
whole continuation, (M, V) in float32, since every condition is compared with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np

from kvlingo_mlx.evaluation.conditions import CacheMaker
from kvlingo_mlx.models.language_model import LanguageModel

BLOCK = 256  # tokens; with a vocabulary of 150k one block is 150 MB


@dataclass(frozen=True)
class PerToken:
    """The predictions at each of M continuation tokens."""

    kl: np.ndarray  # (M,) KL(native || this), in nats
    nll: np.ndarray  # (M,) minus the log probability of the true token, in nats
    best: np.ndarray  # (M,) the token id of the highest probability


def log_probabilities(
    target: LanguageModel, cache: list, last: int, continuation: Sequence[int]
) -> Iterator[mx.array]:
    """The target's log probabilities at each continuation token, as (at most BLOCK, V) blocks.

    ``cache`` holds the tokens before ``last``; it cannot be used again afterwards.
    """
    tokens = [last, *continuation[:-1]]
    for start in range(0, len(tokens), BLOCK):
        block = mx.array(tokens[start : start + BLOCK])
        logits = target.model(block[None], cache=cache)[0]
        yield nn.log_softmax(logits.astype(mx.float32))


def predicted(target: LanguageModel, make: CacheMaker, sample: Any) -> Iterator[mx.array]:
    """:func:`log_probabilities` of a sample's continuation, from the cache that ``make`` fills."""
    cache = make(sample.aligned or sample.prefix)
    return log_probabilities(target, cache, sample.prefix[-1], sample.continuation)


def per_token(
    reference: Iterable[mx.array], blocks: Iterable[mx.array], continuation: Sequence[int]
) -> PerToken:
    """Compare a condition's predictions with the target's own (``reference``)."""
    parts: list[tuple[np.ndarray, ...]] = []
    start = 0
    for native, logs in zip(reference, blocks, strict=True):
        true = mx.array(list(continuation[start : start + len(logs)]))[:, None]
        kl = (mx.exp(native) * (native - logs)).sum(axis=-1)
        nll = -mx.take_along_axis(logs, true, axis=-1)[:, 0]
        parts.append(tuple(np.array(a) for a in (kl, nll, mx.argmax(logs, axis=-1))))
        start += len(logs)
    return PerToken(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
