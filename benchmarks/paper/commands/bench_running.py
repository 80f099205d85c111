"""Runs the tables of a switch, prints them and keeps their record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.paper.commands.bench_options import (
    HEALING,
    TABLES,
    BenchOptions,
    geometry_names,
    precisions,
)
from benchmarks.paper.commands.bench_output import (
    FEWER,
    Beside,
    check_measured,
    foot,
    making,
    show,
)
from kvlingo_mlx.cli.output import draw, keep, numbers, progress_bar, say, tell_of_machine, warn

if TYPE_CHECKING:
    from benchmarks.paper.timing.pairs import Pair
    from benchmarks.paper.timing.runs import Asked

Given = TypeVar("Given", bound=BenchOptions)


def measure(options: BenchOptions, beside: Beside | None = None) -> None:
    """Time and print the tables that are asked for, one precision after the other."""
    asked = options.prompt_tokens
    # One token leaves nothing to hand over.
    lengths = numbers("--prompt-tokens", asked, "64,256", 2) if asked else None
    ends = geometry_names(options)
    for one in by_precision(options):
        _run(one, ends, lengths, beside)


def by_precision(options: Given) -> Iterator[Given]:
    """The options of each precision, in turn: models of two would not fit in memory together."""
    each = precisions(options)
    for precision in each:
        yield replace(options, precision=precision, time_limit=options.time_limit / len(each))


def _run(
    options: BenchOptions,
    ends: tuple[str, str] | None,
    lengths: Sequence[int] | None,
    beside: Beside | None,
) -> None:
    """Time the tables of a switch, print them and append the record."""
    plain = options.quantize == "none" or options.table_name == HEALING
    bits = [] if plain else numbers("--quantize", options.quantize, "8,4")
    layers = options.native_layers
    hybrids = numbers("--native-layers", layers, "1,2") if layers else []

    from benchmarks.paper.timing import runs
    from benchmarks.paper.timing.tables import Effort
    from kvlingo_mlx.reporting import measure, pictures
    from kvlingo_mlx.timing.switching import Stopwatch
    from kvlingo_mlx.translators.quantised import check_bits

    for number in bits:
        check_bits(number)
    if options.plot:
        pictures.check(options.plot)
    clock = Stopwatch(options.time_limit)  # it includes making or reading the models
    tell_of_machine()
    tokens = options.batch * max(lengths or [0])
    with making(clock, "smaller models" if ends is None else FEWER) as progress:
        pair = _pair(options, ends, bits, tokens=tokens, progress=progress)
    asked = runs.Asked(
        tables=TABLES if options.table_name == "all" else (options.table_name,),
        effort=Effort(
            text=ends is None and options.prompt != "random",
            trials=options.num_trials,
            clock=clock,
            step_size=options.prefill_step_size,
            batch=options.batch,
            decoded=options.decode_tokens,
        ),
        lengths=lengths,
        native_layers=hybrids,
    )
    config, results = _config(pair, asked), {}
    for ran in runs.run(pair, asked, progress_bar):
        results[ran.name] = show(ran, pair, beside, config)
    measured = any(result["timings"] for result in results.values())
    check_measured(measured, options.time_limit, "fewer --prompt-tokens")
    foot(pair, ran.rates, asked.effort.text)
    say(measure.machine_line())
    if options.plot:
        from benchmarks.paper.timing.figures import times

        draw(times(results), options.plot, pair.source.name, pair.target.name)
    keep(options.json_file, "bench", config | {"rates": vars(ran.rates)}, results)


def _pair(
    options: BenchOptions, ends: tuple[str, str] | None, bits: Sequence[int], **making: Any
) -> Pair:
    """The timed pair: models from folders, or random ones; ``making`` is as for the latter."""
    from benchmarks.paper.timing import pairs

    if ends is not None:
        nu = _paper_nu(options, *ends)
        return pairs.of_geometry(ends, options.layers, options.precision, nu, bits, **making)
    given = options.some("source target translator")
    nu = _paper_nu(options, options.source or "", options.target or "")
    found = pairs.of_models(**given, nu=nu, bits=bits)
    if found.unstored:
        warn("no translator of this pair is stored; random maps of the same shapes are timed")
    if options.nu not in (None, found.nu):
        raise ValueError(
            f"nu is {options.nu}, but it is for random maps, and the stored translator of this "
            f"pair has nu = {found.nu}; leave nu out"
        )
    return found


def _paper_nu(options: BenchOptions, source: str, target: str) -> int:
    """The source layers of random maps: those asked for, or the paper's for this pair."""
    from kvlingo_mlx.timing.shapes import released
    from kvlingo_mlx.training.paper_pairs import NU, best_of

    if options.nu is not None:
        return options.nu
    best = best_of(released(source), released(target))
    nu = NU if best is None else best.nu
    if options.layers is not None and options.layers < nu:
        say(
            f"nu is {options.layers}, in the paper {nu} for this pair: {options.layers} layers "
            f"leave no more to read; give -c layers={nu} or more"
        )
        return options.layers
    return nu


def _config(pair: Pair, asked: Asked) -> dict[str, Any]:
    """The run's settings in a record."""
    from kvlingo_mlx.reporting import measure

    effort = asked.effort
    return {
        "machine": measure.environment()["chip"],
        "source": pair.source.name,
        "target": pair.target.name,
        "layers": pair.layers,
        "prompt": "bundled text" if effort.text else "random token ids",
        "trials": effort.trials,
        "batch": effort.batch,
        "nu": pair.nu,
        "head_mixing": pair.head_mixing,
        "translator": pair.form,
        "decode_tokens": effort.decoded,
        "prefill_step_size": effort.step_size,
        "native_layers": asked.native_layers,
        "forms": list(pair.translators),
        "precision": pair.precision,
        "weights": [pair.source.precision, pair.target.precision],
    }
