"""Where a source reads when several ranks hold its target together.

- ``replicated``: on every rank. Nothing is sent.
- ``sharded``: spread like a target. Each rank does its share of the reading; the ranks exchange
  what their layers need, and what a translator that mixes heads reads.
- ``first``: on the first rank, which sends what it writes. Only that rank has its weights.

The quickest is taken whose weights fit, by counted work and bytes and by measured rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.loading import sharding
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.parts import FIRST, TENSOR

REPLICATED, SHARDED = "replicated", "sharded"
PLACEMENTS = (REPLICATED, SHARDED, FIRST)
GAIN = 0.8  # of the time when replicated, below which another placement is taken: rates are rough
WORK = (256, 1024)  # rows and width of the product that is timed
MESSAGE = 2**20  # bytes of the message that is timed


@dataclass(frozen=True)
class Need:
    """What a placement takes on a rank.

    Attributes:
        weights: Bytes of the source's weights, on the rank that has most.
        work: Floating-point operations to read the prefix.
        sent: Bytes that the rank sends.
        messages: Messages, which take their time however short they are.
    """

    weights: int
    work: float
    sent: float = 0.0
    messages: int = 0


@dataclass(frozen=True)
class Rates:
    """What the ranks were measured to do: operations, bytes and messages in a second."""

    work: float
    sent: float
    messages: float

    def seconds(self, need: Need) -> float:
        """The seconds that a need takes."""
        return need.work / self.work + need.sent / self.sent + need.messages / self.messages


def needs(model: LanguageModel, ranks: int, tokens: int, step_size: int) -> dict[str, Need]:
    """What each placement of a source takes to read so many tokens.

    The work is counted as two operations for each weight and token, the ones of all experts
    included. Of a ring of N ranks each sends (N - 1)/N of what is gathered, and twice that of what
    is summed: so a layer sums two hidden states, but for the last one, of which only keys and
    values are computed; and what the first rank tells is summed with zeros.
    """
    bits = model.bits or 8 * model.cache_dtype.size
    weights, chunks = memory.weights_bytes(model), -(-tokens // step_size)
    work = 2.0 * weights * 8 / bits * tokens
    share = (ranks - 1) / ranks
    states = share * model.geometry.bytes_per_token(model.cache_dtype.size) * tokens
    layers = len(model.geometry.layers) - 1
    within = 2 * layers * int(model.facts["hidden_size"]) * model.cache_dtype.size * tokens
    return {
        REPLICATED: Need(weights, work),
        SHARDED: Need(
            weights // ranks,
            work / ranks,
            states + 2 * share * within,
            2 * chunks * layers + chunks,
        ),
        FIRST: Need(weights, work, 2 * states, chunks),
    }


def chosen(found: Mapping[str, Need], rates: Rates, free: int | None) -> str:
    """The placement to take.

    Args:
        found: What each takes.
        rates: What the ranks do.
        free: Bytes for the source on the rank that has least; None: it is unknown.
    """
    spare = {name: need for name, need in found.items() if free is None or need.weights <= free}
    if not spare:  # the one that comes nearest; loading it tells what is missing
        return min(found, key=lambda name: found[name].weights)
    best = min(spare, key=lambda name: rates.seconds(spare[name]))
    if REPLICATED in spare and rates.seconds(spare[best]) > GAIN * rates.seconds(spare[REPLICATED]):
        return REPLICATED
    return best


def measured() -> Rates:
    """The rates of this machine and of the link, by the first rank's clock."""
    rows, width = WORK
    left, right = mx.ones((rows, width), mx.float32), mx.ones((width, width), mx.float32)
    told, short = mx.zeros((1, MESSAGE), mx.uint8), mx.zeros(1)
    work = 2.0 * rows * width * width / _timed(lambda: left @ right)
    message = _timed(lambda: mx.distributed.all_sum(short))
    gathered = _timed(lambda: mx.distributed.all_gather(told))
    found = sharding.firsts([work, MESSAGE / max(gathered - message, 1e-9), 1 / message])
    return Rates(*found)


def _timed(compute: Callable[[], mx.array]) -> float:
    mx.eval(compute())  # the first time, something else may be paid for
    started = time.perf_counter()
    mx.eval(compute())
    return time.perf_counter() - started


def open_spread(
    paths: Sequence[str], spread: Sequence[str], shard: str | None
) -> dict[str, LanguageModel]:
    """Open models, of which the ranks hold some together; their weights are unread.

    Args:
        paths: All models, each a folder or Hub id.
        spread: Those that are held together; none: the largest.
        shard: As for :func:`.load`; None takes what mlx-lm can do.

    Raises:
        ValueError, UnsupportedModelError: They cannot be shared, or there are no ranks.
    """
    unread = {path: load(path, lazy=True) for path in paths}
    if not spread and shard is None and sharding.group() is None:
        return unread
    if not spread:
        spread = [max(unread, key=lambda path: memory.weights_bytes(unread[path]))]
    return unread | {path: load(path, lazy=True, shard=shard or "auto") for path in spread}


def place(
    source: str, target: LanguageModel, placement: str | None, tokens: int, step_size: int
) -> LanguageModel:
    """Open a source beside a part of a target, with its weights unread.

    Args:
        source: A folder or Hub id.
        target: This rank's part of the target, whose weights are unread.
        placement: One of :data:`PLACEMENTS`; None takes the quickest that fits.
        tokens: About how many tokens it is to read.
        step_size: Tokens per prefill chunk.

    Raises:
        ValueError, UnsupportedModelError: The ranks cannot share it, and ``sharded`` was asked for.
    """
    if placement not in (None, *PLACEMENTS):
        raise ValueError(
            f"placement is {placement!r}; give {', '.join(PLACEMENTS)}, or leave it out"
        )
    ranks = sharding.group()
    assert ranks is not None
    if placement is None:
        whole, part = load(source, lazy=True), _part(source)
        found = needs(whole, ranks.size(), tokens, step_size)
        if part is None:
            del found[SHARDED]
        free = memory.free()
        held = memory.weights_bytes(target) + sum(
            memory.cache_bytes(model, tokens) for model in (whole, target)
        )
        least = sharding.least(None if free is None else free - held)
        placement = chosen(found, measured(), least)
        if placement == SHARDED and part is not None:
            return part
    if placement == REPLICATED:
        return load(source, lazy=True)
    shard = "auto" if placement == SHARDED else FIRST
    return load(source, lazy=True, shard=shard)


def _part(source: str) -> LanguageModel | None:
    """This rank's part of a source, if the ranks can share its heads: a pipeline saves no time."""
    try:
        return load(source, lazy=True, shard=TENSOR)
    except (ValueError, KVLingoError):
        return None
