"""A target reads a prefix itself behind its translated cache, and puts its own entries in place.

A translation gives the first token at once and costs quality; a prefill gives the quality later.
Reading goes from the front on, as in a prefill, so each chunk attends to the target's own entries
only. Nothing is copied: a cache is ended at the chunk's start while the target runs it, and then
goes on to where it ended.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream

from kvlingo_mlx import caches
from kvlingo_mlx.caches.limits import check_interleaving
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.group import ALONE, Group
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.threads import unit

IDLE_S = 0.05  # the longest that a request should wait for a chunk that is being read
FIRST = 16  # tokens of the first chunk, before the pace is known
LEAST = 8  # tokens of a chunk between two decoding steps: fewer cost as much time as these
NEW = 0.3  # the weight of the latest chunk in the pace
LAYERS = "layers"  # the way to heal that reads first layers at once
HEAL_SHARE = 0.5  # of its speed, which decoding keeps

Reader = Callable[[int], int]  # reads at most so many tokens; returns how many, 0 at the end


@unit
def reread(model: LanguageModel, cache: Sequence[Any], tokens: Sequence[int], start: int) -> None:
    """Run ``tokens`` in the place of a cache's entries from position ``start`` on."""
    with mx.stream(generation_stream), caches.rewound(cache, start):
        model.model(mx.array(list(tokens))[None], cache=list(cache))
        mx.eval(caches.arrays(cache))


class Pace:
    """How many tokens a reader reads in a second, as measured of its chunks.

    The first chunk also warms kernels up, so it only says where to begin. In a
    ``group`` of processes the first one's clock counts for all.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self._rate: float | None = None
        self.group = group

    def within(self, seconds: float) -> int:
        """The tokens that take about so long."""
        found = FIRST if self._rate is None else int(seconds * self._rate)
        return self.group.firsts(lambda: found)

    def read(self, reader: Reader, seconds: float, most: int | None = None) -> tuple[int, float]:
        """Let a reader read, a token or more, at most ``most``, for about ``seconds``.

        Returns how many tokens it read, and in how many seconds.
        """
        wanted = max(1, self.within(seconds))
        started = time.perf_counter()
        number = reader(wanted if most is None else min(wanted, most))
        seconds = time.perf_counter() - started
        if number:
            rate = number / seconds
            self._rate = rate if self._rate is None else self._rate + NEW * (rate - self._rate)
        return number, seconds


class Interleaved:
    """Reading between decoding steps, which leaves decoding a share of its speed.

    Call it after each decoding step. A step earns reading time by its own length, and a chunk is
    read as soon as the time earned is enough for one; so over an answer decoding has its share.
    Without a reader nothing is read, nor waited for. ``group`` is as for :class:`Pace`.
    """

    def __init__(
        self, reader: Reader | None, share: float = HEAL_SHARE, group: Group = ALONE
    ) -> None:
        self._reader, self._ratio = reader, 1 / share - 1
        self._pace, self._earned = Pace(group), 0.0
        self._last = time.perf_counter()
        self.finished = reader is None

    def began(self) -> None:
        """A decoding step begins."""
        self._last = time.perf_counter()

    def __call__(self) -> None:
        """A decoding step has ended; read, if enough time is earned."""
        if self.finished or self._reader is None:
            return
        self._earn()
        self._pace.group.settle()  # no message of a step that has begun may mix with another
        if self._pace.within(self._earned) < LEAST:
            return
        # mlx-lm has begun to compute the next token. That is decoding, and no part of the chunk.
        mx.synchronize(generation_stream)
        self._earn()
        number, seconds = self._pace.read(self._reader, self._earned)
        self._earned -= seconds
        self.finished = not number

    def _earn(self) -> None:
        now = time.perf_counter()
        self._earned += self._ratio * (now - self._last)
        self._last = now


def check_models(source: LanguageModel, target: LanguageModel) -> None:
    """Refuse two models of which the second cannot read in the place of translated entries.

    Raises:
        UnsupportedModelError: They have two tokenizers, or a layer of the target keeps a window or
            a state.
    """
    check_interleaving(target)
    if source.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise UnsupportedModelError(
            f"{target.name} cannot be healed behind {source.name}, which has another "
            "tokenizer: its cache has not one entry a token; leave out heal (-c heal)"
        )
