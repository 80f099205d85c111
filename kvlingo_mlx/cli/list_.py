"""kvlingo-mlx list: which translators are stored here, and what each is worth."""

from __future__ import annotations

import typer

from kvlingo_mlx.cli.output import JSON_HELP, keep_stdout_for_json, say, warn
from kvlingo_mlx.errors import printable


def command(json_file: str = typer.Option(None, "--json", help=JSON_HELP)) -> None:
    """List the translators of the local store, and those of the package."""
    from kvlingo_mlx.loading.translators import store
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.store.listing import stored

    keep_stdout_for_json(json_file)
    found = list(stored())
    for title, embedded in ((f"in {store()}:", False), ("with the package:", True)):
        here = [s for s in found if s.embedded == embedded and s.problem is None]
        say(printable(title if here else f"{title} none yet; `kvlingo-mlx import` puts one there"))
        for s in here:
            facts = (f"{s.source} to {s.target}", _grade(s.grade, s.recovered), s.kind,
                     s.date or "no date", f"{s.nbytes / 1e6:,.2f} MB")  # fmt: skip
            say(printable(f"  {s.path.name}"))
            say(printable(f"      {'; '.join(facts)}"))
    for s in found:
        if s.problem is not None:
            warn(f"{s.path} cannot be used: {s.problem}")
    if json_file:
        results = [{**vars(s), "path": str(s.path)} for s in found]
        measure.append_json(json_file, measure.record("list", {"store": str(store())}, results))


def _grade(grade: str, recovered: float | None) -> str:
    return grade if recovered is None else f"{grade} ({max(recovered, 0):.0%} recovered)"
