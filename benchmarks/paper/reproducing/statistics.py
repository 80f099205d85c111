"""Entries that are measured on two models' caches alone: R2, CKA, ranks, heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.paper.analysis import tables as laid
from benchmarks.paper.analysis.report import Report, Settings, analyze
from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.results import Line, Result
from benchmarks.paper.reproducing.tables import (
    LARGE_TO_SMALL,
    SMALL_TO_LARGE,
    WAYS,
    Pair,
    Table,
    meaning,
    tables,
)
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.tokenization.records import open_source

# Paragraph "Protocol": 512 documents of 256 tokens. A tiny run reads fewer.
DOCUMENTS, TOKENS = 512, 512 * 256
TINY_SIZE = {"documents": 24, "tokens": 24 * 128, "epochs": 2, "hidden": 16}
ARROWS = {LARGE_TO_SMALL: "L → S", SMALL_TO_LARGE: "S → L"}
SCRATCH = "scratch"


def report_of(work: Work, pair: Pair, way: str, **asked: Any) -> Report:
    """What two models' caches have in common, in one direction; ``asked`` are settings."""
    ends = work.models.pair(pair)
    source, target = load_pair(*(ends if way == SMALL_TO_LARGE else ends[::-1]))
    size = TINY_SIZE if work.tiny else {"documents": DOCUMENTS, "tokens": TOKENS}
    settings = Settings(**{"cka": False, "mlp": False, "heads": False, **size, **asked})
    work.heard.progress(f"reading {source.name} and {target.name}")
    return analyze(
        source,
        target,
        _records(work, settings.documents),
        settings,
    )


def _records(work: Work, count: int) -> Iterator[Mapping[str, Any]]:
    """The first records of the training data, and some more, since some are of no use."""
    for name in work.training_data():
        source, _ = open_source(name)
        records = (source.read(row)[0] for row in range(min(len(source.sizes), 4 * count)))
        yield from filter(None, records)


def keys_r2(work: Work, pair: Pair, way: str, capture: str) -> float:
    """The mean R2 of linear maps of keys at a capture point (table "cachedist")."""
    return report_of(work, pair, way, capture=capture).summary["keys"].linear


def make(entry: Entry, work: Work) -> Result:
    """The result of an entry of statistics."""
    return MAKERS[entry.extra["statistic"]](entry, work)


# ---- tables -----------------------------------------------------------------------------------


def _rows(table: Table) -> list[tuple[Pair, str, int]]:
    """The pair, the way and the place of each row whose models are released ones."""
    found = []
    for row in range(len(table.rows)):
        names = table.names(row)
        said = meaning(names)
        if "pair" in said and SCRATCH not in " ".join(names):
            found.append((said["pair"], said.get("way", LARGE_TO_SMALL), row))
    return found


def _linearity(entry: Entry, work: Work) -> Result:
    """Tables "linearity" and "affine": a row for each pair, way and side."""
    table = tables()[entry.label]
    affine = entry.extra["statistic"] == "affine"
    reports: dict[tuple[Pair, str], Report] = {}
    lines = []
    for pair, way, row in _rows(table):
        if (pair, way) not in reports:
            reports[pair, way] = report_of(work, pair, way, mlp=not affine)
        names = [name for name in table.names(row) if name]
        report = reports[pair, way]
        found = laid.affine("", ARROWS[way], report) if affine else laid.linearity("", report)
        (cells,) = (cells for cells in found if cells[-3 if affine else 1] == names[-1])
        numbers = tuple(cells[3:] if affine else cells[2:])
        lines.append(Line(tuple(names), numbers, table.values(row)))
    return Result(table.columns[: table.labels], table.columns[table.labels :], tuple(lines))


def _rank(entry: Entry, work: Work) -> Result:
    """Table "erank": the models of each pair, trained and with random weights."""
    table = tables()[entry.label]
    places = {table.names(row)[-1]: row for row in range(len(table.rows))}
    lines = []
    for pair in entry.pairs:
        for random_init in (False, True):
            report = report_of(work, pair, SMALL_TO_LARGE, random_init=random_init)
            for model, end in zip(pair, ("source", "target"), strict=True):
                name = f"{model}, {'random init' if random_init else 'trained'}"
                (cells,) = laid.rank(name, report, end)
                paper = table.values(places[name]) if name in places else ()
                lines.append(Line((name,), tuple(cells[1:]), paper))
    return Result(table.columns[:1], table.columns[1:], tuple(lines))


# ---- figures ----------------------------------------------------------------------------------


def _grids(entry: Entry, work: Work) -> Result:
    """Figure "cka": how alike each target layer is to each source layer, pair by pair."""
    lines: list[Line] = []
    widest = 0
    for pair in entry.pairs:
        rows = laid.layer_grid(report_of(work, pair, SMALL_TO_LARGE, cka=True))
        widest = max(widest, len(rows[0]))
        lines += [Line((_named(pair), str(layer)), tuple(row)) for layer, row in enumerate(rows)]
    whole = [Line(line.names, _wide(line.values, widest)) for line in lines]
    return Result(("pair", "target layer"), tuple(map(str, range(widest))), tuple(whole))


def _wide(values: Sequence[Any], width: int) -> tuple[Any, ...]:
    return (*values, *[None] * (width - len(values)))


def _by_pair(
    columns: tuple[str, ...], rows_of: Callable[[str, Report], list[laid.Row]], **asked: bool
) -> Callable[[Entry, Work], Result]:
    """A maker of a row for each pair and way."""

    def rows(entry: Entry, work: Work) -> Result:
        lines = []
        for pair in entry.pairs:
            for way in WAYS:
                (cells,) = rows_of(_named(pair), report_of(work, pair, way, **asked))
                lines.append(Line((str(cells[0]), way), tuple(cells[1:])))
        return Result(("pair", "way"), columns, tuple(lines))

    return rows


def _named(pair: Pair) -> str:
    return f"{pair[0]} and {pair[1]}"


MAKERS: dict[str, Callable[[Entry, Work], Result]] = {
    "linearity": _linearity,
    "affine": _linearity,
    "rank": _rank,
    "cka": _grids,
    "contrast": _by_pair(("contrast", "offset"), laid.contrast, cka=True),
    "heads": _by_pair(("share of keys", "share of values"), laid.heads, heads=True),
}
