"""Who uses a conversation: one caller at a time, from whatever thread, until it is closed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
Y = TypeVar("Y")


class Use:
    """Lets one caller in; a second one that comes meanwhile is refused, not kept waiting.

    Attributes:
        over: Whether the process is ending: answers that were left need not be finished.
    """

    over = False

    def __init__(self) -> None:
        self._now: dict[str, object] = {}

    def check(self) -> None:
        """Refuse (ValueError) a conversation that is closed or in use."""
        if self.closed:
            raise ValueError(
                "this conversation is closed; begin another one, or resume a saved one"
            )
        if "user" in self._now:
            raise ValueError(
                "an answer is still being written: take the rest of it from stream_reply, or "
                "close it; another thread waits until it is done"
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep all others out meanwhile.

        Raises:
            ValueError: As :meth:`check`.
        """
        user = object()
        try:
            self.check()
            if self._now.setdefault("user", user) is not user:  # in one step, whoever else comes
                self.check()
            yield
        finally:
            if self._now.get("user") is user:
                del self._now["user"]

    def close(self) -> None:
        """Let nobody in any more."""
        self._now["closed"] = True

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return "closed" in self._now


class Used(Protocol):
    """What is used by one caller at a time."""

    _use: Use


Steps = Callable[Concatenate[Any, P], Generator[Y, None, None]]


def claiming(method: Steps[P, Y]) -> Steps[P, Y]:
    """A generator of a conversation's that keeps all others out until it ends or is closed."""

    def alone(self: Used, *args: P.args, **kwargs: P.kwargs) -> Generator[Y, None, None]:
        with self._use.claimed():
            yield from method(self, *args, **kwargs)

    @functools.wraps(method)
    def begun(self: Used, *args: P.args, **kwargs: P.kwargs) -> Generator[Y, None, None]:
        steps = alone(self, *args, **kwargs)
        _OPEN.add(steps)
        return steps

    return begun


_OPEN: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Close answers that were left, as long as there are modules to close them with."""
    Use.over = True
    for steps in list(_OPEN):
        with contextlib.suppress(ValueError):  # a daemon thread's, at work
            steps.close()
