"""What ``kvlingo-mlx eval`` prints of its outcomes, and how it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.output import table, warn

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.compare import Outcome
    from kvlingo_mlx.evaluation.error_bars import Mean

MOST_COLUMNS = 4


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        warn("interrupted; what was scored is kept, and the same command goes on from there")
        raise


def print_outcome(outcome: Outcome, shares: Mapping[str, float] | None = None) -> None:
    """Print an outcome; with ``shares``, a last column has what each condition computes.

    One metric makes one table with a column per group, or a row per group if there are many, and
    then a table for every few conditions.
    Several metrics make a table per group; of many groups, the first metric's and all items' alone.
    """
    title, tables, metrics = outcome.task, outcome.tables, outcome.metrics
    groups = list(next(iter(tables.values())))
    if len(metrics) > 1 and len(groups) > MOST_COLUMNS:
        print_outcome(replace(outcome, metrics=metrics[:1]), shares)
        groups = groups[-1:]  # all items; the other scores of each part are in the record
    if len(metrics) == 1:
        title += f": {metrics[0]}, {outcome.count} items"
        cells = {
            name: [_cell(found[g][metrics[0]]) for g in groups] for name, found in tables.items()
        }
        if len(groups) <= MOST_COLUMNS:
            _with_shares(title, groups, cells, shares)
            return
        names = list(cells)
        for start in range(0, len(names), MOST_COLUMNS):
            some = names[start : start + MOST_COLUMNS]
            columns = zip(*(cells[name] for name in some), strict=True)
            table(title, ["", *some], [[g, *row] for g, row in zip(groups, columns, strict=True)])
        return
    for group in groups:
        first = next(iter(tables.values()))[group]
        count = max(mean.count for mean in first.values())
        cells = {name: [_cell(found[group][m]) for m in metrics] for name, found in tables.items()}
        _with_shares(f"{title} ({group}), {count} items", metrics, cells, shares)


def _with_shares(
    title: str,
    columns: Sequence[str],
    cells: Mapping[str, list[str]],
    shares: Mapping[str, float] | None,
) -> None:
    """Print a table of conditions, with their share of the target's prefill if it is known."""
    more = {name: [f"{shares[name]:.2f}"] if name in shares else [""] for name in cells if shares}
    rows = [[name, *row, *more.get(name, [])] for name, row in cells.items()]
    table(title, ["cache", *columns, *(["compute"] if shares else [])], rows)


def _cell(mean: Mean) -> str:
    return str(mean) if mean.count else "none"
