"""Exclusive use of a conversation: one caller at a time, from any thread, until it is closed."""

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
Y = TypeVar("Y")


class Use:
    """Admits one caller at a time; a second caller is refused at once, without waiting.

    Attributes:
        over: Whether the process is ending; abandoned answers then need not be finished.
        closed: Whether all callers are refused.
    """

    over = False

    def __init__(self) -> None:
        self.closed = False
        self._now: dict[str, object] = {}

    def check(self) -> None:
        """Raise ValueError if the conversation is closed or in use."""
        if self.closed:
            raise ValueError(
                "this conversation is closed; begin another one, or resume a saved one"
            )
        if "user" in self._now:
            raise ValueError(
                "an answer is still being written: take the rest of it from stream_reply, or "
                "close it; a second caller is refused, and asks again when it is done"
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep all other callers out while the context is open.

        Raises:
            ValueError: As for :meth:`check`.
        """
        user = object()
        try:
            self.check()
            if self._now.setdefault("user", user) is not user:  # atomic, in case two callers race
                self.check()
            yield
        finally:
            if self._now.get("user") is user:
                del self._now["user"]


Steps = Callable[Concatenate[Any, P], Generator[Y, None, None]]


def claiming(method: Steps[P, Y]) -> Steps[P, Y]:
    """Make a conversation's generator keep other callers out until it ends or is closed."""

    def alone(self: Any, *args: P.args, **kwargs: P.kwargs) -> Generator[Y, None, None]:
        with self._use.claimed():
            yield from method(self, *args, **kwargs)

    @functools.wraps(method)
    def begun(self: Any, *args: P.args, **kwargs: P.kwargs) -> Generator[Y, None, None]:
        steps = alone(self, *args, **kwargs)
        _OPEN.add(steps)
        return steps

    return begun


_OPEN: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Close abandoned answers at exit, while the modules that this needs still exist."""
    Use.over = True
    for steps in list(_OPEN):
        with contextlib.suppress(ValueError):  # a daemon thread is running this generator
            steps.close()
