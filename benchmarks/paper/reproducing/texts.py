"""Tables of base models on plain text: what a translated cache costs in perplexity."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from benchmarks.paper.evaluation import windows
from benchmarks.paper.reproducing import curves, scores
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.entries import CORPORA, Entry
from benchmarks.paper.reproducing.forms import is_translator
from benchmarks.paper.reproducing.results import Line, Result, Value
from benchmarks.paper.reproducing.tables import Pair, meaning, tables
from benchmarks.paper.reproducing.trained import Wanted, trained
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.evaluation import compare, lineup
from kvlingo_mlx.evaluation.compare import NATIVE, Outcome
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.training.checkpoints import log_of, read_log

WINDOW, TINY_WINDOW = (256, 256), (64, 32)
WINDOWS = 128  # documents of a corpus, of which each gives its first window
GAP, PPL = "gap", "perplexity"


def make(entry: Entry, work: Work) -> Result:
    """The result of an entry of perplexities."""
    return MAKERS.get(entry.label, _corpora)(entry, work)


def _corpora(entry: Entry, work: Work) -> Result:
    """Table "baseppl": the rise of perplexity in percent, corpus by corpus."""
    table = tables()[entry.label]
    lines, notes = [], set()
    for row in range(len(table.rows)):
        said = meaning(table.names(row))
        values: list[Value] = []
        for corpus in entry.what:
            outcome, note = _outcome(entry, work, _base(entry, said["pair"]), said["way"], corpus)
            notes |= {note} if note else set()
            values.append(None if outcome is None else _percent(outcome, entry.who[0]))
        names = tuple(name for name in table.names(row) if name)
        lines.append(Line(names, tuple(values), table.values(row)))
    columns = table.columns
    return Result(columns[: table.labels], columns[table.labels :], tuple(lines), tuple(notes))


def _percent(outcome: Outcome, name: str) -> float:
    """By how many percent the perplexity is above native."""
    return 100 * math.expm1(outcome.tables[name]["text"][GAP].value)


def _gaps(entry: Entry, work: Work) -> Result:
    """Table "scratchppl": the target's own perplexity, and the rise of its logarithm, by reader."""
    table = tables()[entry.label]
    lines, notes = [], set()
    for row in range(len(table.rows)):
        _, way, corpus = table.names(row)
        said = meaning((way,))["way"]
        outcome, note = _outcome(entry, work, entry.pairs[0], said, corpus.lower())
        notes |= {note} if note else set()
        values: list[Value] = [None] * (1 + len(entry.who))
        if outcome is not None:
            found = {name: each["text"] for name, each in outcome.tables.items()}
            values = [found[NATIVE][PPL].value, *(found[name][GAP].value for name in entry.who)]
        lines.append(Line((way, corpus), tuple(values), table.values(row)))
    return Result(table.columns[:2], table.columns[2:], tuple(lines), tuple(notes))


def _scratch(entry: Entry, work: Work) -> Result:
    """Figure "scratch": perplexities of corpora, accuracies of tasks, and these tasks' mean."""
    grid = entry.grid()
    asked = [cell for cell in grid.cells() if cell.what not in CORPORA]
    found, told = scores.measured(asked, work, entry)
    notes = dict.fromkeys(told)
    lines = []
    for row in grid.rows:
        name, way, what = row.names
        values: list[Value] = [None if cell is None else found.get(cell) for cell in row.cells]
        if what in CORPORA:
            pair = next(cell.pair for cell in row.cells if cell is not None)
            outcome, note = _outcome(entry, work, pair, way, what)
            notes |= {note: None} if note else {}
            values = [None] * len(entry.who)
            if outcome is not None:
                readers = (NATIVE, *entry.who[1:])
                values = [outcome.tables[who]["text"][PPL].value for who in readers]
        kind = "perplexity" if what in CORPORA else "accuracy"
        lines.append(Line((name, way, kind, what), tuple(values)))
    for line in scores.means_of(entry, grid, found):
        lines.append(replace(line, names=(*line.names[:2], "accuracy", line.names[2])))
    titles = ("pair", "way", "of", "what")
    return Result(titles, grid.columns, tuple(lines), tuple(notes))


def _joint(entry: Entry, work: Work) -> Result:
    """Table "splitjoint": maps of keys and values apart, and joint ones."""
    table = tables()[entry.label]
    lines, notes = [], set()
    for row in range(len(table.rows)):
        said = meaning(table.names(row))
        pair, way = _base(entry, said["pair"]), said["way"]
        kls: list[Value] = []
        for form in entry.who:
            (one,) = _wanted(entry, pair, way, form)[:1]
            kls.append(curves.held_out(read_log(log_of(trained(work, pair, one))), 1.0))
        gaps: list[Value] = []
        for corpus in entry.what[:2]:
            outcome, note = _outcome(entry, work, pair, way, corpus)
            notes |= {note} if note else set()
            gaps.append(None if outcome is None else _gap(outcome, entry.who))
        cells = [Cell(pair, way, entry.what[2], who, seeds=entry.seeds) for who in entry.who]
        found, more = scores.measured(cells, work, entry)
        notes |= set(more)
        values = (*kls, *gaps, *(found.get(cell) for cell in cells))
        names = tuple(name for name in table.names(row) if name)
        lines.append(Line(names, values, table.values(row)))
    columns = table.columns
    return Result(columns[: table.labels], columns[table.labels :], tuple(lines), tuple(notes))


def _gap(outcome: Outcome, who: tuple[str, ...] | list[str]) -> float:
    """By how much the first kind of maps has the higher log perplexity."""
    return difference(*(outcome.tables[name]["text"][GAP].value for name in who))


def difference(split: float, joint: float) -> float:
    """The paper's sign: what the split maps have more than the joint ones."""
    return split - joint


def _base(entry: Entry, pair: Pair) -> Pair:
    return pair[0] + entry.suffix, pair[1] + entry.suffix


def _wanted(entry: Entry, pair: Pair, way: str, form: str) -> list[Wanted]:
    source, target = Cell(pair, way, "", form).models
    return [Wanted(source, target, form, seed) for seed in entry.seeds]


def _outcome(
    entry: Entry, work: Work, pair: Pair, way: str, corpus: str
) -> tuple[Outcome | None, str]:
    """Every translator's windows of a corpus, or why there are none."""
    file = _file(work, corpus)
    if file is None:
        return None, f"no text of {corpus} was given (--task-data {corpus}=FILE)"
    forms = filter(is_translator, (who for who in entry.who if who != "target"))
    wanted = {form: _wanted(entry, pair, way, form)[: work.size.seeds] for form in forms}
    folders = {form: [trained(work, pair, one) for one in ones] for form, ones in wanted.items()}
    small, large = work.models.pair(pair)
    ends = (small, large) if Cell(pair, way, "", "x").models == pair else (large, small)
    source, target = load_pair(*ends)
    window = TINY_WINDOW if work.tiny else entry.extra.get("window", WINDOW)
    task = windows.task(source, target, file, work.size.items or WINDOWS, window)
    line = [lineup.native(target)] + [
        lineup.translated(form, source, target, [load_translator(f) for f in found])
        for form, found in folders.items()
    ]
    work.heard.progress(f"reading {corpus}")
    results = compare.evaluate(target, [task], line, work.journal)
    return windows.outcome(task, results[task.name]), ""


def _file(work: Work, corpus: str) -> str | None:
    """The file of a corpus: a user's, or in a tiny run the text that was trained on."""
    given = work.benchmarks.get("data", {}).get(corpus)
    if given is not None:
        return str(Path(given))
    return work.training_data(plain=True)[0] if work.tiny else None


MAKERS = {"tab:splitjoint": _joint, "tab:scratchppl": _gaps, "app:fig:scratch": _scratch}
