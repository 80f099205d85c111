"""The command line: one file a verb, its heavy imports inside its body.

A user's error is one line on standard error that starts with "error:", exit status 2;
``--debug`` before the verb shows the traceback instead.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from kvlingo_mlx.cli.needs import Checked
from kvlingo_mlx.cli.output import complain, warn
from kvlingo_mlx.errors import KVLingoError, tell_new_name
from kvlingo_mlx.version import __version__

VERBS = (
    "generate", "chat", "demo", "fit", "train", "import", "list", "remove", "publish", "show",
    "verify", "doctor", "eval", "tune", "analyze", "bench",
)  # fmt: skip
OLD_VERBS = {"profile": "tune"}  # by their new names, for one release


class Verbs(TyperGroup):
    """All verbs; an old name finds the new one."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of this name."""
        if cmd_name in OLD_VERBS:
            tell_new_name(f"`kvlingo-mlx {cmd_name}`", f"`kvlingo-mlx {OLD_VERBS[cmd_name]}`")
        return super().get_command(ctx, OLD_VERBS.get(cmd_name, cmd_name))


app = typer.Typer(
    name="kvlingo-mlx",
    cls=Verbs,
    help="Hand a running conversation from one language model to another.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Hand a running conversation from one language model to another."""


for _verb in VERBS:
    # `import` is a keyword and `list` a type, so their files are called otherwise.
    _file = f"{_verb}_" if _verb in ("import", "list") else _verb
    _module = importlib.import_module(f"{__name__}.{_file}")
    app.command(_verb, cls=Checked)(_module.command)


def main() -> None:
    """Run the command line; the process's exit status says how it went."""
    # Warnings of the tokenizer library would stand beside our one line of error.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # As Ctrl-C does, so that what is half written is cleared away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    debug = "--debug" in arguments  # wherever it stands
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _in_a_line(warnings.showwarning)
            result = app(arguments, standalone_mode=False, prog_name="kvlingo-mlx")
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if debug or not _is_users(error):
            raise
        complain(error)
        return 2


def _in_a_line(others: Callable[..., None]) -> Callable[..., None]:
    """Shows what is meant for users as our other warnings, without the place in our code."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            warn(str(message))
        else:
            others(message, category, *where, **more)

    return show


def _is_users(error: Exception) -> bool:
    """Errors of usage carry format_message, whichever click typer is built on."""
    return isinstance(error, KVLingoError | ValueError | OSError) or hasattr(
        error, "format_message"
    )
