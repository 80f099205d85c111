"""The phases of a long work, for whoever shows them: what is done now, and how far it is.

Any room says so here; the command line shows it (``cli/progress``). In a program of somebody else
nobody listens, and a phase does nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Item = TypeVar("Item")
# Called after each step: with the number done, if it is known, perhaps a new total or a new text.
Step = Callable[..., None]

_watches: list[Any] = []  # their methods are ``phase`` and ``aside``, as those below


def phase(text: str, total: float | None = None) -> AbstractContextManager[Step]:
    """A phase named ``text``, of ``total`` steps if that is known; yields its :data:`Step`."""
    return _watches[-1].phase(text, total) if _watches else contextlib.nullcontext(_unseen)


def aside() -> AbstractContextManager[None]:
    """A context in which something else is written: on lines of its own."""
    return _watches[-1].aside() if _watches else contextlib.nullcontext()


def counted(text: str, items: Sequence[Item]) -> Iterator[Item]:
    """The items, each of which is a step of a phase."""
    with phase(text, len(items)) as step:
        for item in items:
            yield item
            step()


def _unseen(done: float | None = None, total: float | None = None, text: str = "") -> None: ...


def spelled(seconds: float) -> str:
    """A time to be read at a glance: ``40 s``, ``3 min``, ``2 h 10 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def shown(watch: Any) -> Iterator[None]:
    """Let ``watch`` show the phases of this context."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
