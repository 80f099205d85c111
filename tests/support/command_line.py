"""The verbs and the paper's commands; what one that is refused must print; a record of data."""

import json

from benchmarks.paper import commands as paper
from kvlingo_mlx import cli
from tests.support.fixtures import Printed

PAPER = "paper "  # before the name of a command of the paper's
COMMANDS = {**cli.command_line.commands} | {  # type: ignore[attr-defined]
    f"{PAPER}{name}": command for name, command in paper.command_line.commands.items()
}
NEEDS = {name: command.needs for name, command in COMMANDS.items()}

RECORD = json.dumps({"text": "One two three four five six seven eight nine ten. " * 3}) + "\n"


def run(words: list[str]) -> int:
    """Run a verb, or a command of the paper's; returns the exit status."""
    if words and words[0].startswith(PAPER):
        return paper.run([words[0].removeprefix(PAPER), *words[1:]])
    return cli.run(words)


def fails(arguments: list[str], message: str, capsys: Printed) -> None:
    """The command exits with 2 and one line that starts with "error:"."""
    capsys.readouterr()
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
