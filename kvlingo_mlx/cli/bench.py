"""kvlingo-mlx bench: the time that a switch saves on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvlingo_mlx.cli.command import BOTH, LENGTHS, Configured, numbers, verb, words
from kvlingo_mlx.cli.output import draw, keep, ms, phase, say, table, tell_of_machine, warn
from kvlingo_mlx.options import COUNT, Kind, Need, is_set, number, off, option

if TYPE_CHECKING:
    from kvlingo_mlx.timing.bench import BenchPair, PhaseTimes
    from kvlingo_mlx.timing.ceilings import Rates
    from kvlingo_mlx.timing.switching import Stopwatch

ROWS = {"source_prefill": "source reads", "target_step": "first step", "native": "re-prefill"}


def bits_of(text: str) -> list[int]:
    """The widths of a list such as ``8,4``; empty for ``none``."""
    return [] if text == "none" else [*map(int, words(text))]


TIME_LIMIT = number("seconds above 0", lambda value: value > 0)
LISTS = (["8"], ["4"], ["8", "4"], ["4", "8"])
FORMS = Kind(lambda text: text == "none" or words(text) in LISTS, "8, 4, 8,4 or none")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Configured):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("source target translator", "geometry", off, why="whose models and maps are random"),
        Need("layers precision", "geometry", is_set, "qwen3-4b:qwen3-30b-a3b",
             "and models from a folder are as they are"),
    )  # fmt: skip
    KEYS: ClassVar[str] = "layers precision nu"
    models: Annotated[list[str] | None, BOTH] = None
    source: str | None = None
    target: str | None = None
    translator: str | None = None
    geometry: str | None = option(
        None, "Random models of true widths instead: qwen3-4b:qwen3-30b-a3b, say."
    )
    layers: int | None = option(None, "Layers of each model of --geometry; default: all.")
    precision: str | None = option(
        None, "Of --geometry: bfloat16, 4bit, 8bit or float32; default: the machine's."
    )
    nu: int | None = option(
        None, "Source layers that a target layer reads, in random maps; default: 1.", kind=COUNT
    )
    quantize: str = option("8,4", "Also time the maps in so many bits: 8,4 or none.", kind=FORMS)
    prompt_tokens: str | None = option(
        None, "Lengths: 64,256.", "--prompt-tokens", "-p", kind=LENGTHS
    )
    num_trials: int = option(5, "Trials per length.", "--num-trials", "-n", kind=COUNT)
    time_limit: float = option(
        150.0, "Seconds in all, models made; longer prompts are left out.", kind=TIME_LIMIT
    )
    prefill_step_size: int = option(2048, "Tokens per prefill chunk.", kind=COUNT)
    plot: str | None = option(None, "Draw times over prompt lengths into this file.")


@verb(BenchOptions, long=True)
def command(options: BenchOptions) -> None:
    """Time the phases of a switch, beside reading the prompt again.

    The source reads; its cache is translated; the target's first step; the target reads it all
    itself. Without --source and --target two tiny embedded models are timed.
    """
    lengths = numbers(options.prompt_tokens) if options.prompt_tokens else None
    ends = geometry_names(options)
    if ends is not None:
        check_depth(ends[0], options.layers, options.nu or 1)

    from kvlingo_mlx.reporting import measure, pictures
    from kvlingo_mlx.timing import bench
    from kvlingo_mlx.timing.switching import Stopwatch

    if options.plot:
        pictures.check(options.plot)
    clock, trials, step_size = (
        Stopwatch(options.time_limit), options.num_trials, options.prefill_step_size
    )  # fmt: skip
    tell_of_machine()
    pair = _pair(options, ends, max(lengths or [0]), clock)
    with phase("timing", trials * len(lengths or bench.LENGTHS)) as step:
        timed, left_out, rates = bench.run(
            pair, lengths, trials=trials, clock=clock, step_size=step_size, progress=step
        )
    if not timed:
        raise ValueError(
            f"--time-limit is {options.time_limit:g}, and the shortest measurement takes longer; "
            "give more, or fewer --prompt-tokens"
        )
    _print(pair, timed, left_out, rates)
    say(measure.machine_line())
    if options.plot:
        draw(bench.figure(timed, _label), options.plot, pair.source.name, pair.target.name)
    config = {
        "source": pair.source.name,
        "target": pair.target.name,
        "weights": [pair.source.precision, pair.target.precision],
        "forms": list(pair.translators),
        "nu": pair.translator.config.nu,
        "notes": pair.notes,
        "trials": trials,
        "prefill_step_size": step_size,
        "rates": vars(rates),
    }
    found = {"timings": [t.as_json() for t in timed], "left_out": left_out}
    keep(options.json_file, "bench", config, {"switch": found})


def geometry_names(options: Any) -> tuple[str, str] | None:
    """The source and target of ``--geometry``; None without it.

    Raises:
        ValueError: They are not two known names, or do not fit ``layers`` or ``precision``.
    """
    if options.geometry is None:
        return None
    from kvlingo_mlx.timing.geometries import GEOMETRIES, check

    names = options.geometry.split(":")
    if len(names) != 2:
        known = ", ".join(GEOMETRIES)
        raise ValueError(f"--geometry is {options.geometry!r}; give SOURCE:TARGET of {known}")
    for name in names:
        check(name, options.layers, options.precision)
    return names[0], names[1]


def check_depth(source: str, layers: int | None, nu: int) -> None:
    """Refuse (ValueError) maps that read more layers than a geometry has."""
    from kvlingo_mlx.timing.geometries import GEOMETRIES

    depth = layers or GEOMETRIES[source]["num_hidden_layers"]
    if nu > depth:
        raise ValueError(f"nu is {nu}; {source} has {depth} layers here to read: give fewer")


def _pair(
    options: BenchOptions, ends: tuple[str, str] | None, tokens: int, clock: Stopwatch
) -> BenchPair:
    """The models and maps: from folders, or random ones."""
    from kvlingo_mlx.timing import bench

    bits = bits_of(options.quantize)
    with making(clock, "smaller models (-c layers)") as progress:
        if ends is not None:
            form = options.layers, options.precision, options.nu or 1, bits
            return bench.of_geometry(ends, *form, tokens=tokens, progress=progress)
        places = options.source, options.target, options.translator
        pair = bench.of_models(*places, options.nu, bits)
    if pair.notes:
        warn("no translator of this pair is stored; random maps of the same shapes are timed")
    return pair


@contextlib.contextmanager
def making(clock: Stopwatch, smaller: str) -> Iterator[Callable[[int, int], None]]:
    """A phase for making or reading models; yields a function of steps done, and of how many.

    Raises:
        ValueError: The time is over; the message says how much is needed, or what is smaller.
    """
    from kvlingo_mlx.timing.switching import OutOfTime

    began, made = time.perf_counter(), [0, 1]
    try:
        with clock.limiting(), phase("making the models") as step:

            def count(done: int, total: int) -> None:
                made[:] = done, total
                step(done, total)

            yield count
    except OutOfTime:
        took, (done, total) = time.perf_counter() - began, made
        least = f"about {took * total / done:.0f} s" if done else f"more than {took:.0f} s"
        raise ValueError(
            f"--time-limit is over before the models are ready, which takes {least}; give more "
            f"than that, or {smaller}"
        ) from None


def _print(
    pair: BenchPair, timed: Sequence[PhaseTimes], left_out: Sequence[int], rates: Rates
) -> None:
    def cell(t: PhaseTimes, name: str) -> str:
        share = f" ({t.floors[name] / t.median(name):.0%})" if name in t.floors else ""
        return ms(t.median(name)) + share

    rows = [[_label(name), *(cell(t, name) for t in timed)] for name in timed[0].samples]
    for name, way in (("switch", "switch"), ("from nothing", "accelerator")):
        sooner = [f"{t.ways['native'] / t.ways[way]:.2f}" for t in timed]
        rows.append([f"{name}, times sooner", *sooner])
    columns = ["prompt tokens", *(str(t.prompt_tokens) for t in timed)]
    table(f"{pair.source.name} to {pair.target.name}: ms, medians", columns, rows)
    say(
        "In brackets: how close to the fastest that this machine could be. Sooner than re-prefill: "
        "a switch is translation and step, from nothing the source reads first."
    )
    if left_out:
        listed = ", ".join(map(str, left_out))
        say(f"left out, since --time-limit allows no more: {listed} tokens")
    for note in pair.notes:
        say(note)
    say(f"prompts: {'bundled text' if pair.text else 'random token ids'}")
    say(
        f"ceilings: {rates.flops / 1e9:,.0f} GFLOP/s in a large {rates.dtype} product, "
        f"{rates.bandwidth / 1e9:,.1f} GB/s in a large sum or matrix times vector, measured now"
    )


def _label(name: str) -> str:
    return ROWS.get(name, name.replace("translate ", "translation, "))
