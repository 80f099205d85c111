"""The command line: one file per verb, with its heavy imports inside the verb's function.

A user's error is one line on standard error that begins with "error:", with exit status 2.
``--debug`` before the verb shows the traceback instead.
"""

import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from kvlingo_mlx.cli.command import VerbCommand
from kvlingo_mlx.cli.output import complain, warn
from kvlingo_mlx.errors import KVLingoError, KVLingoWarning
from kvlingo_mlx.group import launched, leads
from kvlingo_mlx.phases import aside
from kvlingo_mlx.version import __version__

GROUPS = {
    "First day": ("generate", "chat", "serve", "agents", "pair", "demo"),
    "Make translators": ("fit", "train", "tune"),
    "Keep and share them": ("import", "list", "remove", "publish", "export"),
    "Look": ("show", "verify", "doctor"),
    "Measure": ("eval", "bench"),
    "Several machines": ("serve-prefill",),
    "In other servers": ("in-mlx-lm",),
}
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
ON_TORCH = ("train", "eval", "reproduce")  # the verbs that may compute with PyTorch
LAUNCHED = ("generate", "chat", "serve", "fit", "train")  # the verbs that mlx.launch may start
FIRST_S = 5.0  # in which the first process prints an error of all, and the launcher ends them
PAPER = "python -m benchmarks.paper"


def _in_checkout(verb: str, options: str) -> dict[str, str]:
    return {f"{verb} --{name}": f"{PAPER} {verb} --{name}" for name in options.split()}


# Where each verb and option is now that has gone, most of them to what the paper's tables need.
MOVED = {
    "reproduce": PAPER,
    "analyze": f"{PAPER} analyze",
    **_in_checkout("eval", "suite turns switch-at judge judge-prompts window compare plot"),
    "eval -c window": f"{PAPER} eval --window",
    **_in_checkout("bench", "batch-sizes table decode-tokens geometry"),
    "bench -c decode_tokens": f"{PAPER} bench --decode-tokens",
    "tune --droidspeak": f"{PAPER} eval --baselines",
    "tune -c droidspeak": f"{PAPER} eval --baselines",
    "serve-prefill --translator": "kvlingo-mlx generate --translator",
    **dict.fromkeys(("tune --lengths", "tune -c lengths"), "kvlingo-mlx tune --data"),
}


class Verbs(TyperGroup):
    """All verbs, in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs into the help in their groups, each with its first sentence."""
        for group, verbs in GROUPS.items():
            rows = [(verb, self.commands[verb].get_short_help_str(200)) for verb in verbs]
            with formatter.section(group):
                formatter.write_dl(rows, col_max=max(map(len, VERBS)))


app = typer.Typer(
    name="kvlingo-mlx",
    cls=Verbs,
    help="Hand a running conversation from one language model to another.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Hand a running conversation from one language model to another."""


for _verb in VERBS:
    # `import` is a keyword and `list` a type, so their files have other names.
    _file = f"{_verb}_" if _verb in ("import", "list") else _verb.replace("-", "_")
    _module = importlib.import_module(f"{__name__}.{_file}")
    app.command(_verb, cls=VerbCommand)(_module.command)
# Made once, since making it takes longer than beginning a verb.
command_line = typer.main.get_command(app)


def main(run_one: Callable[[list[str]], int] | None = None) -> None:
    """Run the command line, or another; the process's exit status tells success or failure."""
    # Warnings of the tokenizer library would clutter our one-line error messages.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not set(ON_TORCH) & set(sys.argv):  # else transformers loads it (see backend.py)
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # SIGTERM exits like Ctrl-C, so that half-written files are removed.
    if leads():  # the others may wait for a message, in which Python runs no handler
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    else:  # the first of mlx.launch speaks for all; each prints its errors
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    sys.exit((run_one or run)(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    verb = next((word for word in arguments if not word.startswith("-")), None)
    if launched() and verb in VERBS and verb not in LAUNCHED:
        return _failed(ValueError(f"{verb} runs in one process; start it without mlx.launch"))
    words = f" {' '.join(arguments).replace('=', ' ')} "
    for old, now in MOVED.items():
        first, _, rest = old.partition(" ")
        if first == verb and f" {rest or verb} " in words:
            where = " in a checkout (see benchmarks/paper/README.md)" * now.startswith(PAPER)
            return _failed(ValueError(f"`{old}` is now `{now}`{where}"))
    return carry_out(command_line, arguments, "kvlingo-mlx")


def carry_out(command: Any, arguments: list[str], name: str) -> int:
    """Run a typer command of this name; a user's error is a line. Returns the exit status."""
    debug = "--debug" in arguments  # at any place
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _in_a_line(warnings.showwarning)
            # What is to be shown once, the library shows once.
            warnings.filterwarnings("always", category=KVLingoWarning)
            # Advice to transformers' own users, about configs that mlx-lm reads.
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
            result = command(arguments, standalone_mode=False, prog_name=name)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        machines = sys.modules.get("kvlingo_mlx.machines")
        lost = machines.lost(error) if machines and launched() and not debug else None
        # click's usage errors have a format_message, in each click on which typer may be built.
        users = isinstance(error, KVLingoError | ValueError | OSError)
        if debug or not (lost or users or hasattr(error, "format_message")):
            raise
        return _failed(lost or error)


def _failed(error: Exception) -> int:
    """Print a user's error; returns the exit status."""
    if not leads():
        time.sleep(FIRST_S)
    complain(error)
    return 2


def _in_a_line(others: Callable[..., None]) -> Callable[..., None]:
    """A hook that shows user warnings like our own, without their place in the code."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            warn(str(message))
        else:
            with aside():
                others(message, category, *where, **more)

    return show
