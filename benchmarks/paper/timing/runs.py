"""Run several tables of one pair, one after the other, within a time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from kvlingo_mlx.backend import on_gpu

from benchmarks.paper.timing import derived, paths, tables
from benchmarks.paper.timing.pairs import Pair
from benchmarks.paper.timing.tables import Effort, Table, Timing
from kvlingo_mlx.caches import memory
from kvlingo_mlx.engine import healing
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.reporting.measure import seconds
from kvlingo_mlx.timing.ceilings import Costs, Rates, measured_rates

HEALING = "healing"  # the table of it
# A bar takes a text and a number of steps, and yields a function to call after each step.
Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class Asked:
    """The measurements that are asked for.

    Attributes:
        tables: Names in ``TABLES``.
        effort: How the tables are measured; its clock is for all of them together.
        lengths: Prompt lengths in tokens; None for each table's own.
        native_layers: Numbers of native layers with which switches are timed as well.
    """

    tables: tuple[str, ...]
    effort: Effort
    lengths: Sequence[int] | None = None
    native_layers: Sequence[int] = ()


@dataclass(frozen=True)
class Ran:
    """The measurements of one table.

    Attributes:
        name: The table's name in ``TABLES``.
        table: The table as it is shown here.
        timings: One column per length.
        over: Lengths for which there was no time.
        beyond: The table's own lengths that are beyond a model's context, or the memory.
        rates: The machine's best rates so far.
    """

    name: str
    table: Table
    timings: Sequence[Timing]
    over: Sequence[int]
    beyond: Sequence[int]
    rates: Rates


def check(pair: Pair, asked: Asked) -> None:
    """Raise an error for what this pair does not allow.

    Raises:
        ValueError: A length or a number of native layers.
        UnsupportedModelError: Healing, behind translations of this pair.
        NotEnoughMemoryError: The caches of the longest prompts asked for do not fit.
    """
    if HEALING in asked.tables:
        try:
            healing.check_models(pair.source, pair.target)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"--table {HEALING} has nothing to time: {error}; give another --table"
            ) from None
    most = len(pair.target.attentions)
    if (wrong := max(asked.native_layers, default=0)) > most:
        raise ValueError(f"--native-layers holds {wrong}; give numbers from 1 to {most}")
    small, longest = pair.smaller, max(asked.lengths or [0])
    room = small.context_length
    if longest > room:
        raise ValueError(
            f"--prompt-tokens holds {longest}, but the context of {small.name} is {room}: "
            f"give at most {room}"
        )
    needed = _caches_bytes(pair, longest, asked.effort.batch)
    instead = "--prompt-tokens or a batch (-c batch) of less"
    memory.check({memory.caches_of(longest * asked.effort.batch): needed}, instead=instead)


def _caches_bytes(pair: Pair, tokens: int, batch: int) -> int:
    """The bytes of both models' caches of some prompts."""
    return batch * sum(memory.cache_bytes(model, tokens) for model in (pair.source, pair.target))


def run(pair: Pair, asked: Asked, bar: Bar) -> Iterator[Ran]:
    """Measure one table after the other; each gets its share of the time that is left.

    Raises:
        ValueError, UnsupportedModelError, NotEnoughMemoryError: As for :func:`check`.
    """
    check(pair, asked)
    room, effort, free = pair.smaller.context_length, asked.effort, memory.free()

    def fits(length: int) -> bool:
        needed = _caches_bytes(pair, length, effort.batch)
        return length <= room and (free is None or needed <= free)

    rates = measured_rates()
    before: Timing | None = None
    for index, name in enumerate(asked.tables):
        own = tables.TABLES[name]
        lengths = [n for n in asked.lengths or own.lengths if fits(n)]
        shown = tables.with_hybrids(tables.batched(own, effort.batch), _layers(pair, asked, name))
        with bar(f"timing {name}", len(lengths) * effort.trials) as step:
            clock = effort.clock.part(len(asked.tables) - index)
            now = replace(effort, clock=clock, progress=step, before=before)
            timings, over = tables.run_table(
                pair.source, pair.target, pair.translators, shown, lengths, now
            )
        before = timings[0] if timings else before
        rates = rates.best(measured_rates())
        beyond = [n for n in own.lengths if not fits(n)] if asked.lengths is None else []
        yield Ran(name, shown, timings, over, beyond, rates)


def _layers(pair: Pair, asked: Asked, table: str) -> Sequence[int]:
    """The numbers of native layers in a table: those asked for, else those that heal by layers."""
    if asked.native_layers or table != HEALING:
        return asked.native_layers
    return [healing.first_layers(next(iter(pair.translators.values())).config)]


def at_full_depth(pair: Pair, timings: Sequence[Timing]) -> list[dict[str, float]]:
    """For each length, each phase's seconds at full depth; empty where the models are whole."""
    if pair.layers is None:
        return []
    batch = timings[0].batch
    head = min(seconds(lambda: paths.run_head(pair.target, batch)) for _ in range(5))
    ends = zip((pair.source, pair.target), pair.layers, strict=True)
    depths = [derived.Depth(*layers, Costs(model).last_share) for model, layers in ends]
    steps = 1 if on_gpu() or batch > 1 else paths.QUEUED
    return [derived.extrapolated(timing, head, *depths, steps=steps) for timing in timings]
