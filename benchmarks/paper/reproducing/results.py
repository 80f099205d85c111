"""An entry's numbers beside the paper's: laid out, kept, and found again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.files import sha256_of
from kvlingo_mlx.reporting import measure

FOLDER = "results"
HEADS = "translator, models, seed, rate, stage-1 rate, steps, best step, median ridge, sha256"
MADE = tuple(HEADS.split(", "))
MADE_BY = ("seed", "learning_rate", "stage1_rate", "steps", "best_step")  # provenance
Value = Mean | float | str | None


@dataclass(frozen=True)
class Line:
    """A row: the words that name it, what was measured, and the paper's values if it has any."""

    names: tuple[str, ...]
    values: tuple[Value, ...]
    paper: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Result:
    """An entry's numbers.

    Attributes:
        titles: The titles of the columns that name rows.
        columns: The titles of the columns of values.
        lines: The rows.
        notes: What a reader must know, one sentence each.
    """

    titles: tuple[str, ...]
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()


def shown(value: Value | Sequence[float]) -> str:
    """A value as text: ``0.251 +- 0.010``; a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, Mean):
        return str(value) if value.count else "-"
    if isinstance(value, Sequence):
        return f"{value[0]:g} +- {value[1]:g}"
    return f"{value:.4g}"


def cells(line: Line) -> list[str]:
    """A row's values as text, each with the paper's behind it where the paper has one."""
    paper = line.paper or (None,) * len(line.values)
    return [
        shown(value) if theirs is None else f"{shown(value)} (paper {shown(theirs)})"
        for value, theirs in zip(line.values, paper, strict=True)
    ]


def markdown(
    entry: Entry, result: Result, notes: Sequence[str], made: Sequence[Sequence[str]] = ()
) -> str:
    """A page with the table, and what its numbers depend on: ``made`` has its translators."""
    head = [*result.titles, *result.columns]
    rows = [[*line.names, *cells(line)] for line in result.lines]
    width = len(head)
    # A row that names fewer things than another leaves its first cells empty.
    padded = [[""] * (width - len(row)) + row for row in rows]
    lines = [f"# {entry.label}: {entry.title}", "", *_table(head, padded)]
    lines += ["", *(f"- {note}" for note in notes)]
    if made:
        lines += ["", "Its translators:", "", *_table(MADE, made)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def notes_of(work: Work, entry: Entry, result: Result) -> list[str]:
    """What a reader of the numbers must know: how they were made, otherwise than the paper's."""
    told = []
    if work.tiny:
        told.append("tiny models, made to test the way and not the method")
    if sizes := work.size.told:
        listed = ", ".join(f"{name} {number}" for name, number in sizes.items())
        told.append(f"a smaller run than the paper's: {listed} at most")
    told += entry.differs
    if data := made_of(work):
        told.append(f"translators were trained on {work.trains}, of {', '.join(data)}")
    return [*told, *dict.fromkeys(result.notes), measure.machine_line()]


def made_of(work: Work) -> list[str]:
    """The data that translators were trained on here, by name."""
    plain = {one.plain for one, folder in work.used.items() if work.room in folder.parents}
    return [Path(name).name for each in sorted(plain) for name in work.training_data(each)]


def made_by(work: Work) -> list[list[str]]:
    """How each translator of an entry was made, a row each: see ``MADE``."""
    rows = []
    for one, folder in sorted(work.used.items()):
        config = translator_folder.read_config(folder)
        made = config.provenance
        weights = sha256_of(folder / translator_folder.WEIGHTS_FILE)
        told = [made.get(name) for name in MADE_BY]
        ends = f"{one.source} to {one.target}"
        rows.append([one.form, ends, *map(_told, told), _told(made.get("ridge")), weights[:12]])
    return rows


def _told(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def keep(work: Work, entry: Entry, result: Result) -> Path:
    """Write an entry's numbers as JSON and as a page; returns the page."""
    notes, made = notes_of(work, entry, result), made_by(work)
    record = {
        "label": entry.label,
        "tiny": work.tiny,
        "size": work.size.told,
        "date": time.strftime("%Y-%m-%d"),
        "environment": measure.environment(),
        "titles": result.titles,
        "columns": result.columns,
        "rows": [
            {"names": line.names, "values": measure.plain(line.values), "paper": line.paper}
            for line in result.lines
        ],
        "notes": notes,
        "translators": [dict(zip(MADE, row, strict=True)) for row in made],
    }
    work.write(f"{FOLDER}/{slug(entry)}.json", json.dumps(record, indent=1) + "\n")
    return work.write(f"{FOLDER}/{slug(entry)}.md", markdown(entry, result, notes, made))


def kept(room: Path, entry: Entry) -> dict[str, Any] | None:
    """The kept record of an entry; None if there is none."""
    path = room / FOLDER / f"{slug(entry)}.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(
            f"{path} is damaged; remove it, and reproduce {entry.label} again"
        ) from None


def slug(entry: Entry) -> str:
    """An entry's label as a file's name."""
    return entry.label.replace(":", "-")
