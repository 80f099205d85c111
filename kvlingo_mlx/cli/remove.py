"""kvlingo-mlx remove: take a translator out of the local store."""

from __future__ import annotations

import sys

import typer

from kvlingo_mlx.cli.output import JSON_HELP, keep_stdout_for_json, say


def command(
    translator: str = typer.Argument(..., help="Its name, as `list` shows it, or its path."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Remove a translator from the local store; those of the package stay."""
    keep_stdout_for_json(json_file)
    from kvlingo_mlx.store import listing

    folder = listing.find(translator)
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise ValueError(f"nobody is there to be asked; remove {folder} with --yes")
        typer.confirm(f"Remove {folder}?", abort=True, err=True)
    listing.remove(folder)
    say(f"removed {folder}")
    if json_file:
        from kvlingo_mlx.reporting import measure

        record = measure.record("remove", {"name": translator}, {"removed": str(folder)})
        measure.append_json(json_file, record)
