"""kvlingo-mlx bench: the time that a switch saves on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvlingo_mlx.cli.command import BOTH, LENGTHS, Configured, verb, words
from kvlingo_mlx.cli.output import draw, keep, ms, phase, say, table, tell_of_machine, warn
from kvlingo_mlx.options import COUNT, SECONDS, option, text_of

if TYPE_CHECKING:
    from kvlingo_mlx.timing.bench import BenchPair, PhaseTimes
    from kvlingo_mlx.timing.switching import Stopwatch

ROWS = {"source_prefill": "source reads", "target_step": "first step", "native": "re-prefill"}


def bits_of(text: str) -> list[int]:
    """The widths of a list such as ``8,4``; empty for ``none``; ValueError for others."""
    found = words(text)
    if found != ["none"] and not set() < {*found} <= {"8", "4"}:
        raise ValueError
    return [int(word) for word in found if word != "none"]


FORMS = text_of(bits_of, "8, 4, 8,4 or none")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Configured):
    KEYS: ClassVar[str] = "nu"
    models: Annotated[list[str] | None, BOTH] = None
    source: str | None = None
    target: str | None = None
    translator: str | None = None
    nu: int | None = option(
        None, "Source layers that a target layer reads, in random maps; default: 1.", kind=COUNT
    )
    quantize: list[int] = option(
        "8,4", "Also time the maps in so many bits: 8,4 or none.", kind=FORMS
    )
    prompt_tokens: list[int] | None = option(
        None, "Lengths: 64,256.", "--prompt-tokens", "-p", kind=LENGTHS
    )
    num_trials: int = option(5, "Trials per length.", "--num-trials", "-n", kind=COUNT)
    time_limit: float = option(
        150.0, "Seconds in all, models read; longer prompts are left out.", kind=SECONDS
    )
    prefill_step_size: int = option(2048, "Tokens per prefill chunk.", kind=COUNT)
    plot: str | None = option(None, "Draw times over prompt lengths into this file.")


@verb(BenchOptions, long=True)
def command(options: BenchOptions) -> None:
    """Time the phases of a switch, beside reading the prompt again.

    The source reads; its cache is translated; the target's first step; the target reads it all
    itself. Without --source and --target two tiny embedded models are timed.
    """
    from kvlingo_mlx.reporting import measure, pictures
    from kvlingo_mlx.timing import bench
    from kvlingo_mlx.timing.switching import Stopwatch

    if options.plot:
        pictures.check(options.plot)
    clock, lengths = Stopwatch(options.time_limit), options.prompt_tokens
    trials, step_size = options.num_trials, options.prefill_step_size
    tell_of_machine()
    pair = _pair(options, clock)
    with phase("timing", trials * len(lengths or bench.LENGTHS)) as step:
        timed, left_out = bench.run(
            pair, lengths, trials=trials, clock=clock, step_size=step_size, progress=step
        )
    if not timed:
        raise ValueError(
            f"--time-limit is {options.time_limit:g}, and the shortest measurement takes longer; "
            "give more, or fewer --prompt-tokens"
        )
    _print(pair, timed, left_out)
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
    }
    found = {"timings": [t.as_json() for t in timed], "left_out": left_out}
    keep(options.json_file, "bench", config, {"switch": found})


def _pair(options: BenchOptions, clock: Stopwatch) -> BenchPair:
    """The models and maps.

    Raises:
        ValueError: The time is over before they are read.
    """
    from kvlingo_mlx.timing import bench
    from kvlingo_mlx.timing.switching import OutOfTime

    places, began = (options.source, options.target, options.translator), time.perf_counter()
    try:
        with clock.limiting(), phase("reading the models"):
            pair = bench.of_models(*places, options.nu, options.quantize)
    except OutOfTime:
        raise ValueError(
            "--time-limit is over before the models are read, which takes more than "
            f"{time.perf_counter() - began:.0f} s; give more than that, or smaller models"
        ) from None
    if pair.notes:
        warn("no translator of this pair is stored; random maps of the same shapes are timed")
    return pair


def _print(pair: BenchPair, timed: Sequence[PhaseTimes], left_out: Sequence[int]) -> None:
    phases = timed[0].samples
    rows = [[_label(name), *(ms(t.median(name)) for t in timed)] for name in phases]
    for name, way in (("switch", "switch"), ("from nothing", "accelerator")):
        sooner = [f"{t.ways['native'] / t.ways[way]:.2f}" for t in timed]
        rows.append([f"{name}, times sooner", *sooner])
    columns = ["prompt tokens", *(str(t.prompt_tokens) for t in timed)]
    table(f"{pair.source.name} to {pair.target.name}: ms, medians", columns, rows)
    say("Sooner than re-prefill: a switch is translation and step; from nothing, the source reads.")
    if left_out:
        listed = ", ".join(map(str, left_out))
        say(f"left out, since --time-limit allows no more: {listed} tokens")
    for note in pair.notes:
        say(note)
    say("prompts: bundled text")


def _label(name: str) -> str:
    return ROWS.get(name, name.replace("translate ", "translation, "))
