"""What a command that is refused must print, and a record of data."""

from __future__ import annotations

import json

import pytest

from kvlingo_mlx.cli import run

RECORD = json.dumps({"text": "One two three four five six seven eight nine ten. " * 3}) + "\n"


def fails(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with 2 and one line that starts with "error:"."""
    capsys.readouterr()
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
