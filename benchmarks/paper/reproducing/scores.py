"""Entries of scores: each cell's benchmark by each reader, with error bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import Any

from benchmarks.paper.evaluation import droidspeak, points, reuse, suite_runs, suites
from benchmarks.paper.reproducing import curves, decoding, statistics, tiny_data
from benchmarks.paper.reproducing.cells import Cell, Grid
from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.forms import OWN, is_translator
from benchmarks.paper.reproducing.judging import judge_of
from benchmarks.paper.reproducing.results import Line, Result, Value
from benchmarks.paper.reproducing.tables import RUNGS, meaning, tables
from benchmarks.paper.reproducing.trained import needed, trained, wanted
from benchmarks.paper.reproducing.work import Work
from benchmarks.paper.tasks.memory import rung_name
from kvlingo_mlx.errors import MissingExtraError
from kvlingo_mlx.evaluation import lineup
from kvlingo_mlx.evaluation.compare import ALL, NATIVE, Outcome
from kvlingo_mlx.evaluation.error_bars import Mean, over_sets
from kvlingo_mlx.evaluation.lineup import Condition
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample, to_samples
from kvlingo_mlx.training.checkpoints import log_of, read_log

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
    if entry.extra.get("beside") == "native":
        return _beside_native(entry, work)
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
        lines += means_of(entry, grid, found)
    return Result(grid.titles, grid.columns, tuple(lines), tuple(notes))


def _r2(work: Work, cells: Sequence[Cell | None], at: int) -> float:
    """The R2 that stands before two scores: of their translator."""
    beside = cells[at + 1]
    assert beside is not None
    folder = trained(work, beside.pair, *wanted(beside))
    return statistics.keys_r2(work, beside.pair, beside.way, folder)


def means_of(entry: Entry, grid: Grid, found: Mapping[Cell, Mean]) -> list[Line]:
    """For each pair and way of a figure, its means over benchmarks, which name them."""
    rows: dict[tuple[str, ...], list[tuple[str, tuple[Cell | None, ...]]]] = {}
    for row in grid.rows:
        rows.setdefault(row.names[:2], []).append((row.names[2], row.cells))
    lines = []
    for names, several in rows.items():
        for title, asked in (entry.means or {"mean": entry.what}).items():
            columns = [
                [_rescaled(c, found[c]) for c in column if c in found and found[c].count]
                for column in zip(*(cells for name, cells in several if name in asked), strict=True)
            ]
            if len(asked) > 1:
                values = tuple(over_sets(column) if column else None for column in columns)
                told = f"{title} of {', '.join(asked)}"
                lines.append(Line((*names, told.replace(RATING, f"{RATING} (0 to 1)")), values))
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


def _beside_native(entry: Entry, work: Work) -> Result:
    """Table "app:tab:mla": held-out KL, and scores less those of the target's own cache."""
    table = tables()[entry.label]
    gains, notes = {}, dict[str, None]()
    for asked in _measured(list(entry.grid().cells()), work, entry, notes):
        for cell, name in asked.names.items():
            pooled = row_of(cell.benchmark, entry).pooled
            gains[cell] = less_native(asked.outcome, name, pooled)
    lines = []
    for row in range(len(table.rows)):
        _, steps, way = table.names(row)
        pairs = [pair for pair in entry.pairs if pair[0].endswith("-60k") == (steps == "60k")]
        said = meaning((way,))["way"]
        cells = [
            Cell(pair, said, what, entry.who[0], seeds=entry.seeds)
            for what in entry.what
            for pair in pairs
        ]
        logs = [read_log(log_of(trained(work, c.pair, *wanted(c)))) for c in cells[: len(pairs)]]
        kls = [curves.held_out(log, share) for share in (0.0, 1.0) for log in logs]
        values = (*kls, *(gains.get(cell) for cell in cells))
        lines.append(Line((steps, way), values, table.values(row)))
    return Result(table.columns[:2], table.columns[2:], tuple(lines), tuple(notes))


def less_native(outcome: Outcome, name: str, rule: str) -> Mean:
    """A condition's score less that of the target's own cache; its error is of paired items."""
    metric = outcome.metrics[0]
    own = {item.item: item.scores[metric] for item in outcome.items[NATIVE]}
    gains = [
        replace(item, scores={metric: item.scores[metric] - own[item.item]})
        for item in outcome.items[name]
    ]
    return suite_runs.pooled(rule, gains, metric)


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
            found[cell] = score(asked.outcome, name, cell, work)
            if name in asked.shares:
                found[replace(cell, what=COMPUTE)] = Mean(asked.shares[name], math.nan, 0)
    return found, list(notes)


def by_seed(
    cells: Sequence[Cell], work: Work, entry: Entry, notes: list[str]
) -> dict[Cell, list[Mean]]:
    """Each seed's score of cells, ratings from 0 to 1; ``notes`` gets what could not be had."""
    told: dict[str, None] = {}
    found = {}
    for asked in _measured(cells, work, entry, told):
        for cell, name in asked.names.items():
            several = range(len(asked.outcome.seeds.get(name, ()))) or (None,)
            means = [score(asked.outcome, name, cell, work, seed) for seed in several]
            found[cell] = [_rescaled(cell, mean) for mean in means]
    notes += told
    return found


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
    work = _checked(asked, work, entry)
    notes |= dict.fromkeys(_told(asked, work, entry))
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
        del models  # before the next pair is trained


def _by_benchmark(cells: Iterable[Cell]) -> Iterable[tuple[tuple[str, bool], list[Cell]]]:
    ordered = sorted(cells, key=lambda cell: (cell.benchmark, cell.thinking))
    for key, same in groupby(ordered, lambda cell: (cell.benchmark, cell.thinking)):
        yield key, list(same)


def _checked(cells: Sequence[Cell], work: Work, entry: Entry) -> Work:
    """The run, after a refusal of what lacks a judge, a module or a GPU, before any training."""
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
    alone = [row.title for row in rows if row.task == suites.NEEDLES]
    alone += dict.fromkeys(cell.who.partition(":")[0] for cell in cells if _is_baseline(cell))
    alone += ["the judge"] * (any(row.judged for row in rows) and not work.tiny)
    return decoding.with_mlx(work, alone)


def _told(cells: Sequence[Cell], work: Work, entry: Entry) -> Iterator[str]:
    """What is ours of benchmarks that the paper names."""
    rows = [row_of(name, entry) for name in dict.fromkeys(cell.benchmark for cell in cells)]
    yield f"answers were decoded on {work.place}"
    if any(row.task == suites.NEEDLES for row in rows):
        yield "RULER is our needles, RULER-like: several values or queries in generated prose"
    if any(row.judged for row in rows):
        who = work.benchmarks.get("judge", "a rule that stands for a model")
        own = "given (--judge-prompts)" if work.benchmarks.get("prompts") else "our own wording"
        yield f"judge: {who}, greedy, without reasoning; its prompts: {own}"


def _is_baseline(cell: Cell) -> bool:
    return cell.who not in (*OWN, "text") and not is_translator(cell.who)


def row_of(benchmark: str, entry: Entry) -> suites.Benchmark:
    """A benchmark of the suite that an entry is of, as the entry asks it."""
    how = entry.how.get(benchmark, {})
    row = suites.benchmark(how.get("row", benchmark), entry.suite)
    return replace(
        row, **{n: value for n, value in how.items() if n in ("budget", "shots", "draw")}
    )


def lengths_of(row: suites.Benchmark, rungs: Iterable[str]) -> list[int]:
    """The lengths that must be asked for some rungs, of which an empty one is all.

    LongMemEval's are asked from the shortest on, since a rung holds the one below, and the
    shortest chooses the questions.
    """
    whole = [n for n in row.lengths if isinstance(n, int)]
    named = {name for rung in rungs for name in rungs_of(rung)}
    asked = [n for n in whole if not named or rung_name(n) in named]
    return asked if row.task == suites.NEEDLES else [n for n in whole if n <= max(asked)]


def rungs_of(rung: str) -> tuple[str, ...]:
    """The names of rungs that ``oracle-16k`` spans, or of the one that is named."""
    first, _, last = rung.partition("-")
    return RUNGS[RUNGS.index(first) : RUNGS.index(last or first) + 1] if rung else ()


def _asked(
    benchmark: str, thinking: bool, cells: Sequence[Cell], models: Models, work: Work, entry: Entry
) -> Asked:
    """A benchmark's outcome by the reader of each cell."""
    row = row_of(benchmark, entry)
    ways = decoding.ways(work.place)
    line = {cell: condition_of(cell, models, work) for cell in cells}
    own = lineup.native(models[1], ways)
    conditions = list({c.name: c for c in (own, *line.values())}.values())
    outcome = suite_runs.run(
        row,
        models,
        conditions,
        settings_of(
            row,
            thinking,
            work,
            lengths_of(row, {cell.rung for cell in cells}),
            entry.how.get(benchmark, {}).get("items"),
        ),
        journal=work.journal,
        judge=judge_of(work) if row.judged else None,
        progress=lambda text, done, total: work.heard.progress(f"{text}: {done} of {total}"),
    )
    shares = {}
    if decoding.on_mlx(work.place):
        shares = reuse.shares(*models, conditions, outcome.prefix_tokens)
    return Asked(outcome, {cell: way.name for cell, way in line.items()}, shares)


def settings_of(
    row: suites.Benchmark,
    thinking: bool,
    work: Work,
    lengths: Sequence[int] = (),
    items: int | None = None,
) -> suite_runs.Settings:
    """A benchmark's settings in this run."""
    given = {key: value for key, value in work.benchmarks.items() if key != "judge"}
    if work.tiny:
        given = {"data": tiny_data.written(work), **given}
        lengths = [TINY_LENGTHS[n] for n in lengths]
    limits = [number for number in (items, work.size.items) if number is not None]
    return suite_runs.Settings(
        thinking=thinking,
        limit=min(limits, default=None),
        max_tokens=work.size.answer,
        lengths=list(lengths) or None,
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
        name, _, layers = cell.who.partition(":")
        if layers and work.tiny:  # the paper's models have more
            layers = str(min(int(layers), len(target.attentions)))
        spec = f"{name}:{layers}" if layers else name
        return reuse.baseline(droidspeak.spelt(spec, *models, _profiled(target, work)), *models)
    folders = [trained(work, cell.pair, one) for one in needed(cell, work)]
    found = [load_translator(folder) for folder in folders]
    return at(lineup.translated(cell.who, source, target, found, ways=ways))


def _profiled(target: LanguageModel, work: Work) -> list[Sample]:
    """The conversations by which DroidSpeak's profiler chooses layers."""
    found = to_samples(
        statistics.records(work, droidspeak.PROFILED), target.tokenizer, target.context_length
    )
    return list(islice(found, droidspeak.PROFILED))


def score(
    outcome: Outcome, condition: str, cell: Cell, work: Work, seed: int | None = None
) -> Mean:
    """The number of a condition that a table shows, of all rungs or of its cell's; of one seed."""
    tables = outcome.tables if seed is None else {condition: outcome.seeds[condition][seed]}
    parts, metric = tables[condition], outcome.metrics[0]
    known = (part_named(rung, parts, work) for rung in rungs_of(cell.rung))
    names = [name for name in known if name is not None]
    if len(names) < 2:
        return parts[names[0] if cell.rung else ALL][metric]
    items = [item for item in outcome.items[condition] if item.group in names]
    if seed is not None:
        items = [replace(item, scores=item.seeds[seed], seeds=()) for item in items]
    return suite_runs.pooled(suites.benchmark(cell.benchmark).pooled, items, metric)


def part_named(rung: str, parts: Mapping[str, Any], work: Work) -> str | None:
    """The name of a rung's part of an outcome; None if it has no such part."""
    tokens = {f"{length // 1024}k": length for length in TINY_LENGTHS}.get(rung)
    length: Any = rung if tokens is None else TINY_LENGTHS[tokens] if work.tiny else tokens
    known = (rung_name(length), str(length), rung)
    return next((name for name in known if name in parts), None)
