"""kvlingo-mlx doctor: what is installed and stored, and what is wrong with it."""

from __future__ import annotations

import dataclasses

import typer

from kvlingo_mlx.cli.command import Options, verb
from kvlingo_mlx.cli.output import facts, keep, say
from kvlingo_mlx.errors import printable


@verb(Options)
def command(options: Options) -> None:
    """Look at the installation, the translators and the Hub.

    Exit status 1 if something is wrong.
    """
    from kvlingo_mlx.store.diagnosis import diagnose

    findings = diagnose()
    facts({finding.name: finding.value for finding in findings})
    wrong = [finding for finding in findings if finding.problem]
    for finding in wrong:
        say(printable(f"wrong: {finding.name}: {finding.problem}"))
    say(f"{len(wrong)} of {len(findings)} checks failed" if wrong else "all checks passed")
    keep(options.json_file, "doctor", {}, [dataclasses.asdict(finding) for finding in findings])
    if wrong:
        raise typer.Exit(1)
