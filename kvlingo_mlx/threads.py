"""The lock that lets one thread at a time work on MLX, shared by hand-overs, answers and fits.

The contract: any thread may call any public function or conversation. Work is cut into units: a
chunk that is read, a span that is translated, a decoding step, or a line that is moved to storage
or written to disk. Each unit runs under one lock for the whole process. The lock is not held while
the caller's code runs, so a generator that nobody advances holds nothing. The arrays that a unit
leaves are evaluated or under way, so any thread can continue from them.

There is one lock, not one per model. A hand-over needs two models and a conversation many, so locks
per model would need an order. There is only one GPU anyway, and Metal has crashed where two threads
encoded at once. In a server with one MLX thread, the lock costs some hundred nanoseconds per unit.
"""

import _thread
import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import ParamSpec, TypeVar

from kvlingo_mlx.backend import mx, nn

from mlx_lm.generate import generation_stream, wired_limit

from kvlingo_mlx.errors import KVLingoError

P = ParamSpec("P")
T = TypeVar("T")
TASKS = "/proc/self/task"  # where Linux lists the threads of this process
LOOKS, LOOK_S = 5, 0.01  # a daemon thread stands still if so many looks in a row find it unmoved
GRACE_S = 0.2  # on other systems, the time that the system is given to end a thread
EXIT_S = 10.0  # how long the process waits at its end for a thread's unit that is still running


class _Lock(_thread.RLock):  # type: ignore[misc]  # typeshed calls RLock final; Python does not
    """A roughly fair lock: a loop of short units cannot keep other threads out.

    A thread that has just released the lock queues behind a thread that waits. ``__exit__`` is the
    C implementation, which Ctrl-C cannot interrupt; ``__enter__`` releases the lock on Ctrl-C.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = threading.RLock()
        self._held = contextlib.nullcontext()

    def held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._is_owned()  # type: ignore[attr-defined]  # threading.Condition calls it too

    def __enter__(self) -> bool:  # type: ignore[override]
        _tidy_up_after_this_thread()
        try:
            with self._next:
                return self.acquire()
        except BaseException:
            if self.held():
                self.release()
            raise

    def working(self) -> contextlib.AbstractContextManager[object]:
        """The context of a unit of work; inside another unit of the same thread it does nothing."""
        return self._held if self.held() else self


_LOCK = _Lock()
working = _LOCK.working


def unit(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that each call is a unit of work."""

    begun = working  # kept: module globals may be gone when Python closes a generator at exit

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with begun():
            return function(*args, **kwargs)

    return alone


@contextlib.contextmanager
def stepping(steps: Generator[T, None, None]) -> Iterator[Callable[[], T | None]]:
    """Yield a function that takes the next step of an mlx-lm loop, and returns None at its end.

    The loop is closed on exit, whichever thread leaves the context.

    Raises:
        KVLingoError: A step is taken in another thread than the one that entered the context.
    """
    begun = threading.get_ident()

    def step() -> T | None:
        if threading.get_ident() != begun:
            raise KVLingoError(
                "this answer was begun in another thread, and mlx-lm's loop cannot change threads: "
                "take all of it in one, and let that one hand on what comes (queue.Queue)"
            )
        return next(steps, None)

    try:
        yield step
    finally:
        own = mx.default_stream(mx.default_device())
        try:
            steps.close()
        except RuntimeError:  # another thread cannot leave the loop's stream, and need not
            if threading.get_ident() == begun:
                raise
        finally:
            if threading.get_ident() != begun:
                mx.set_default_stream(own)  # undo: the loop has restored its own thread's stream


def finished(steps: Generator[None, None, T]) -> T:
    """Run work that is cut into steps to its end; return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


class _Wired:
    """mlx-lm's ``wired_limit`` for a process that may generate in several threads.

    The first generation raises the limit and the last one lowers it, so that it does not change
    while another generation runs.
    """

    def __init__(self) -> None:
        self._limit, self._generations = contextlib.ExitStack(), 0
        self._working = working  # kept for the same reason as in :func:`unit`

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        streams = [generation_stream]
        with self._working():
            if not self._generations:
                self._limit.enter_context(wired_limit(model, streams))  # type: ignore[arg-type]
            self._generations += 1
        try:
            yield
        finally:
            with self._working():
                self._generations -= 1
                if not self._generations:
                    self._limit.close()


wired = _Wired()


@functools.cache
def _common_stream(device: mx.DeviceType) -> mx.Stream:
    """A stream shared by all threads: any thread that holds the lock may evaluate its arrays."""
    return mx.new_thread_unsafe_stream(device)


@contextlib.contextmanager
def for_any_thread() -> Iterator[None]:
    """Make arrays created in this context evaluable later, in any thread that holds the lock.

    MLX evaluates an array on the stream on which it was created, and a stream belongs to a thread.
    """
    devices = {mx.cpu, mx.default_device().type}
    own = [mx.default_stream(device) for device in devices]
    try:
        for device in devices:
            mx.set_default_stream(_common_stream(device))
        yield
    finally:
        for stream in own:
            mx.set_default_stream(stream)


class _End:
    """Releases MLX's thread-local state when Python drops the thread's locals.

    If that waited until the system ends the thread, MLX would call into Python again, and the
    process would abort if Python had ended by then.
    """

    latest = 0.0  # the time at which the last thread ended

    def __init__(self) -> None:
        self._thread, self._now = threading.get_ident(), threading.get_ident

    def __del__(self) -> None:
        # If the process's end cut a thread off, the main thread runs this: it must not tidy up.
        if self._now() != self._thread or sys.is_finalizing():
            return
        _End.latest = time.monotonic()
        mx.synchronize(generation_stream)  # type: ignore[arg-type]
        mx.clear_streams()


_here = threading.local()
_used: set[int] = set()  # the native ids of the threads that have worked on MLX


def _tidy_up_after_this_thread() -> None:
    if not hasattr(_here, "end") and threading.current_thread() is not threading.main_thread():
        _here.end = _End()
        _used.add(threading.get_native_id())


@atexit.register
def _stop() -> None:
    """Block further units at exit: a thread working on MLX when Python ends aborts the process.

    A thread that the system ends only after Python's end also aborts the process, because what MLX
    has compiled in it calls into Python again. So this waits until the system has ended the threads
    that Python has ended, and until each daemon thread stands still, at the lock or elsewhere.
    """
    _LOCK.acquire(timeout=EXIT_S)
    begun, still, before = time.monotonic(), 0, _places()
    while (before and still < LOOKS) or _ending():
        if time.monotonic() - begun > EXIT_S:
            return
        time.sleep(LOOK_S)  # which releases Python's interpreter lock for the other threads
        now = _places()
        still, before = still + 1 if now == before else 0, now


def _places() -> dict[int, tuple[int, int]]:
    """The current code positions of the living threads that have worked on MLX, by thread id."""
    own = threading.get_native_id()
    alive = {t.ident for t in threading.enumerate() if t.native_id in _used - {own}}
    frames = sys._current_frames()
    return {n: (id(frame), frame.f_lasti) for n, frame in frames.items() if n in alive}


def _ending() -> bool:
    """Whether a thread that worked on MLX has ended for Python but not yet for the system."""
    alive = {thread.native_id for thread in threading.enumerate()}
    ended = _used - alive
    if not ended or not os.path.isdir(TASKS):
        return bool(ended) and time.monotonic() - _End.latest < GRACE_S
    return any(os.path.exists(f"{TASKS}/{number}") for number in ended)
