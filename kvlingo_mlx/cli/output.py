"""Texts, tables and records, the same for every verb."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer

from kvlingo_mlx.cli.progress import watch
from kvlingo_mlx.errors import printable
from kvlingo_mlx.group import leads, speaker
from kvlingo_mlx.phases import Step

Piece = TypeVar("Piece")

# rich is imported where it is used, since --help does not need it.


def native_number(text: str | None) -> int | str | None:
    """The value of ``native_layers``: a number, ``auto``, or None, which means as tuned."""
    if text in (None, "auto"):
        return text
    if not text.isdecimal():
        raise ValueError(f"native_layers is {text!r}; give a number of layers, or auto")
    return int(text)


def numbers(option: str, text: str, example: str, least: int = 1) -> list[int]:
    """The numbers of a list such as ``64,256``, each once, in the given order.

    Raises:
        ValueError: A part is not a number, or is below ``least``.
    """
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give numbers: {example}") from None
    if min(found) < least:
        raise ValueError(f"{option} holds {min(found)}; give at least {least}")
    return found


def progress_bar(
    text: str, total: float | None = None, *, seconds: float | None = None
) -> AbstractContextManager[Step]:
    """Show a phase of a verb: how many of ``total`` are done, or how much of ``seconds`` is over.

    Yields a function to call after each step, with the number done if it is known. Its ``text``
    replaces the text beside the bar.
    """
    return watch().phase(text, seconds or total, timed=seconds is not None)


def awaited(text: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of an answer, with a phase until the first one is there."""
    rest = iter(pieces)
    with progress_bar(text):
        first = list(itertools.islice(rest, 1))
    yield from itertools.chain(first, rest)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table: the first column is text, the others are numbers."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        out.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        out.add_row(*row)
    with watch().aside():
        Console(stderr=_on_stderr).print(out)


_on_stderr = False


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
    with watch().aside():
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


def warn(text: str) -> None:
    """Print a warning as one line on standard error."""
    with watch().aside():
        typer.echo(f"warning: {printable(' '.join(text.split()))}", err=True)


def complain(error: Exception) -> None:
    """Print a user's error as one line on standard error, without its traceback."""
    # click's usage errors have a format_message, in each click on which typer may be built.
    told = error.format_message() if hasattr(error, "format_message") else str(error)
    text = " ".join(told.split()) or type(error).__name__
    typer.echo(f"{speaker()}error: {printable(text)}", err=True)


@dataclass(frozen=True)
class Told:
    """A fact whose text for people differs from its value for programs."""

    value: Any
    text: str

    def __str__(self) -> str:
        return self.text


def plain(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that :func:`facts` prints, as JSON values: numbers stay numbers."""
    return {name: row.value if isinstance(row, Told) else row for name, row in rows.items()}


def facts(rows: Mapping[str, Any]) -> None:
    """Print names and values, one pair per line."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        say(printable(f"{name:<{width}}  {value}"))


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

    if not leads():
        return
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
