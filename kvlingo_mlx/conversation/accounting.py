"""The memory that a conversation takes, line by line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlingo_mlx.backend import mx, nn

from mlx.utils import tree_flatten

from kvlingo_mlx.caches.memory import cache_bytes, caches_of, check
from kvlingo_mlx.conversation.exchange import Exchange
from kvlingo_mlx.conversation.line import Line


@dataclass(frozen=True)
class LineStats:
    """The size of one line.

    Attributes:
        name: The model.
        tokens: Tokens in the line.
        native: Tokens that the line's model read or wrote itself.
        translated: Tokens that went through a translator.
        cache_bytes: Bytes of memory its caches take, spare room in buffers included.
        recording_bytes: Bytes of the states that its model wrote, kept for lines that lack them.
        where: ``empty``, ``resident``, ``8bit`` or ``disk``.
    """

    name: str
    tokens: int
    native: int
    translated: int
    cache_bytes: int
    recording_bytes: int
    where: str


@dataclass(frozen=True)
class Stats:
    """The sizes of all lines and of everything that they share.

    Attributes:
        lines: One entry per model.
        models: Bytes of the models' weights, each model once.
        translators: Bytes of the translators in use.
        total: Bytes of all these together.
        mlx_active: Bytes of all of this process's MLX arrays, others' arrays included.
        used: The translators in use: folder and digest by direction ("small to large").
    """

    lines: tuple[LineStats, ...]
    models: int
    translators: int
    total: int
    mlx_active: int
    used: Mapping[str, str] = field(default_factory=dict)


def stats_of(exchange: Exchange) -> Stats:
    """The memory that a conversation takes, once its lines' pending work is evaluated."""
    for line in exchange.lines.values():
        line.settle()
    lines = tuple(_line(line) for line in exchange.lines.values())
    models = {id(line.model.model): line.model.model for line in exchange.lines.values()}
    weights = sum(_nbytes(model) for model in models.values())
    translators = {id(t): t.nbytes for t in exchange.directions.loaded.values()}
    total = weights + sum(translators.values())
    total += sum(line.cache_bytes + line.recording_bytes for line in lines)
    used = {f"{one} to {other}": t.name for (one, other), t in exchange.directions.loaded.items()}
    return Stats(lines, weights, sum(translators.values()), total, mx.get_active_memory(), used)


def check_room(lengths: Mapping[str, int], lines: Mapping[str, Line]) -> None:
    """Refuse lengths at which lines would not fit into memory.

    Args:
        lengths: Tokens that lines are to hold, by name.
        lines: All lines.

    Raises:
        NotEnoughMemoryError: The message gives the memory that is needed and that there is.
    """
    needed = 0
    for name, length in lengths.items():
        line = lines[name]
        held = line.cache_bytes if line.where == "resident" else 0
        needed += max(0, cache_bytes(line.model, length) - held)
    check({caches_of(max(lengths.values())): needed})


def _line(line: Line) -> LineStats:
    native = sum(span.stop - span.start for span in line.spans if not span.passes)
    return LineStats(
        line.name,
        len(line),
        native,
        len(line) - native,
        line.cache_bytes,
        line.native.nbytes,
        line.where,
    )


def _nbytes(model: nn.Module) -> int:
    leaves = dict(tree_flatten(model.parameters())).values()
    return sum(array.nbytes for array in {id(array): array for array in leaves}.values())
