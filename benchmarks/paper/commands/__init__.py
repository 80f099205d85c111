"""``python -m benchmarks.paper``: one file a command; labels without a command are reproduced."""

from __future__ import annotations

import importlib
from typing import Any

import typer

from kvlingo_mlx.cli import carry_out
from kvlingo_mlx.cli.command import VerbCommand

NAME = "python -m benchmarks.paper"
COMMANDS = ("reproduce", "analyze", "eval", "bench")
app = typer.Typer(
    name=NAME,
    help="The paper's tables and figures by label (reproduce), and what they are made of.",
    epilog="Without a command: reproduce, so `python -m benchmarks.paper tab:cost --tiny`.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name in COMMANDS:
    _module = importlib.import_module(f"{__name__}.{_name}")
    app.command(_name, cls=VerbCommand)(_module.command)
command_line: Any = typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    named = next((word for word in arguments if word != "--debug"), "--help")
    if named not in (*COMMANDS, "--help"):
        arguments = ["reproduce", *arguments]
    return carry_out(command_line, arguments, NAME)
