"""kvlingo-mlx bench: the time that a switch saves on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli.command import (
    Both,
    Configured,
    MaybeSource,
    MaybeTarget,
    PrefillStepSize,
    Translator,
    option,
    verb,
)
from kvlingo_mlx.cli.output import (
    draw,
    keep,
    ms,
    numbers,
    progress_bar,
    say,
    table,
    tell_of_machine,
    warn,
)
from kvlingo_mlx.cli.sampling import check_ranges

if TYPE_CHECKING:
    from kvlingo_mlx.timing.bench import BenchPair, PhaseTimes
    from kvlingo_mlx.timing.ceilings import Rates
    from kvlingo_mlx.timing.switching import Stopwatch

ROWS = {"source_prefill": "source reads", "target_step": "first step", "native": "re-prefill"}


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Configured):
    models: Both = None
    source: MaybeSource = None
    target: MaybeTarget = None
    translator: Translator = None
    geometry: str | None = option(
        None, "Random models of true widths instead: qwen3-4b:qwen3-30b-a3b, say."
    )
    layers: int | None = option(None, "Layers of each model of --geometry; default: all.")
    precision: str | None = option(
        None, "Of --geometry: bfloat16, 4bit, 8bit or float32; default: the machine's."
    )
    nu: int | None = option(
        None, "Source layers that a target layer reads, in random maps; default: 1."
    )
    quantize: str = option("8,4", "Also time the maps in so many bits: 8,4 or none.")
    prompt_tokens: str | None = option(None, "Lengths: 64,256.", "--prompt-tokens", "-p")
    num_trials: int = option(5, "Trials per length.", "--num-trials", "-n")
    time_limit: float = option(150.0, "Seconds in all, models made; longer prompts are left out.")
    prefill_step_size: PrefillStepSize = 2048
    plot: str | None = option(None, "Draw times over prompt lengths into this file.")


@verb(BenchOptions, long=True)
def command(options: BenchOptions) -> None:
    """Time the phases of a switch, beside reading the prompt again.

    The source reads; its cache is translated; the target's first step; the target reads it all
    itself. Without --source and --target two tiny embedded models are timed.
    """
    limit = options.time_limit
    check_ranges(
        *(
            (name, number, number is None or number >= 1, "at least 1")
            for name, number in (
                ("--num-trials", options.num_trials),
                ("nu", options.nu),
                ("--prefill-step-size", options.prefill_step_size),
            )
        ),
        ("--time-limit", f"{limit:g}", limit > 0, "seconds above 0"),
    )
    asked = options.prompt_tokens
    lengths = numbers("--prompt-tokens", asked, "64,256", 2) if asked else None
    bits = [] if options.quantize == "none" else numbers("--quantize", options.quantize, "8,4")
    ends = _geometry(options)

    from kvlingo_mlx.reporting import measure, pictures
    from kvlingo_mlx.timing import bench
    from kvlingo_mlx.timing.switching import Stopwatch
    from kvlingo_mlx.translators.quantised import check_bits

    for number in bits:
        check_bits(number)
    if options.plot:
        pictures.check(options.plot)
    clock, step_size = Stopwatch(limit), options.prefill_step_size
    tell_of_machine()
    pair = _pair(options, ends, bits, max(lengths or [0]), clock)
    with progress_bar("timing", options.num_trials * len(lengths or bench.LENGTHS)) as step:
        timed, left_out, rates = bench.run(
            pair, lengths, trials=options.num_trials, clock=clock, step_size=step_size,
            progress=step,
        )  # fmt: skip
    if not timed:
        raise ValueError(
            f"--time-limit is {limit:g}, and the shortest measurement takes longer; give more, or "
            "fewer --prompt-tokens"
        )
    _print(pair, timed, left_out, rates)
    say(measure.machine_line())
    if options.plot:
        draw(bench.figure(timed, _label), options.plot, pair.source.name, pair.target.name)
    found = {"timings": [t.as_json() for t in timed], "left_out": left_out}
    config = _config(pair) | {"trials": options.num_trials, "prefill_step_size": step_size}
    keep(options.json_file, "bench", config | {"rates": vars(rates)}, {"switch": found})


def _config(pair: BenchPair) -> dict[str, Any]:
    """What of a record's settings is the pair's."""
    return {
        "source": pair.source.name,
        "target": pair.target.name,
        "weights": [pair.source.precision, pair.target.precision],
        "forms": list(pair.translators),
        "nu": pair.translator.config.nu,
        "notes": pair.notes,
    }


def _geometry(options: BenchOptions) -> tuple[str, str] | None:
    """The source and target of ``--geometry``; None without it.

    Raises:
        ValueError: They are not two known names, or do not fit ``layers``, ``precision`` or
            ``nu``.
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
    depth = options.layers or GEOMETRIES[names[0]]["num_hidden_layers"]
    if options.nu is not None and options.nu > depth:
        raise ValueError(
            f"nu is {options.nu}; {names[0]} has {depth} layers here to read: give fewer"
        )
    return names[0], names[1]


def _pair(
    options: BenchOptions,
    ends: tuple[str, str] | None,
    bits: Sequence[int],
    tokens: int,
    clock: Stopwatch,
) -> BenchPair:
    """The models and maps: from folders, or random ones."""
    from kvlingo_mlx.timing import bench

    with _making(clock) as progress:
        if ends is not None:
            form = options.layers, options.precision, options.nu or 1, bits
            return bench.of_geometry(ends, *form, tokens=tokens, progress=progress)
        places = options.source, options.target, options.translator
        pair = bench.of_models(*places, options.nu, bits)
    if pair.notes:
        warn("no translator of this pair is stored; random maps of the same shapes are timed")
    return pair


@contextlib.contextmanager
def _making(clock: Stopwatch) -> Iterator[Callable[[int, int], None]]:
    """A bar for making or reading models; yields a function of steps done, and of how many.

    Raises:
        ValueError: The time is over; the message says how much is needed.
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
            f"--time-limit is over before the models are ready, which takes {least}; give more "
            "than that, or smaller models (-c layers)"
        ) from None


def _print(
    pair: BenchPair, timed: Sequence[PhaseTimes], left_out: Sequence[int], rates: Rates
) -> None:
    def times(phase: str) -> list[str]:
        cells = []
        for t in timed:
            share = f" ({t.floors[phase] / t.median(phase):.0%})" if phase in t.floors else ""
            cells.append(ms(t.median(phase)) + share)
        return cells

    rows = [[_label(phase), *times(phase)] for phase in timed[0].samples]
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


def _label(phase: str) -> str:
    return ROWS.get(phase, phase.replace("translate ", "translation, "))
