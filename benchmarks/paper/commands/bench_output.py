"""The output of a bench's tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.paper.commands import bench_healing
from benchmarks.paper.timing.phases import LABELS, SPEED_LABELS, label
from kvlingo_mlx.cli.output import ms, progress_bar, say, table

if TYPE_CHECKING:
    from benchmarks.paper.timing.pairs import Pair
    from benchmarks.paper.timing.runs import Ran
    from benchmarks.paper.timing.tables import Table, Timing
    from kvlingo_mlx.timing.ceilings import Rates
    from kvlingo_mlx.timing.switching import Stopwatch


FEWER = "fewer layers (-c layers)"


@contextlib.contextmanager
def making(clock: Stopwatch, smaller: str = FEWER) -> Iterator[Callable[[int, int], None]]:
    """A bar for making or reading models; yields a function of steps done, and of how many.

    Raises:
        ValueError: The clock's time is over; the message says how much is needed.
    """
    from kvlingo_mlx.timing.switching import OutOfTime

    began, made = time.perf_counter(), [0, 1]
    try:
        with clock.limiting(), progress_bar("making the models", None) as step:

            def count(done: int, total: int) -> None:
                made[:] = done, total
                step(done, total)

            yield count
    except OutOfTime:
        took, (done, total) = time.perf_counter() - began, made
        least = f"about {took * total / done:.0f} s" if done else f"more than {took:.0f} s"
        raise ValueError(
            f"--time-limit is over before the models are ready, which takes {least}, and nothing "
            f"is measured; give more than that, or {smaller}"
        ) from None


def check_measured(measured: bool, limit: float, smaller: str) -> None:
    """Refuse (ValueError) a time limit in which nothing at all was measured."""
    if not measured:
        raise ValueError(
            f"--time-limit is {limit:g}, and the shortest measurement takes longer; give more, or "
            f"{smaller}"
        )


# Prints another run's times beside a table's, given its name, times, times at full depth and
# settings; returns what a record holds of them.
Beside = Callable[
    [str, Sequence["Timing"], Sequence[Mapping[str, float]], Mapping[str, Any]], dict[str, Any]
]


def show(ran: Ran, pair: Pair, beside: Beside | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Print a table, and what ``beside`` compares with it; returns the contents of its record.

    ``config`` holds the run's settings.
    """
    from benchmarks.paper.timing import derived, tables

    shown, timings = ran.table, ran.timings
    least, grown, healed, compared = [], [], {}, None
    if not timings:
        say(shown.title)
    else:
        ends = pair.source, pair.target
        least = [derived.floors(t, ran.rates, *ends, pair.translators) for t in timings]
        rows = [_times(p, timings, least) for p in timings[0].samples if p not in SPEED_LABELS]
        columns = ["prompt tokens", *(str(t.prompt_tokens) for t in timings)]
        title = f"{shown.title}\n{pair.source.name} to {pair.target.name}"
        table(title, columns, rows + _derived(shown, timings))
        say("Medians in ms; in brackets: how close to the fastest that this machine could be.")
        healed = bench_healing.show(shown, pair, timings, columns)
        table("Fastest / interquartile range (ms)", columns, _spreads(timings))
        grown = _extrapolate(timings, pair, columns)
        if derived.tokens_per_second(timings[0]):
            config = {**config, "decoded": timings[0].decoded}
            if config["decode_tokens"] is None and timings[0].decoded < tables.DECODED:
                say(
                    f"decoding speeds are over {timings[0].decoded} tokens, in the paper over "
                    f"{tables.DECODED}: --time-limit allows no more; -c decode_tokens sets them"
                )
        if beside is not None:
            compared = beside(ran.name, timings, grown, config)
    if ran.over:
        listed = ", ".join(map(str, ran.over))
        say(f"left out, since --time-limit allows no more: {listed} tokens")
    if ran.beyond:
        listed = ", ".join(map(str, ran.beyond))
        say(f"left out, beyond a model's context or this machine's memory: {listed} tokens")
    return {
        "timings": [tables.as_json(t) for t in timings],
        "floors": least,
        "extrapolated": grown,
        "left_out": [*ran.over, *ran.beyond],
        "reference": compared,
        **healed,
    }


def _derived(shown: Table, timings: Sequence[Timing]) -> list[list[str]]:
    """The rows of quantities derived from times, and of memory."""
    from benchmarks.paper.timing import derived

    rows = []
    for way in derived.speedups(timings[0]):
        rows.append([f"{way}, times sooner", *(f"{derived.speedups(t)[way]:.2f}" for t in timings)])
    for name in derived.tokens_per_second(timings[0]):
        speeds = [derived.tokens_per_second(t)[name] for t in timings]
        rows.append([f"{SPEED_LABELS[name]} (tokens/s)", *(f"{speed:.1f}" for speed in speeds)])
    rows += bench_healing.rows(timings)
    for phase in shown.peaks:
        peaks = [f"{t.peak[phase] / 1e6:.0f}" for t in timings]
        rows.append([f"{LABELS[phase]}, peak (MB)", *peaks])
    for name in timings[0].experts:
        rows.append([f"experts touched, {name}", *(f"{t.experts[name]:.0%}" for t in timings)])
    return rows


def _spreads(timings: Sequence[Timing]) -> list[list[str]]:
    """One row per timed phase."""
    return [
        [
            label(phase, timings[0].decoded),
            *("{} / {}".format(*map(ms, t.spread(phase))) for t in timings),
        ]
        for phase in timings[0].samples
    ]


def _times(
    phase: str, timings: Sequence[Timing], least: Sequence[Mapping[str, float]]
) -> list[str]:
    cells = []
    for timing, floor in zip(timings, least, strict=True):
        share = f" ({floor[phase] / timing.median(phase):.0%})" if phase in floor else ""
        cells.append(ms(timing.median(phase)) + share)
    return [label(phase), *cells]


def _extrapolate(
    timings: Sequence[Timing], pair: Pair, columns: list[str]
) -> list[dict[str, float]]:
    """Print the times extrapolated to full depth, if the models have fewer layers."""
    from benchmarks.paper.timing.runs import at_full_depth

    if pair.layers is None:
        return []
    grown = at_full_depth(pair, timings)
    if not grown[0]:
        say("none of these times is extrapolated to full depth")
        return grown
    rows = [[label(phase), *(ms(g[phase]) for g in grown)] for phase in grown[0]]
    full = " and ".join(str(whole) for _, whole in pair.layers)
    table(f"Extrapolated to {full} layers, not measured (ms)", columns, rows)
    return grown


def foot(pair: Pair, rates: Rates, text: bool) -> None:
    """Print the notes that apply to all tables."""
    from kvlingo_mlx.backend import on_gpu

    for note in pair.notes:
        say(note)
    if not on_gpu():
        say("no row of bfloat16 maps: on a CPU 16-bit maps are widened to float32")
    say("prompts: " + ("bundled text" if text else "random token ids"))
    say(
        f"ceilings: {rates.flops / 1e9:,.0f} GFLOP/s in a large {rates.dtype} product, "
        f"{rates.bandwidth / 1e9:,.1f} GB/s in a large sum or matrix times vector, measured now"
    )
