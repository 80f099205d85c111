"""Entries of scores: each cell's benchmark by each reader, with error bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from benchmarks.paper.evaluation import droidspeak, points, reuse, suite_runs, suites
from benchmarks.paper.reproducing import decoding, statistics, tiny_data
from benchmarks.paper.reproducing.cells import Cell, Grid
from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.forms import OWN, is_translator
from benchmarks.paper.reproducing.judging import judge_of
from benchmarks.paper.reproducing.results import Line, Result, Value
from benchmarks.paper.reproducing.trained import needed, trained, wanted
from benchmarks.paper.reproducing.work import Work
from benchmarks.paper.tasks.memory import ORACLE, rung_name
from kvlingo_mlx.errors import MissingExtraError
from kvlingo_mlx.evaluation import lineup
from kvlingo_mlx.evaluation.compare import ALL, Outcome
from kvlingo_mlx.evaluation.error_bars import Mean, over_sets
from kvlingo_mlx.evaluation.lineup import Condition
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel

POINTS = {"whole": "prompt"}
# In a tiny run, the lengths that stand for the paper's rungs.
TINY_LENGTHS = {4096: 512, 8192: 768, 16384: 1024, 32768: 1280}
RATING = "mt_bench_101"  # from 1 to 10; means over benchmarks take it from 0 to 1
COMPUTE = "compute"
UNSCORED = ("mean", COMPUTE)
Models = tuple[LanguageModel, LanguageModel]


def make(entry: Entry, work: Work) -> Result:
    """An entry's scores where its cells stand."""
    if entry.extra.get("by") == "language":
        return _by_part(entry, work)
    grid = entry.grid()
    found, notes = measured(list(grid.cells()), work, entry)
    lines = []
    for row in grid.rows:
        values = [_value(cell, found) for cell in row.cells]
        if entry.extra.get("beside") == "R2":
            values = [
                _r2(work, row.cells, at) if at in (0, 3) else v for at, v in enumerate(values)
            ]
        lines.append(Line(row.names, tuple(values), row.paper))
    if not entry.columns:
        lines += _means(grid, found)
    return Result(grid.titles, grid.columns, tuple(lines), tuple(notes))


def _r2(work: Work, cells: Sequence[Cell | None], at: int) -> float:
    """The R2 that stands before two scores: at the capture point of their translator."""
    beside = cells[at + 1]
    assert beside is not None
    capture = "post_norm" if "post_norm" in beside.who else "pre_norm"
    return statistics.keys_r2(work, beside.pair, beside.way, capture)


def _means(grid: Grid, found: Mapping[Cell, Mean]) -> list[Line]:
    """For each pair and way of a figure, the means over its benchmarks."""
    rows: dict[tuple[str, ...], list[tuple[Cell | None, ...]]] = {}
    for row in grid.rows:
        rows.setdefault(row.names[:2], []).append(row.cells)
    lines = []
    for names, several in rows.items():
        if len(several) < 2:
            continue
        columns = [
            [_rescaled(c, found[c]) for c in column if c in found and found[c].count]
            for column in zip(*several, strict=True)
        ]
        means = (over_sets(column) if column else None for column in columns)
        lines.append(Line((*names, "mean, ratings from 0 to 1"), tuple(means)))
    return lines


def _by_part(entry: Entry, work: Work) -> Result:
    """A benchmark's parts, such as its languages, a row each."""
    grid = entry.grid()
    notes: dict[str, None] = {}
    parts: dict[tuple[str, ...], dict[str, dict[Cell, Mean]]] = {}
    every = list(_measured(list(grid.cells()), work, entry, notes))
    for row in grid.rows:
        for asked in every:
            for cell in row.cells:
                name = asked.names.get(cell) if cell is not None else None
                for part, means in (asked.outcome.tables[name] if name else {}).items():
                    place = parts.setdefault(row.names[:2], {}).setdefault(part, {})
                    place[cell] = means[asked.outcome.metrics[0]]  # type: ignore[index]
    cells = {row.names[:2]: row.cells for row in grid.rows}
    lines = [
        Line((*names, part), tuple(found.get(cell) for cell in cells[names]))  # type: ignore[arg-type]
        for names, several in parts.items()
        for part, found in several.items()
    ]
    return Result(grid.titles, grid.columns, tuple(lines), tuple(notes))


def _value(cell: Cell | None, found: Mapping[Cell, Mean]) -> Value:
    if cell is None or cell.what not in UNSCORED:
        return None if cell is None else found.get(cell)
    same = {
        other: mean
        for other, mean in found.items()
        if (other.pair, other.who, other.thinking, other.point)
        == (cell.pair, cell.who, cell.thinking, cell.point)
        and (other.who in OWN or other.way == cell.way)
    }
    if cell.what == COMPUTE:
        return next((mean.value for other, mean in same.items() if other.what == COMPUTE), None)
    means = [_rescaled(c, mean) for c, mean in same.items() if mean.count and c.what != COMPUTE]
    return over_sets(means) if means else None


def _rescaled(cell: Cell, mean: Mean) -> Mean:
    """A benchmark's score from 0 to 1."""
    return _unit(mean) if cell.benchmark == RATING else mean


def measured(cells: Sequence[Cell], work: Work, entry: Entry) -> tuple[dict[Cell, Mean], list[str]]:
    """The scores of cells, and notes on those that could not be had."""
    found: dict[Cell, Mean] = {}
    notes: dict[str, None] = {}
    for asked in _measured(cells, work, entry, notes):
        for cell, name in asked.names.items():
            found[cell] = score(asked.outcome, name, cell.rung, work)
            if name in asked.shares:
                found[replace(cell, what=COMPUTE)] = Mean(asked.shares[name], math.nan, 0)
    return found, list(notes)


def outcomes(cells: Sequence[Cell], work: Work, entry: Entry, notes: list[str]) -> list[Outcome]:
    """The outcomes of cells, with the scores of each seed; ``notes`` gets what could not be had."""
    told: dict[str, None] = {}
    found = [in_unit(asked.outcome) for asked in _measured(cells, work, entry, told)]
    notes += told
    return found


def in_unit(outcome: Outcome) -> Outcome:
    """An outcome whose seeds' scores are from 0 to 1, as tables over benchmarks have ratings."""
    if outcome.task != RATING:
        return outcome
    seeds = {
        name: [
            {part: {m: _unit(mean) for m, mean in means.items()} for part, means in table.items()}
            for table in tables
        ]
        for name, tables in outcome.seeds.items()
    }
    return replace(outcome, seeds=seeds)


def _unit(mean: Mean) -> Mean:
    """A rating from 1 to 10 as a score from 0 to 1."""
    return Mean((mean.value - 1) / 9, mean.error / 9, mean.count)


@dataclass(frozen=True)
class Asked:
    """A benchmark's outcome.

    Attributes:
        outcome: The outcome.
        names: The name of the condition that each cell has in it.
        shares: What each condition computes at a switch, as a share of the target's own prefill.
    """

    outcome: Outcome
    names: dict[Cell, str]
    shares: Mapping[str, float]


def _measured(
    cells: Sequence[Cell], work: Work, entry: Entry, notes: dict[str, None]
) -> Iterator[Asked]:
    """One outcome after the other.

    Cells of the same two models are measured together, so that each model is loaded once; all
    readers of a benchmark answer the same items.
    """
    asked = [cell for cell in cells if cell.what not in UNSCORED]
    _check(asked, work, entry)
    by_ends = sorted(asked, key=lambda cell: (cell.pair, cell.models))
    for (pair, ends), group in groupby(by_ends, lambda cell: (cell.pair, cell.models)):
        whole = list(group)
        for cell in whole:
            for one in needed(cell, work):
                trained(work, pair, one)
        names = dict(zip(pair, work.models.names(pair), strict=True))
        models = decoding.load(work.place, *(work.models.place(names[end]) for end in ends))
        for (benchmark, thinking), same in _by_benchmark(whole):
            try:
                yield _asked(benchmark, thinking, same, models, work, entry)
            except MissingExtraError as error:
                if not work.tiny:
                    raise
                notes[str(error)] = None


def _by_benchmark(cells: Iterable[Cell]) -> Iterable[tuple[tuple[str, bool], list[Cell]]]:
    ordered = sorted(cells, key=lambda cell: (cell.benchmark, cell.thinking))
    for key, same in groupby(ordered, lambda cell: (cell.benchmark, cell.thinking)):
        yield key, list(same)


def _check(cells: Sequence[Cell], work: Work, entry: Entry) -> None:
    """Refuse what lacks a judge or a module, before any training."""
    names = dict.fromkeys(cell.benchmark for cell in cells)
    rows = [row_of(name, entry) for name in names]
    if judge_of(work) is None and (judged := [row.name for row in rows if row.judged]):
        raise ValueError(
            f"a model judges the answers of {', '.join(judged)}; add --judge MODEL (the paper's "
            "is Qwen3.6-27B)"
        )
    if not work.tiny:
        suite_runs.check_modules(rows)
    for plain in {one.plain for cell in cells for one in wanted(cell)}:
        work.training_data(plain)


def row_of(benchmark: str, entry: Entry) -> suites.Benchmark:
    """A benchmark of the suite that an entry is of, under the entry's own rubric."""
    name = entry.extra.get("rubrics", {}).get(benchmark, benchmark)
    return suites.benchmark(name, "base" if entry.suffix else "paper")


def _asked(
    benchmark: str, thinking: bool, cells: Sequence[Cell], models: Models, work: Work, entry: Entry
) -> Asked:
    """A benchmark's outcome by the reader of each cell."""
    row = row_of(benchmark, entry)
    if row.task == suites.NEEDLES:
        decoding.check_mlx(work.place, row.title)
    ways = decoding.ways(work.place)
    line = {cell: condition_of(cell, models, work) for cell in cells}
    own = lineup.native(models[1], ways)
    conditions = list({c.name: c for c in (own, *line.values())}.values())
    items = entry.extra.get("items", {}).get(benchmark)
    outcome = suite_runs.run(
        row,
        models,
        conditions,
        settings_of(row, thinking, models, work, items),
        journal=work.journal,
        judge=judge_of(work) if row.judged else None,
        progress=lambda text, done, total: work.heard.progress(f"{text}: {done} of {total}"),
    )
    shares = {}
    if decoding.on_mlx(work.place):
        shares = reuse.shares(*models, conditions, outcome.prefix_tokens)
    return Asked(outcome, {cell: way.name for cell, way in line.items()}, shares)


def settings_of(
    row: suites.Benchmark, thinking: bool, models: Models, work: Work, items: int | None = None
) -> suite_runs.Settings:
    """A benchmark's settings in this run."""
    given = {key: value for key, value in work.benchmarks.items() if key != "judge"}
    lengths: list[int | str] = []
    if work.tiny:
        given = {"data": tiny_data.written(work), **given}
        lengths = [TINY_LENGTHS.get(int(n), n) if n != ORACLE else n for n in row.lengths]
    limits = [number for number in (items, work.size.items) if number is not None]
    return suite_runs.Settings(
        thinking=thinking,
        limit=min(limits, default=None),
        max_tokens=work.size.answer,
        lengths=lengths or None,
        data=given.get("data", {}),
        prompts=given.get("prompts", {}),
        more={"responses": work.responses, "decode": decoding.decoder(work.place)},
    )


def condition_of(cell: Cell, models: Models, work: Work) -> Condition:
    """The way in which a cell's reader gets its cache."""
    source, target = models
    ways, point = decoding.ways(work.place), POINTS.get(cell.point, cell.point)
    if cell.who in OWN:
        return lineup.native(target, ways)
    writer = decoding.writer(work.place, models)
    at = partial(points.moved, point=point, models=models, writer=writer)
    if cell.who == "text":
        return at(lineup.native(target, ways))
    if not is_translator(cell.who):
        decoding.check_mlx(work.place, cell.who)
        name, _, layers = cell.who.partition(":")
        if layers and work.tiny:  # the paper's models have more
            layers = str(min(int(layers), len(target.attentions)))
        spec = f"{name}:{layers}" if layers else name
        return reuse.baseline(droidspeak.spelt(spec, *models), *models)
    folders = [trained(work, cell.pair, one) for one in needed(cell, work)]
    found = [load_translator(folder) for folder in folders]
    return at(lineup.translated(cell.who, source, target, found, ways=ways))


def score(outcome: Outcome, condition: str, rung: str, work: Work) -> Mean:
    """The number of a condition that a table shows, of all rungs or of one."""
    parts = outcome.tables[condition]
    return parts[part_named(rung, parts, work)][outcome.metrics[0]]


def part_named(rung: str, parts: Mapping[str, Any], work: Work) -> str:
    """The name of a rung's part of an outcome."""
    if not rung:
        return ALL
    tokens = {f"{length // 1024}k": length for length in TINY_LENGTHS}.get(rung)
    length: Any = rung if tokens is None else TINY_LENGTHS[tokens] if work.tiny else tokens
    known = (rung_name(length), str(length), rung)
    return next(name for name in known if name in parts)
