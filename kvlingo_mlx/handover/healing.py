"""A target reads a prefix itself behind its translated cache, and puts its own entries in place.

A translation gives the first token at once and costs quality; a prefill gives the quality later.
Reading goes from the front on, as in a prefill, so each chunk attends to the target's own entries
only. Nothing is copied: a cache is ended at the chunk's start while the target runs it, and then
goes on to where it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream

from kvlingo_mlx import caches
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import unit

IDLE_S = 0.05  # the longest that a request should wait for a chunk that is being read
FIRST = 16  # tokens of the first chunk, before the pace is known
LEAST = 8  # tokens of a chunk between two decoding steps: fewer cost as much time as these
NEW = 0.3  # the weight of the latest chunk in the pace
WAYS = ("interleaved",)
HEAL_SHARE = 0.5  # of its speed, which decoding keeps

Reader = Callable[[int], int]  # reads at most so many tokens; returns how many, 0 at the end


@unit
def reread(model: LanguageModel, cache: Sequence[Any], tokens: Sequence[int], start: int) -> None:
    """Run ``tokens`` in the place of a cache's entries from position ``start`` on."""
    with mx.stream(generation_stream), caches.rewound(cache, start):
        model.model(mx.array(list(tokens))[None], cache=list(cache))
        mx.eval(caches.arrays(cache))


class Prefix:
    """A reader of the prefix of a cache, ``tokens``, from position ``begun`` on."""

    def __init__(
        self, model: LanguageModel, cache: Sequence[Any], tokens: Sequence[int], begun: int = 0
    ) -> None:
        self._model, self._cache, self._tokens, self.done = model, cache, tokens, begun

    def __call__(self, most: int) -> int:
        chunk = self._tokens[self.done : self.done + most]
        if chunk:
            reread(self._model, self._cache, chunk, self.done)
            self.done += len(chunk)
        return len(chunk)


class Pace:
    """How many tokens a reader reads in a second, as measured of its chunks.

    The first chunk also warms kernels up, so it only says where to begin.
    """

    def __init__(self) -> None:
        self._rate: float | None = None

    def within(self, seconds: float) -> int:
        """The tokens that take about so long."""
        return FIRST if self._rate is None else int(seconds * self._rate)

    def read(self, reader: Reader, most: int) -> tuple[int, float]:
        """Let a reader read; return how many tokens it read, and in how many seconds."""
        started = time.perf_counter()
        number = reader(most)
        seconds = time.perf_counter() - started
        if number:
            rate = number / seconds
            self._rate = rate if self._rate is None else self._rate + NEW * (rate - self._rate)
        return number, seconds


class Interleaved:
    """Reading between decoding steps, which leaves decoding a share of its speed.

    Call it after each decoding step. A step earns reading time by its own length, and a chunk is
    read as soon as the time earned is enough for one; so over an answer decoding has its share.
    Without a reader nothing is read, nor waited for.
    """

    def __init__(self, reader: Reader | None, share: float = HEAL_SHARE) -> None:
        self._reader, self._ratio = reader, 1 / share - 1
        self._pace, self._earned, self._last = Pace(), 0.0, time.perf_counter()
        self.finished = reader is None

    def began(self) -> None:
        """A decoding step begins."""
        self._last = time.perf_counter()

    def __call__(self) -> None:
        """A decoding step has ended; read, if enough time is earned."""
        if self.finished or self._reader is None:
            return
        self._earn()
        if self._pace.within(self._earned) < LEAST:
            return
        # mlx-lm has begun to compute the next token. That is decoding, and no part of the chunk.
        mx.synchronize(generation_stream)
        self._earn()
        number, seconds = self._pace.read(self._reader, self._pace.within(self._earned))
        self._earned -= seconds
        self.finished = not number

    def _earn(self) -> None:
        now = time.perf_counter()
        self._earned += self._ratio * (now - self._last)
        self._last = now


def check_share(way: str | None, share: float) -> None:
    """Refuse (ValueError) an unknown way to heal, or a share that is none."""
    if way not in (None, *WAYS):
        raise ValueError(f"heal is {way!r}; give {' or '.join(WAYS)}, or leave it out")
    if not 0 < share < 1:
        raise ValueError(
            f"heal_share is {share!r}; give the share of its speed that decoding keeps, between 0 "
            "and 1"
        )
