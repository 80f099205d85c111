"""Texts, tables and records, the same for every verb."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer

from kvlingo_mlx.errors import printable
from kvlingo_mlx.group import leads, speaker
from kvlingo_mlx.phases import aside, phase

Piece = TypeVar("Piece")
_on_stderr = False

# rich is imported where it is used, since --help does not need it.


def keep_stdout_for_json(json_file: str | None) -> None:
    """Send text for people to standard error if ``--json -`` uses standard output.

    Raises:
        ValueError: The record could not be written after the work.
    """
    global _on_stderr
    _on_stderr = json_file == "-"
    if json_file in (None, "-"):
        return
    path = Path(json_file)
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"--json is {json_file!r}; name a file in a folder that can be written")


def say(text: str, *, end: str = "\n") -> None:
    """Print a text unchanged."""
    with aside():
        typer.echo(text + end, err=_on_stderr, nl=False)


def ask(prompt: str) -> str:
    """A line typed by the user, after a prompt where :func:`say` prints.

    Raises:
        EOFError: There is no more input.
    """
    if _on_stderr:
        say(prompt, end="")
        prompt = ""
    return input(prompt)


def awaited(text: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of an answer, with a phase until the first one is there."""
    rest = iter(pieces)
    with phase(text):
        first = list(itertools.islice(rest, 1))
    yield from itertools.chain(first, rest)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: the first column is text, the others are numbers."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        out.add_column(column, justify="right" if index else "left")
    for row in rows:
        out.add_row(*row)
    with aside():
        Console(stderr=_on_stderr).print(out)


@dataclass(frozen=True)
class Worded:
    """A fact whose text for people differs from its value for programs."""

    value: Any
    text: str


def facts(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Print names and values, one pair a line; returns them as JSON values for a record."""
    width = max(len(name) for name in rows)
    for name, row in rows.items():
        say(printable(f"{name:<{width}}  {row.text if isinstance(row, Worded) else row}"))
    return {name: row.value if isinstance(row, Worded) else row for name, row in rows.items()}


def warn(text: str) -> None:
    """Print a warning as one line on standard error."""
    with aside():
        typer.echo(f"warning: {printable(' '.join(text.split()))}", err=True)


def complain(error: Exception) -> None:
    """Print a user's error as one line on standard error, without its traceback."""
    # click's usage errors have a format_message, in each click on which typer may be built.
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    text = " ".join(message.split()) or type(error).__name__
    typer.echo(f"{speaker()}error: {printable(text)}", err=True)


def keep(
    json_file: str | None, kind: str, config: Mapping[str, Any], results: Mapping[str, Any] | list
) -> None:
    """Append a record to the file of ``--json``, if it is given."""
    if json_file is not None and leads():
        from kvlingo_mlx.reporting import measure

        measure.append_json(json_file, measure.record(kind, dict(config), results))


def draw(figure: Any, picture: str, source: str, target: str) -> None:
    """Write a figure of two models to the file of ``--plot``, and say so."""
    from kvlingo_mlx.reporting import pictures

    if leads():
        pictures.save(figure, picture, pictures.pair(source, target))
        say(f"drew {picture}")


def tell_of_machine() -> None:
    """Say that the times are not a Mac's, on other machines."""
    from kvlingo_mlx.reporting import measure

    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")


def ms(seconds: float) -> str:
    """Seconds as milliseconds, with three digits or all digits before the point."""
    found = 1e3 * seconds
    return f"{found:.0f}" if found >= 999.5 else f"{found:.3g}"
