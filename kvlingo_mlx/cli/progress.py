"""How far a verb is: a bar in a terminal; elsewhere a plain line on standard error now and then.

A thread looks at the clock, so that a step of many minutes is told of, too.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvlingo_mlx.phases import Step, shown, spelled

FIRST, EVERY = 10.0, 60.0  # seconds until the first line, and between two lines
STILL = 30.0  # seconds without a step from which a line tells of it
LOOK = 0.25  # seconds between two looks at the clock
SOON = 0.5  # seconds before a bar appears: short work shows none

# rich is imported where it is used, since most commands are over before.


@dataclass(eq=False)
class Shown:
    """One phase: its steps so far, and the times of its beginning and of its last step.

    ``timed`` means that it ends by the clock: its total is seconds, and no step need be counted.
    """

    text: str
    total: float | None
    timed: bool = False
    done: float = 0
    began: float = field(default_factory=lambda: time.monotonic())
    moved: float = field(init=False)
    alive: float = field(init=False)  # when it last moved, or a phase within it ended
    start: tuple[float, float] = field(init=False)  # a number done and its time: the pace is since

    def __post_init__(self) -> None:
        self.moved = self.alive = self.began
        self.start = 0, self.began

    def step(
        self, done: float | None = None, total: float | None = None, text: str | None = None
    ) -> None:
        """As :data:`kvlingo_mlx.phases.Step`; a text alone is no step."""
        before, self.moved = self.moved, time.monotonic()
        self.alive = self.moved
        if self.timed and done is not None:
            self.began = self.moved - done
        elif done is not None or text is None:
            count = self.done + 1 if done is None else done
            if not self.done or count < self.done:  # perhaps not the first: a work resumed
                self.start = max(0, count - 1), before if self.done else self.start[1]
            self.done = count
        else:
            self.rest()
        self.total, self.text = total or self.total, text or self.text

    def rest(self) -> None:
        """Do not count the time so far to the pace, if nothing is done yet."""
        self.alive = time.monotonic()
        if not self.done:
            self.start = 0, self.alive

    @property
    def share(self) -> float | None:
        """How much of it is done, if its total is known."""
        done = time.monotonic() - self.began if self.timed else self.done
        return min(1.0, done / self.total) if self.total else None

    @property
    def left(self) -> float | None:
        """The seconds that it will take yet, at the pace so far."""
        now = time.monotonic()
        if not self.total or not (self.done or self.timed):
            return None
        if self.timed:
            return max(0.0, self.began + self.total - now)
        done, since = self.start
        # A step that takes longer than those before says that those to come will, too.
        pace = max((self.moved - since) / (self.done - done), now - self.moved)
        return max(0.0, pace * (self.total - self.done) - (now - self.moved)) or None

    @property
    def far(self) -> str:
        """For example ``12 of 48, about 3 min left``."""
        took, told = time.monotonic() - self.began, list[str]()
        spent = spelled(took)
        if self.timed and self.total:
            told.append(f"{spent} of {spelled(self.total)}")
        elif self.total:
            told.append(f"{self.done:,.0f} of {self.total:,.0f}")
        else:
            told += [f"{self.done:,.0f}"] * bool(self.done) + [f"{spent} so far"] * (took >= 1)
        if (left := self.left) is not None:
            told.append(f"about {spelled(left)} left")
        return ", ".join(told) or "begun"

    def __str__(self) -> str:
        still = time.monotonic() - self.alive
        if still < STILL or not self.total or self.timed:
            return f"{self.text}: {self.far}"
        return f"{self.text}: {self.far}, no step for {spelled(still)}"


class Watch:
    """The phases of a verb, one within another; the innermost one is shown."""

    def __init__(self, terminal: bool, silent: bool = False) -> None:
        self.terminal, self.silent = terminal, silent
        self.phases: list[Shown] = []
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._next = time.monotonic() + FIRST
        self._live: Any = None
        self.whole: Shown | None = None  # the verb itself

    @contextlib.contextmanager
    def phase(self, text: str, total: float | None = None, timed: bool = False) -> Iterator[Step]:
        """Show a phase; yields the function to call after each step."""
        own = Shown(text, total, timed)
        self.phases.append(own)
        try:
            yield own.step
        finally:
            self.phases.remove(own)
            if self.phases:
                self.phases[-1].rest()
            else:
                self.clear()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the clock until the context ends."""
        thread = threading.Thread(target=self._look_on, daemon=True)
        thread.start()
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
            soon = EVERY if latest is self.whole else 0.0  # whose own name says little
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

            # Not standard output, which may be a file.
            self._live = Live(
                console=Console(stderr=True),
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
        share = latest.share
        bar = ProgressBar(1.0, share or 0.0, width=24, pulse=share is None)
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
        """A context in which something else is written: on lines of its own."""
        with self._lock:
            self.clear()
            yield


_watches: list[Watch] = []


@contextlib.contextmanager
def watching(text: str | None, terminal: bool, silent: bool = False) -> Iterator[None]:
    """Show the phases of this context, and that of all of it, if it has a ``text``."""
    own = Watch(terminal, silent)
    _watches.append(own)
    try:
        with shown(own.phase), own.looking(), contextlib.ExitStack() as whole:
            if text is not None:
                whole.enter_context(own.phase(text))
                own.whole = own.phases[0]
            yield
    finally:
        _watches.remove(own)


def watch() -> Watch:
    """The verb's watch; where there is none, one that shows nothing."""
    return _watches[-1] if _watches else Watch(terminal=False, silent=True)
