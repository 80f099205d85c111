"""The memory that a conversation takes, line by line."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.caches.memory import cache_bytes, caches_of, check, weights_bytes
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.spans import translated
from kvlingo_mlx.group import ALONE, Group
from kvlingo_mlx.threads import unit


@dataclass(frozen=True)
class LineStats:
    """The size of one line."""

    name: str  # the model
    tokens: int  # tokens in the line
    native: int  # tokens that the line's model read or wrote itself
    translated: int  # tokens that went through a translator
    cache_bytes: int  # bytes of memory its caches take, spare room in buffers included
    recording_bytes: int  # bytes of the states that its model wrote, kept for lines that lack them
    where: str  # ``empty``, ``resident``, ``8bit`` or ``disk``


@dataclass(frozen=True)
class Stats:
    """The sizes of all lines and of everything that they share."""

    lines: tuple[LineStats, ...]  # one entry per model
    models: int  # bytes of the models' weights, each model once
    translators: int  # bytes of the translators in use
    total: int  # bytes of all these together
    mlx_active: int  # bytes of all of this process's MLX arrays, others' arrays included
    # the translators in use: folder and digest by direction ("small to large")
    used: Mapping[str, str] = field(default_factory=dict)


@unit
def stats_of(exchange: Exchange) -> Stats:
    """The memory that a conversation takes, once its lines' pending work is evaluated."""
    mx.eval([caches.arrays(line.resident) for line in exchange.lines.values()])
    lines = tuple(map(_line, exchange.lines.values()))
    models = {id(line.model.model): line.model for line in exchange.lines.values()}
    weights = sum(map(weights_bytes, models.values()))
    translators = {id(t): t.nbytes for t in exchange.directions.loaded.values()}
    total = weights + sum(translators.values())
    total += sum(line.cache_bytes + line.recording_bytes for line in lines)
    used = {f"{one} to {other}": t.name for (one, other), t in exchange.directions.loaded.items()}
    return Stats(lines, weights, sum(translators.values()), total, mx.get_active_memory(), used)


def check_room(lengths: Mapping[str, int], lines: Mapping[str, Line], group: Group = ALONE) -> None:
    """Refuse lengths, by name, at which lines would not fit into memory.

    Each process of the ``group`` that holds them must have room.

    Raises:
        NotEnoughMemoryError: The message gives the memory that is needed and that there is.
    """
    needed = 0
    for name, length in lengths.items():
        line = lines[name]
        held = line.cache_bytes if line.where == "resident" else 0
        needed += max(0, cache_bytes(line.model, length) - held)
    with group.all_or_none():
        check({caches_of(max(lengths.values())): needed})


def _line(line: Line) -> LineStats:
    brought = translated(line.spans)
    tokens = len(line), len(line) - brought, brought
    return LineStats(line.name, *tokens, line.cache_bytes, line.native.nbytes, line.where)
