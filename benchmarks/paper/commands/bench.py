"""python -m benchmarks.paper bench: times of a switch, beside a reference, and a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.paper.commands import bench_budget, bench_running
from benchmarks.paper.commands.bench_options import BUDGET, HEALING, BenchOptions, check
from benchmarks.paper.timing.phases import label
from kvlingo_mlx.cli.command import verb
from kvlingo_mlx.cli.output import ms, numbers, say, table

if TYPE_CHECKING:
    from benchmarks.paper.timing.beside import Row
    from benchmarks.paper.timing.reference import Reference, Times
    from benchmarks.paper.timing.tables import Timing


@verb(BenchOptions, long=True)
def command(options: BenchOptions) -> None:
    """Time to first token by each way, beside the paper's times or another run's."""
    check(options)
    batches = numbers("--batch-sizes", options.batch_sizes, "1,8")
    if options.table_name == BUDGET:
        asked = options.prompt_tokens
        contexts = numbers("--prompt-tokens", asked, "64,256") if asked else None
        for one in bench_running.by_precision(options):
            bench_budget.run(one, contexts, batches)
        return
    bench_running.measure(options, _reference(options))


def _reference(options: BenchOptions) -> bench_running.Beside | None:
    """What compares a table with ``--reference``; None without it."""
    if options.reference is None:
        return None
    from benchmarks.paper.timing.reference import load_reference

    found = load_reference(options.reference)
    if found.label is not None and options.table_name == HEALING:
        raise ValueError(
            f"--reference is {options.reference}, which has no table of {HEALING}; give a file of "
            "--json, or leave it out"
        )
    return lambda name, timings, grown, config: beside(name, timings, grown, found, config)


def beside(
    name: str,
    timings: Sequence[Timing],
    grown: Sequence[Mapping[str, float]],
    reference: Reference,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Print a reference's times, and the ratio of this machine's times to them; returns both.

    Models with the same layers are compared as measured, others only at full depth. A star marks a
    number that was measured in another way than this machine's.
    """
    from benchmarks.paper.timing import beside as compared

    layers = config["layers"]
    alike = reference.layers == layers
    theirs = (reference.measured if alike else reference.whole).get(name, {})
    ours = compared.seconds_of(timings)
    if not alike and layers is not None:
        ours = {t.prompt_tokens: dict(g) for t, g in zip(timings, grown, strict=True)}
    found = reference.differences(config)
    common = compared.rows(ours, theirs, found)
    if not common:
        say(
            f"the reference ({reference.name}) has nothing in common with this table: it holds "
            f"{_contents(theirs)}; this table holds {_contents(ours)}"
        )
        return compared.as_json(reference, common, config, timings[0].samples)
    title = "Reference (ms)"
    if not alike:
        whose = [
            who
            for who, of in (("this machine's", layers), ("its own", reference.layers))
            if of is not None
        ]
        title += f", at full depth: {' and '.join(whose)} extrapolated, not measured"
    table(title, ["prompt tokens", *map(str, common[0].theirs)], [_compared(row) for row in common])
    say(f"reference: {reference.name}; in brackets how many times as long this machine takes")
    starred = dict.fromkeys(str(one) for row in common for one in row.differs)
    if starred:
        say(f"* measured otherwise: {'; '.join(starred)}")
    if unsaid := reference.unsaid(config):
        say(f"the reference does not say: {', '.join(unsaid).replace('_', ' ')}")
    if reference.note:
        say(f"of the reference: {reference.note}")
    return compared.as_json(reference, common, config, timings[0].samples)


def _compared(row: Row) -> list[str]:
    """A row of a table beside a reference's."""
    said = label(row.phase)
    if row.other != row.phase:
        said += f", beside {label(row.other)}"
    star = "*" if row.differs else ""
    times = [f"{ms(row.theirs[n])}{star} ({row.ours[n] / row.theirs[n]:.1f}x)" for n in row.theirs]
    return [said, *times]


def _contents(times: Times) -> str:
    """The lengths and phases in some times, in words."""
    if not times:
        return "no such table"
    phases = dict.fromkeys(label(phase) for found in times.values() for phase in found)
    return f"{', '.join(map(str, times))} tokens ({', '.join(phases)})"
