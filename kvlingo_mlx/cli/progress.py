"""How far a verb is: a bar in a terminal; elsewhere a plain line on standard error now and then.

A thread looks at the clock, so that a step of many minutes is shown, too.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvlingo_mlx.phases import Step, shown, spelled

FIRST, EVERY = 10.0, 60.0  # seconds until the first line, and between two lines
STILL = 30.0  # seconds without a step from which a line says so
LOOK = 0.25  # seconds between two looks at the clock
SOON = 0.5  # seconds before a bar appears: short work shows none

# rich is imported where it is used, since most commands are over before.


@dataclass(eq=False)
class Shown:
    """One phase: its steps so far, and when it began and moved last."""

    text: str
    total: float | None
    done: float = 0
    began: float = field(default_factory=lambda: time.monotonic())
    moved: float = field(init=False)
    first: tuple[float, float] | None = None  # the number after the first step, and when
    steps: int = 0  # since then; one may be many of the number, or a part of one

    def __post_init__(self) -> None:
        self.moved = self.began

    def step(
        self, done: float | None = None, total: float | None = None, text: str | None = None
    ) -> None:
        """As :data:`kvlingo_mlx.phases.Step`; a text alone is no step."""
        self.total, self.text = total or self.total, text or self.text
        self.moved = time.monotonic()
        if done is None and text is not None:
            return
        count = self.done + 1 if done is None else done
        self.steps += 1
        if self.first is None or count < self.done:
            self.first, self.steps = (count, self.moved), 0
        self.done = count

    @property
    def left(self) -> float | None:
        """The seconds that it will take yet, at the pace since its first step."""
        if not self.total or self.first is None or self.done <= self.first[0]:
            return None
        (begun, since), still = self.first, time.monotonic() - self.moved
        # A step that takes longer than those before says that those to come will, too.
        pace = max(self.moved - since, still * self.steps) / (self.done - begun)
        return max(0.0, pace * (self.total - self.done) - still) or None

    @property
    def far(self) -> str:
        """For example ``12 of 48, about 3 min left``."""
        took, parts = time.monotonic() - self.began, list[str]()
        if self.total:
            parts.append(f"{self.done:,.0f} of {self.total:,.0f}")
        else:
            parts += [f"{self.done:,.0f}"] * bool(self.done)
            parts += [f"{spelled(took)} so far"] * (took >= 1)
        if (left := self.left) is not None:
            parts.append(f"about {spelled(left)} left")
        return ", ".join(parts) or "begun"

    def __str__(self) -> str:
        still = time.monotonic() - self.moved
        more = f", no step for {spelled(still)}" if self.total and still >= STILL else ""
        return f"{self.text}: {self.far}{more}"


class ProgressLine:
    """The phases of a verb, one within another; the innermost one is shown."""

    def __init__(self, terminal: bool, silent: bool = False) -> None:
        self.terminal, self.silent = terminal, silent
        self.phases: list[Shown] = []
        self.verb: Shown | None = None  # the phase of all of it
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._next = time.monotonic() + FIRST
        self._live: Any = None

    @contextlib.contextmanager
    def phase(self, text: str, total: float | None = None) -> Iterator[Step]:
        """Show a phase; yields the function to call after each step."""
        own = Shown(text, total)
        self.phases.append(own)
        try:
            yield own.step
        finally:
            self.phases.remove(own)
            if not self.phases:
                self.clear()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the clock until the context ends."""
        threading.Thread(target=self._look_on, daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()
            self.clear()

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK):
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                self.look()

    def look(self) -> None:
        """Draw the bar, or write a line if it is time for one."""
        with self._lock:
            if self.silent or not self.phases or self._ended.is_set():
                return
            now, latest = time.monotonic(), self.phases[-1]
            soon = EVERY if latest is self.verb else 0.0  # whose own name says little
            if self.terminal and now - latest.began >= SOON:
                self._draw()
            elif not self.terminal and now >= max(self._next, latest.began + soon):
                self._next = now + EVERY
                sys.stderr.write(f"{latest}\n")
                sys.stderr.flush()

    def _draw(self) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True),  # not standard output, which may be a file
                get_renderable=self._bar,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
            )
            self._live.start()
        self._live.refresh()

    def _bar(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        latest = self.phases[-1] if self.phases else Shown("", None)
        row = Table.grid(padding=(0, 1))
        for _ in range(3):
            row.add_column(no_wrap=True, overflow="ellipsis")
        share = min(1.0, latest.done / latest.total) if latest.total else 0.0
        bar = ProgressBar(1.0, share, width=24, pulse=not latest.total)
        row.add_row(latest.text, bar, latest.far)
        return row

    def clear(self) -> None:
        """Wipe the bar away; the next look draws it again."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As :func:`kvlingo_mlx.phases.aside`."""
        with self._lock:
            self.clear()
            yield


@contextlib.contextmanager
def watching(text: str | None, terminal: bool, silent: bool = False) -> Iterator[None]:
    """Show the phases of this context, and that of all of it, if it has a ``text``."""
    watch = ProgressLine(terminal, silent)
    with shown(watch), watch.looking(), contextlib.ExitStack() as whole:
        if text is not None:
            whole.enter_context(watch.phase(text))
            watch.verb = watch.phases[0]
        yield
