"""What the user types into a chat: lines, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

from kvlingo_mlx.cli.output import complain, say

KEPT_LINES = 1000  # of the history


class Lines:
    """The user's lines: asked for in a terminal, read as they are from a pipe.

    Attributes:
        terminal: Whether somebody sits there.

    Raises:
        ValueError: Standard input is closed.
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise ValueError("a chat reads standard input, which is closed")
        self.terminal = sys.stdin.isatty()
        self._warned = False

    def next(self, prompt: str) -> str | None:
        """The next line, empty where there was none to take; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C, in a terminal the second one in a row.
            ValueError: A pipe holds something else than text.
        """
        return self._ask(prompt) if self.terminal else self._read()

    def _ask(self, prompt: str) -> str | None:
        try:
            line = input(prompt)
        except EOFError:
            say("")
            return None
        except UnicodeDecodeError as error:
            complain(ValueError(f"this line is not text ({error.reason}); type it again"))
            return ""
        except KeyboardInterrupt:
            self._warn()
            return ""
        self._warned = False
        return line

    def _warn(self) -> None:
        """Tell how to leave, once."""
        say("")
        if self._warned:
            raise KeyboardInterrupt
        self._warned = True
        say("/exit or Ctrl-D leaves, and so does another Ctrl-C")

    def _read(self) -> str | None:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 text ({error.reason})") from None
        return line.rstrip("\r\n") if line else None


# ---- history ---------------------------------------------------------------------------------


@contextlib.contextmanager
def history(path: Path, lines: Lines) -> Iterator[None]:
    """Earlier chats' lines under the arrow keys, and this one's for later ones.

    A file that cannot be read or written costs the history alone.
    """
    readline = _readline() if lines.terminal else None
    if readline is None:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _write(readline, path)


def _readline() -> ModuleType | None:
    """The standard library's, which some builds of Python lack."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _write(readline: ModuleType, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # What was said is nobody else's business, at no moment.
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    path.chmod(0o600)
    readline.set_history_length(KEPT_LINES)
    readline.write_history_file(path)
    path.chmod(0o600)


# ---- Ctrl-C ----------------------------------------------------------------------------------


class Stop:
    """What Ctrl-C does while an answer is made.

    Before the first token it raises KeyboardInterrupt, once; afterwards it is a wish that the
    loop over the tokens sees.

    Attributes:
        began: Whether the first token is there.
        asked: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.began = self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raises = not self.began and not self.asked
        self.asked = True
        if raises:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Let Ctrl-C stop an answer, inside of this."""
    stop, before = Stop(), signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, stop)
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
