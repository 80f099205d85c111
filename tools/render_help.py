"""Write docs/reference/command-line.md from what ``--help`` says.

python tools/render_help.py
"""

from __future__ import annotations

from pathlib import Path

import typer

from kvlingo_mlx.cli import GROUPS, command_line

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "command-line.md"
INTRODUCTION = """\
# Command line

<!-- written by `python tools/render_help.py`; change the help texts in kvlingo_mlx/cli -->

This is what `kvlingo-mlx VERB --help` prints. `--debug` before or after the verb shows an error's
traceback. Words are explained in the [glossary](../glossary.md).

**The two models** are the source, whose cache is translated, and the target, which answers from
it: `A B` behind the verb, or `--source A --target B`. A model is a folder, a Hub id, or the name of
an embedded one (`tiny-qwen3-s`, `tiny-qwen3-l`, `tiny-qwen3-moe`). A translator is a folder, a name
that `list` shows, or a Hub id.

**Keys** are options that few people need: `-c KEY=VALUE`, or a line `KEY = VALUE` in a TOML (or
JSON) file that `-c FILE` names. The flags' names work there, too, so that a file can hold a whole
command. What is typed goes over what a file says.

**An error** is one line on standard error that begins with "error:", and the exit status is 2. It
is 130 after Ctrl-C. Progress bars go to standard error. An option that would have no effect is
refused.

**Completion**: `kvlingo-mlx --install-completion` installs it for your shell: bash, zsh or fish. In
zsh a session's first Tab only loads it.
"""


def page() -> str:
    """The text of the page."""
    rows = [
        f"| {group} | {', '.join(f'[{v}](#{v})' for v in vs)} |" for group, vs in GROUPS.items()
    ]
    parts = [INTRODUCTION, "\n".join(["| | verbs |", "|---|---|", *rows]) + "\n"]
    for verbs in GROUPS.values():
        parts += [f"## {verb}\n\n```text\n{help_of(verb)}\n```\n" for verb in verbs]
    return "\n".join(parts)


def help_of(verb: str) -> str:
    """What ``kvlingo-mlx VERB --help`` prints, in 100 columns."""
    command = command_line.commands[verb]
    above = typer.Context(command_line, info_name="kvlingo-mlx", help_option_names=["-h", "--help"])
    context = typer.Context(command, info_name=verb, parent=above, terminal_width=100)
    return command.get_help(context).rstrip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
