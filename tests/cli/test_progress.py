"""How far a verb is: never silent for more than a minute, and no message on the bar's own line."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from kvlingo_mlx.cli import progress
from kvlingo_mlx.cli.progress import EVERY, LOOK, ProgressLine

FIRST = 10.0


@dataclass
class Clock:
    """A clock that a test turns, and the lines that a watch without a terminal writes by it."""

    watch: ProgressLine
    capsys: pytest.CaptureFixture[str]
    now: float = 0.0

    def turn(self, seconds: float) -> list[tuple[float, str]]:
        """The lines of so many seconds, with their times."""
        found, until = [], self.now + seconds
        while self.now < until:
            self.now += LOOK
            self.watch.look()
            found += [(self.now, line) for line in self.capsys.readouterr().err.splitlines()]
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Clock]:
    now = SimpleNamespace(monotonic=lambda: made.now if made else 0.0)
    made = None
    monkeypatch.setattr(progress, "time", now)
    monkeypatch.setattr(progress, "FIRST", FIRST)
    made = Clock(ProgressLine(terminal=False), capsys)
    yield made


@pytest.mark.parametrize("seed", range(3))
def test_a_line_a_minute_whatever_happens(clock: Clock, seed: int) -> None:
    """Phases within phases, with steps and without, of seconds or of minutes."""
    draw = np.random.default_rng(seed)
    told: list[tuple[float, str]] = []

    def work(depth: int) -> None:
        nonlocal told
        total = None if draw.random() < 0.5 else int(draw.integers(1, 9))
        with clock.watch.phase(f"phase {depth}", total) as step:
            for _ in range(int(draw.integers(1, 5))):
                told += clock.turn(float(draw.choice([0.5, 7, 40, 200])))
                if depth < 3:
                    work(depth + 1)
                if draw.random() < 0.6:
                    step()

    with clock.watch.phase("verb"):
        while clock.now < 900:
            work(1)
        told += clock.turn(1)
    times = [0.0, *(time for time, _ in told), clock.now]
    assert len(told) > 5 and FIRST <= told[0][0] <= FIRST + LOOK
    assert max(np.diff(times)) <= EVERY + LOOK
    assert min(np.diff(times[1:-1])) >= EVERY


def test_short_work_says_nothing(clock: Clock) -> None:
    with clock.watch.phase("short", 3) as step:
        assert not clock.turn(FIRST - 1)
        step()
    assert not clock.turn(300), "and what is over is not told of"


def test_a_step_of_many_minutes_is_told_of(clock: Clock) -> None:
    with clock.watch.phase("solving the maps", 48) as step:
        for _ in range(12):
            clock.turn(5)
            step()
        found = [line for _, line in clock.turn(90)]
    # Each of the 36 that are left may take as long as this one does.
    assert found[1:] == ["solving the maps: 12 of 48, about 41 min left, no step for 70 s"]


@pytest.mark.parametrize("resumed", [0, 500])
def test_the_time_that_is_left(clock: Clock, resumed: int) -> None:
    """20 s a step; what came before the first one, and steps of an earlier run, do not count."""
    with clock.watch.phase("training", 1000) as step:
        with clock.watch.phase("reading the weights"):
            clock.turn(700)
        for done in range(resumed + 1, resumed + 11):
            clock.now += 20
            step(done)
        shown = clock.watch.phases[-1]
        assert shown.left == pytest.approx(20 * (1000 - resumed - 10))
        assert f"{resumed + 10:,} of 1,000, about " in str(shown)


SLOW = """
import sys, time, warnings
from kvlingo_mlx.cli import command, doctor, progress, run
from kvlingo_mlx.cli.output import say, warn
from kvlingo_mlx.phases import phase
progress.FIRST, progress.EVERY, progress.SOON, progress.LOOK = 0.2, 0.3, 0.0, 0.02
def work(options):
    with phase("reading", 3) as step:
        for number in range(3):
            time.sleep(0.3)
            step()
            say(f"said {number}")
    warn("careful")
    with phase("a solve without steps"):
        time.sleep(0.5)
        warnings.warn("a library's own")
        sys.stderr.write("written by others\\n")
        time.sleep(0.3)
    say("done")
work.__module__ = "kvlingo_mlx.cli.fit"
command.verb(command.VerbOptions)(work)(json_file=None)
"""
SAID = ["said 0", "said 1", "said 2", "done"]


def test_piped() -> None:
    """Text for programs on standard output; the lines for people, whole, on standard error."""
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == SAID
    lines = done.stderr.splitlines()
    assert any(re.fullmatch(r"reading: [0-3] of 3(, about \d s left)?", line) for line in lines)
    assert any(re.fullmatch(r"a solve without steps: (\d s so far|begun)", line) for line in lines)
    assert "warning: careful" in lines and "written by others" in lines


def screen(written: str) -> list[str]:
    """What a terminal shows in the end: a cursor that moves by the few sequences of rich."""
    lines, row = [""], 0
    for sequence, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", written):
        if sequence == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif sequence == "\r":
            lines[row] = "\r" + lines[row].lstrip("\r")
        elif sequence.endswith("A"):
            row -= int(sequence[2:-1] or 1)
        elif sequence.endswith("2K"):
            lines[row] = ""
        elif text:  # written from the line's beginning after a return, else behind what is there
            kept = lines[row]
            lines[row] = text + kept[1 + len(text) :] if kept.startswith("\r") else kept + text
    return [line for line in (line.strip("\r ") for line in lines) if line]


@pytest.mark.parametrize("piped", [False, True])
def test_in_a_terminal_a_message_clears_the_bar(piped: bool) -> None:
    """With standard output in the terminal too, or in a file, which then has all of it."""
    leader, follower = pty.openpty()
    where = subprocess.PIPE if piped else follower
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=where, stderr=follower, text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:  # fmt: skip
        os.close(follower)
        written = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            written += chunk
            if not chunk:
                break
        out = process.stdout.read().splitlines() if process.stdout else []
    os.close(leader)
    text = written.decode()
    assert process.returncode == 0 and "━" in text and "of 3" in text, "a bar was shown"
    shown = screen(text)
    if piped:
        assert out == SAID
        assert not set(SAID) & set(shown)
    else:
        assert [line for line in shown if line in SAID] == SAID
    assert "warning: careful" in shown and "written by others" in shown
    assert not [line for line in shown if "━" in line], "the bar is gone, from every line"
