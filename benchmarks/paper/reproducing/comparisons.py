"""Tables that compare scores with one another: over seeds, and cell by cell."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.analysis.statistics import sign_test
from benchmarks.paper.evaluation import seeds
from benchmarks.paper.reproducing import scores
from benchmarks.paper.reproducing.cells import Cell, cell_of, said_by
from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.results import Line, Result, Value
from benchmarks.paper.reproducing.tables import WAYS, Pair, meaning, tables
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.evaluation.compare import ALL
from kvlingo_mlx.evaluation.error_bars import Mean, over_sets


def make(entry: Entry, work: Work) -> Result:
    """The result of a table that compares."""
    if entry.label == "tab:seedsd":
        return _spread(entry, work)
    return _sets(entry, work) if entry.label == "tab:seedsets" else _signs(entry, work)


# ---- seeds ------------------------------------------------------------------------------------


def _spread(entry: Entry, work: Work) -> Result:
    """Table "seedsd": the seeds' standard deviation beside the error over items."""
    table = tables()[entry.label]
    families = entry.extra["families"]
    found, notes = {}, list[str]()
    for family, (pairs, readers, benchmarks) in families.items():
        cells = _cells(entry, pairs, readers, benchmarks, ("off",))
        outcomes = scores.outcomes(cells, work, entry, notes)
        found[family] = seeds.medians(cell for cell in seeds.cells(outcomes) if _whole(cell))
    lines = []
    for row in range(len(table.rows)):
        what = meaning(table.names(row))["what"]
        values: list[Value] = []
        for family in families:
            pairs_of = {name: pair for (name, _), pair in found[family].items()}
            values += pairs_of.get(what, (None, None))
        lines.append(Line((table.names(row)[-1],), tuple(values), table.values(row)))
    return Result(table.columns[:1], table.columns[1:], tuple(lines), tuple(dict.fromkeys(notes)))


def _whole(cell: seeds.Cell) -> bool:
    """Whether a cell is of all items."""
    return "(" not in cell.metric or f"({ALL})" in cell.metric


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
        whole = seeds.over_tasks(scores.outcomes(cells, work, entry, notes))
        each = next((cell for cell in whole if cell.condition == reader), None)
        values: tuple[Value, ...] = (None,) * 4
        if each is not None:
            first, *others = each.seeds
            middle = Mean(each.mean, each.seed_sd, len(each.seeds))
            rest = [seed.value for seed in others]
            values = (first, middle, *rest, *[None] * (2 - len(rest)))
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
            notes[f"{names[0]}: not made here"] = None
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
