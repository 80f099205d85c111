"""kvlingo-mlx list: the stored translators, with their grades."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import MaybeSource, MaybeTarget, Options, verb
from kvlingo_mlx.cli.output import keep, say, warn
from kvlingo_mlx.errors import MissingModelError, UnsupportedModelError, printable

if TYPE_CHECKING:
    from kvlingo_mlx.format.translator_config import ModelSpec
    from kvlingo_mlx.store.listing import Stored


@dataclass(frozen=True, kw_only=True)
class ListOptions(Options):
    """The options of `list`."""

    source: MaybeSource = None
    target: MaybeTarget = None


@verb(ListOptions)
def command(options: ListOptions) -> None:
    """List the translators of the local store, and those of the package.

    With --source or --target only those that take these models.
    """
    from kvlingo_mlx.loading import advice
    from kvlingo_mlx.loading.translators import store
    from kvlingo_mlx.store.listing import stored

    every = options.source is None and options.target is None
    source, target = _takes(options.source), _takes(options.target)
    found = list(stored(lambda config: source(config.source) and target(config.target)))
    for title, embedded in ((f"in {store()}:", False), ("with the package:", True)):
        here = [s for s in found if s.embedded == embedded and s.problem is None]
        if here or every:
            none = f"{title} none yet; {advice.to_get('A', 'B')}"
            say(printable(title if here else none))
        for s in here:
            say(printable(f"  {s.path.name}"))
            say(printable(f"      {'; '.join(_facts(s))}"))
    for s in found:
        if s.problem is not None:
            warn(f"{s.path} cannot be used: {s.problem}")
    if not every and all(s.problem is not None for s in found):
        ends = options.source or "A", options.target or "B"
        say(printable(f"no translator from {ends[0]} to {ends[1]} is here; {advice.to_get(*ends)}"))
    results = [{**vars(s), "path": str(s.path)} for s in found]
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


def _facts(stored: Stored) -> list[str]:
    layers = stored.native_layers
    native = stored.tuned or (f"{layers} native layers" if layers else None)
    return [
        f"{stored.source} to {stored.target}",
        stored.grade if stored.recall is None else f"{stored.grade} ({stored.recall})",
        *([] if native is None else [native]),
        stored.kind,
        stored.date or "no date",
        f"{stored.nbytes / 1e6:,.2f} MB",
    ]
