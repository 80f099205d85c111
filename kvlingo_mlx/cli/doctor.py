"""kvlingo-mlx doctor: what is installed and stored, and what is wrong with it."""

from collections import Counter

import typer

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import facts, keep, say
from kvlingo_mlx.errors import printable


@verb(VerbOptions)
def command(options: VerbOptions) -> None:
    """Look at the installation, the translators and the Hub.

    Exit status 1 if something is wrong, not if it is slow alone.
    """
    from kvlingo_mlx.store.diagnosis import diagnose

    findings = diagnose()
    facts({finding.name: finding.value for finding in findings})
    found = [finding for finding in findings if finding.problem]
    for finding in found:
        say(printable(f"{finding.grade}: {finding.name}: {finding.problem}"))
    counts = Counter(finding.grade for finding in found)
    wrong = counts.pop("wrong", 0)
    ends = [f"{wrong} of {len(findings)} checks failed"] if wrong else []
    ends += [f"{n} {'thing is' if n == 1 else 'things are'} {grade}" for grade, n in counts.items()]
    say("; ".join(ends) or "all checks passed")
    graded = [{**vars(f), "grade": f.grade if f.problem else None} for f in findings]
    keep(options.json_file, "doctor", {}, graded)
    if wrong:
        raise typer.Exit(1)
