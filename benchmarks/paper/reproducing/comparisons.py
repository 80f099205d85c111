"""Tables that compare scores with one another: over seeds, and cell by cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.paper.analysis.statistics import sign_test
from benchmarks.paper.evaluation import seeds
from benchmarks.paper.evaluation.suites import benchmark
from benchmarks.paper.reproducing import scores
from benchmarks.paper.reproducing.cells import Cell, cell_of, said_by
from benchmarks.paper.reproducing.entries import FACTS, LARGE, SMALL, Entry
from benchmarks.paper.reproducing.results import Line, Result, Value
from benchmarks.paper.reproducing.tables import WAYS, Pair, meaning, tables
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.evaluation.error_bars import Mean, over_sets


def make(entry: Entry, work: Work) -> Result:
    """The result of a table that compares."""
    if entry.label == "tab:seedsd":
        return _spread(entry, work)
    return _sets(entry, work) if entry.label == "tab:seedsets" else _signs(entry, work)


# ---- seeds ------------------------------------------------------------------------------------


def _spread(entry: Entry, work: Work) -> Result:
    """Table "seedsd": the seeds' standard deviation beside the error over items.

    Each is the median over a family's cells: pairs, ways, readers, modes and RULER's rungs.
    """
    table = tables()[entry.label]
    notes: list[str] = []
    medians: dict[tuple[str, str], tuple[float | None, float]] = {}
    for family, (pairs, _, _) in entry.extra["families"].items():
        cells = cells_of_families(entry, (family,))
        judged = replace(entry, how=FACTS if {*pairs} <= {SMALL, LARGE} else {})
        found: dict[str, list[list[Mean]]] = {}
        for cell, means in scores.by_seed(cells, work, judged, notes).items():
            found.setdefault(cell.benchmark, []).append(means)
        for what, several in found.items():
            sd = statistics.median(seeds.spread([m.value for m in each]) for each in several)
            error = statistics.median(each[0].error for each in several)
            medians[family, what] = None if math.isnan(sd) else sd, error
    lines = []
    for row in range(len(table.rows)):
        what = meaning(table.names(row))["what"]
        values = [v for f in entry.extra["families"] for v in medians.get((f, what), (None,) * 2)]
        lines.append(Line((table.names(row)[-1],), tuple(values), table.values(row)))
    return Result(table.columns[:1], table.columns[1:], tuple(lines), tuple(dict.fromkeys(notes)))


def cells_of_families(entry: Entry, families: Sequence[str] = ()) -> list[Cell]:
    """The cells of some families, or of all that an entry of seeds has, or of its sets."""
    found = []
    for family, (pairs, readers, benchmarks) in entry.extra.get("families", {}).items():
        if family in (families or (family,)):
            for mode in entry.modes:
                some = [w for w in benchmarks if (mode == "on") in _modes(w)]
                found += _cells(entry, pairs, readers, some, (mode,))
    for pair, benchmarks in entry.extra.get("sets", {}).items():
        found += _cells(entry, (pair,), ("mixing", "mixing+greedy"), benchmarks, ("off",))
    return found


def _modes(what: str) -> tuple[bool, ...]:
    """Whether the paper scores a benchmark without and with reasoning."""
    return benchmark(what.split()[0]).reasoning


def _sets(entry: Entry, work: Work) -> Result:
    """Table "seedsets": one mean over benchmarks for each translator, seed by seed."""
    table = tables()[entry.label]
    notes: list[str] = []
    lines = []
    for row in range(len(table.rows)):
        names = table.names(row)
        said = meaning(names)
        reader = "mixing" if names[-1] == "depth" else "mixing+greedy"
        cells = [
            Cell(said["pair"], said["way"], what, reader, seeds=entry.seeds)
            for what in entry.extra["sets"][said["pair"]]
        ]
        found = scores.by_seed(cells, work, entry, notes).values()
        each = [over_sets(means) for means in zip(*found, strict=True)]
        values: tuple[Value, ...] = (None,) * 4
        if each:
            scored = [seed.value for seed in each]
            middle = Mean(sum(scored) / len(scored), seeds.spread(scored), len(scored))
            values = (each[0], middle, *scored[1:], *[None] * (3 - len(scored)))
        lines.append(Line(tuple(n for n in names if n), values, table.values(row)))
    columns = table.columns
    return Result(columns[:3], columns[3:], tuple(lines), tuple(dict.fromkeys(notes)))


def _cells(
    entry: Entry,
    pairs: Sequence[Pair],
    readers: Sequence[str],
    benchmarks: Sequence[str],
    modes: Sequence[str],
) -> list[Cell]:
    """Every way and benchmark of some pairs, by every reader, with the entry's seeds."""
    found = []
    for pair in pairs:
        for way in WAYS:
            for mode in modes:
                for reader in readers:
                    for what in benchmarks:
                        said = said_by(f"{mode} {reader}") | {"pair": pair, "way": way}
                        found.append(cell_of(said | {"what": what}, entry.seeds))
    return [cell for cell in found if cell is not None]


# ---- signs ------------------------------------------------------------------------------------


def _signs(entry: Entry, work: Work) -> Result:
    """Table "knorm": in how many cells the second translator scores lower than the first."""
    table = tables()[entry.label]
    lines, notes = [], dict[str, None]()
    for row, asked in enumerate(entry.extra["rows"]):
        names, paper = (table.names(row)[-1],), table.values(row)
        if asked is None:
            lines.append(Line(names, (None,) * 3, paper))
            continue
        benchmarks, mode = asked
        found = []
        for reader in entry.who:
            cells = _cells(entry, entry.pairs, (reader,), benchmarks, (mode,))
            means, more = scores.measured(cells, work, entry)
            notes |= dict.fromkeys(more)
            found.append([means.get(cell) for cell in cells])
        pairs = [(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None]
        if not pairs:
            lines.append(Line(names, (None,) * 3, paper))
            continue
        test = sign_test([b.value - a.value for a, b in pairs])
        # The items are the same, so this error is larger than that of paired differences.
        error = over_sets([Mean(0, (a.error**2 + b.error**2) ** 0.5, 1) for a, b in pairs]).error
        values = (len(pairs), test.below, Mean(test.mean, error, len(pairs)))
        lines.append(Line(names, values, paper))
        notes[f"{names[0]}: sign test p = {test.p:.2g}"] = None
    return Result(table.columns[:1], table.columns[1:], tuple(lines), tuple(notes))
