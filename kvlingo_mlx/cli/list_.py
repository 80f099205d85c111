"""kvlingo-mlx list: the stored translators, with their grades."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import keep, say, warn
from kvlingo_mlx.errors import MissingModelError, UnsupportedModelError, printable

if TYPE_CHECKING:
    from kvlingo_mlx.format.translator_config import ModelSpec
    from kvlingo_mlx.store.listing import Stored


@dataclass(frozen=True, kw_only=True)
class ListOptions(VerbOptions):
    source: str | None = None
    target: str | None = None


@verb(ListOptions)
def command(options: ListOptions) -> None:
    """List the translators of the local store, and those of the package.

    With --source or --target only those that take these models.
    """
    from kvlingo_mlx.loading import notes
    from kvlingo_mlx.loading.translators import store
    from kvlingo_mlx.store.listing import stored

    ends = options.source, options.target
    source, target = map(_takes, ends)
    found = list(stored(lambda config: source(config.source) and target(config.target)))
    sound = [one for one in found if one.problem is None]
    for title, embedded in ((f"in {store()}:", False), ("with the package:", True)):
        here = [one for one in sound if one.embedded == embedded]
        if here or ends == (None, None):
            none = "" if here else f" none yet; {notes.to_get('A', 'B')}"
            say(printable(f"{title}{none}"))
        for one in here:
            say(printable(f"  {one.path.name}"))
            say(printable(f"      {_facts(one)}"))
    for one in found:
        if one.problem is not None:
            warn(f"{one.path} cannot be used: {one.problem}")
    if ends != (None, None) and not sound:
        names = options.source or "A", options.target or "B"
        told = f"no translator from {names[0]} to {names[1]} is here; {notes.to_get(*names)}"
        say(printable(told))
    results = [{**vars(one), "path": str(one.path)} for one in found]
    keep(options.json_file, "list", {"store": str(store())}, results)


def _takes(name: str | None) -> Callable[[ModelSpec], bool]:
    """Whether a translator's end is a model: by its files if they are here, else by its name."""
    from kvlingo_mlx.loading.models import at_hand
    from kvlingo_mlx.loading.pairing import matches

    if name is None:
        return lambda spec: True
    try:
        model = at_hand(name)
    except (MissingModelError, UnsupportedModelError) as problem:
        warn(f"{problem}: translators are compared with its name alone")
        return lambda spec: spec.name == name
    return lambda spec: matches(spec, model)


def _facts(stored: Stored) -> str:
    native = stored.tuned or (f"{stored.native_layers} native layers" * bool(stored.native_layers))
    parts = [
        f"{stored.source} to {stored.target}",
        stored.grade if stored.recall is None else f"{stored.grade} ({stored.recall})",
        native,
        stored.kind,
        stored.date or "no date",
        f"{stored.nbytes / 1e6:,.2f} MB",
    ]
    return "; ".join(part for part in parts if part)
