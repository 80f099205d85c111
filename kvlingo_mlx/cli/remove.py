"""kvlingo-mlx remove: take a translator out of the local store."""

import sys
from dataclasses import dataclass

import typer

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import keep, say
from kvlingo_mlx.options import option
from kvlingo_mlx.phases import aside


@dataclass(frozen=True, kw_only=True)
class RemoveOptions(VerbOptions):
    translator: str = option(..., "Its name, as `list` shows it, or its path.", word=True)
    yes: bool = option(False, "Do not ask.", "--yes", "-y")


@verb(RemoveOptions)
def command(options: RemoveOptions) -> None:
    """Remove a translator from the local store; those of the package stay."""
    from kvlingo_mlx.store import listing

    folder = listing.find(options.translator)
    if not options.yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise ValueError(f"there is no terminal to ask at; add --yes to remove {folder}")
        with aside():
            typer.confirm(f"Remove {folder}?", abort=True, err=True)
    listing.remove(folder)
    say(f"removed {folder}")
    keep(options.json_file, "remove", {"name": options.translator}, {"removed": str(folder)})
