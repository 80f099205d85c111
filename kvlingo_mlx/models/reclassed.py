"""Objects and modules that act otherwise for a while."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Call = Callable[..., Any]


@contextlib.contextmanager
def reclassed(objects: Iterable[Any], derive: Callable[[type], type]) -> Iterator[None]:
    """Give objects a class derived from their own inside the context."""
    found = [(each, type(each)) for each in objects]
    try:
        for each, cls in found:
            each.__class__ = derive(cls)
        yield
    finally:
        for each, cls in found:
            each.__class__ = cls


def is_changed(module: Any) -> bool:
    """Whether a module's call is another one now, by :func:`calling`."""
    return type(module).__qualname__.startswith(f"{calling.__name__}.")


@contextlib.contextmanager
def calling(modules: Iterable[Any], change: Callable[[Call], Call]) -> Iterator[None]:
    """Put ``change(call)`` in the place of each module's call, in this thread.

    Plain mlx-lm may run the same modules in another thread meanwhile.
    """
    own, changes = threading.get_ident(), [change]

    def derive(cls: type) -> type:
        class Changed(cls):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                call = super().__call__
                if threading.get_ident() == own:
                    call = changes[0](call)
                return call(*args, **kwargs)

        Changed.__name__ = cls.__name__
        return Changed

    try:
        with reclassed(modules, derive):
            yield
    finally:
        changes.clear()  # a class lives until Python next collects cycles, and its arrays with it


@contextlib.contextmanager
def hearing(modules: Iterable[Any], hear: Callable[[Any, Any], None]) -> Iterator[None]:
    """Let ``hear`` be told of each module's calls, in this thread: the module and its output."""

    def heard(call: Any) -> Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            hear(call.__self__, output)
            return output

        return run

    with calling(modules, heard):
        yield
