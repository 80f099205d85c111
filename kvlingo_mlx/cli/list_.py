"""kvlingo-mlx list: the stored translators, with their grades."""

from __future__ import annotations

from kvlingo_mlx.cli.command import Options, verb
from kvlingo_mlx.cli.output import keep, say, warn
from kvlingo_mlx.errors import printable


@verb(Options)
def command(options: Options) -> None:
    """List the translators of the local store, and those of the package."""
    from kvlingo_mlx.loading.translators import store
    from kvlingo_mlx.store.listing import stored

    found = list(stored())
    for title, embedded in ((f"in {store()}:", False), ("with the package:", True)):
        here = [s for s in found if s.embedded == embedded and s.problem is None]
        say(printable(title if here else f"{title} none yet; `kvlingo-mlx import` puts one there"))
        for s in here:
            facts = (
                f"{s.source} to {s.target}",
                _grade(s.grade, s.recovered),
                s.kind,
                s.date or "no date",
                f"{s.nbytes / 1e6:,.2f} MB",
            )
            say(printable(f"  {s.path.name}"))
            say(printable(f"      {'; '.join(facts)}"))
    for s in found:
        if s.problem is not None:
            warn(f"{s.path} cannot be used: {s.problem}")
    results = [{**vars(s), "path": str(s.path)} for s in found]
    keep(options.json_file, "list", {"store": str(store())}, results)


def _grade(grade: str, recovered: float | None) -> str:
    return grade if recovered is None else f"{grade} ({max(recovered, 0):.0%} recovered)"
