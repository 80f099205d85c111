"""One thread at a time works on MLX: the lock that every hand-over, answer and fit takes turns by.

The contract: any thread may call any public function or conversation. Work is cut into units (a
chunk that is read, a span that is translated, a decoding step, a line that is put away or written
to disk), and a unit runs under one lock for the whole process. Nothing holds the lock while a
caller has the word: a generator that is left alone holds nothing. What a unit leaves behind is
evaluated or under way, so any thread can go on from it.

One lock, not one a model: a hand-over needs two models and a conversation many, which would need
an order; there is one GPU anyway, and Metal has crashed where two threads encoded at once. A server
whose one thread owns MLX pays some hundred nanoseconds a unit.
"""

from __future__ import annotations

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
LOOKS, LOOK_S = 5, 0.01  # looks in a row at which a daemon thread stands where it stood
GRACE_S = 0.2  # elsewhere, how long the system is given to end a thread
EXIT_S = 10.0  # how long the end of the process waits for a unit of a thread that is still at work


class _Lock(_thread.RLock):  # type: ignore[misc]  # typeshed calls final what Python does not
    """A lock for whoever waits longest, more or less: a loop of short units cannot keep others out.

    Who has just let go of it must queue behind the one that waits. ``__exit__`` is C's own, which
    no Ctrl-C can come between; ``__enter__`` gives back what it has if one comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = threading.RLock()
        self._held = contextlib.nullcontext()

    def held(self) -> bool:
        """Whether this thread holds it."""
        return self._is_owned()  # type: ignore[attr-defined]  # threading.Condition asks it too

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
        """The context of a unit of work; within another one of the same thread it does nothing."""
        return self._held if self.held() else self


_LOCK = _Lock()
working = _LOCK.working


def unit(function: Callable[P, T]) -> Callable[P, T]:
    """A function each of whose calls is a unit of work."""

    begun = working  # kept: modules are gone when Python lets go of a generator at its end

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with begun():
            return function(*args, **kwargs)

    return alone


@contextlib.contextmanager
def stepping(steps: Generator[T, None, None]) -> Iterator[Callable[[], T | None]]:
    """A function that takes the next step of an mlx-lm loop, or None at its end.

    The loop is closed in the end, in whatever thread that is.

    Raises:
        KVLingoError: Another thread asks for a step than the one that began.
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
        except RuntimeError:  # the loop cannot leave its stream from here, and need not
            if threading.get_ident() == begun:
                raise
        finally:
            if threading.get_ident() != begun:
                mx.set_default_stream(own)  # not the other thread's, which the loop puts back


def in_turn(steps: Generator[T, None, None]) -> Generator[T, None, None]:
    """What an mlx-lm loop yields, each step a unit of work; the caller has the word in between."""
    with stepping(steps) as step:
        while True:
            with working():
                found = step()
            if found is None:
                return
            yield found


# ---- memory that the GPU holds on to --------------------------------------------------------


class _Wired:
    """mlx-lm's ``wired_limit`` for a process that may generate in several threads.

    The first generation raises it, the last one lowers it: it must not change under another's feet.
    """

    def __init__(self) -> None:
        self._limit, self._generations = contextlib.ExitStack(), 0
        self._working = working  # kept, as in :func:`unit`

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


# ---- arrays that any thread can work out ----------------------------------------------------


@functools.cache
def _common_stream(device: mx.DeviceType) -> mx.Stream:
    """A stream of all threads: whoever holds the lock may evaluate what was made on it."""
    return mx.new_thread_unsafe_stream(device)


@contextlib.contextmanager
def for_any_thread() -> Iterator[None]:
    """Let what is not evaluated meanwhile be evaluated later, in any thread that holds the lock.

    MLX works an array out on the stream that it was made on, and a stream is a thread's own.
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


# ---- the end of a thread, and of the process ------------------------------------------------


class _End:
    """Lets go of what MLX keeps for a thread, when Python lets go of that thread.

    Later, when the system ends the thread, MLX would want Python once more, and the process aborts
    if Python has ended by then.
    """

    latest = 0.0  # when the last thread ended

    def __init__(self) -> None:
        self._thread, self._now = threading.get_ident(), threading.get_ident

    def __del__(self) -> None:
        # Of a thread that the process's end cut off, the main thread lets go: not its to tidy up.
        if self._now() != self._thread or sys.is_finalizing():
            return
        _End.latest = time.monotonic()
        mx.synchronize(generation_stream)  # type: ignore[arg-type]
        mx.clear_streams()


_here = threading.local()
_used: set[int] = set()  # the system's numbers of threads that worked on MLX


def _tidy_up_after_this_thread() -> None:
    if not hasattr(_here, "end") and threading.current_thread() is not threading.main_thread():
        _here.end = _End()
        _used.add(threading.get_native_id())


@atexit.register
def _stop() -> None:
    """Begin no more work: a thread that works on MLX when Python ends aborts the process.

    So does one that ends only then, for what MLX has compiled in it wants Python once more. So
    those that have ended for Python are waited for until the system has ended them as well, and
    daemon threads until each stands still, at the lock or elsewhere.
    """
    _LOCK.acquire(timeout=EXIT_S)
    begun, still, before = time.monotonic(), 0, _places()
    while (before and still < LOOKS) or _ending():
        if time.monotonic() - begun > EXIT_S:
            return
        time.sleep(LOOK_S)  # which lets them have Python
        now = _places()
        still, before = still + 1 if now == before else 0, now


def _places() -> dict[int, tuple[int, int]]:
    """Where in their code the threads stand that worked on MLX and are alive."""
    own = threading.get_native_id()
    alive = {t.ident for t in threading.enumerate() if t.native_id in _used - {own}}
    frames = sys._current_frames()
    return {n: (id(frame), frame.f_lasti) for n, frame in frames.items() if n in alive}


def _ending() -> bool:
    """Whether a thread that worked on MLX has ended for Python alone."""
    alive = {thread.native_id for thread in threading.enumerate()}
    ended = _used - alive
    if not ended or not os.path.isdir(TASKS):
        return bool(ended) and time.monotonic() - _End.latest < GRACE_S
    return any(os.path.exists(f"{TASKS}/{number}") for number in ended)
