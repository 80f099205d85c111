"""kvlingo-mlx doctor: what is installed, what is stored, and what of it is wrong."""

from __future__ import annotations

import dataclasses

import typer

from kvlingo_mlx.cli.output import JSON_HELP, facts, keep_stdout_for_json, say
from kvlingo_mlx.errors import printable


def command(json_file: str = typer.Option(None, "--json", help=JSON_HELP)) -> None:
    """Look at the installation, the translators and the Hub.

    Exit status 1 if something is wrong.
    """
    keep_stdout_for_json(json_file)
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.store.diagnosis import diagnose

    findings = diagnose()
    facts({finding.name: finding.value for finding in findings})
    wrong = [finding for finding in findings if finding.problem]
    for finding in wrong:
        say(printable(f"wrong: {finding.name}: {finding.problem}"))
    say(f"{len(wrong)} of {len(findings)} things are wrong" if wrong else "nothing is wrong")
    if json_file:
        results = [dataclasses.asdict(finding) for finding in findings]
        measure.append_json(json_file, measure.record("doctor", {}, results))
    if wrong:
        raise typer.Exit(1)
