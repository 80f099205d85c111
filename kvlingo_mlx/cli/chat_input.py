"""What the user types into a chat: lines, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

from kvlingo_mlx.cli.output import ask, complain, say

KEPT_LINES = 1000  # of the history
PAUSE = 0.03  # seconds: nobody types the next line sooner, and a paste has no such gap
PASTE_MARKS = ("\033[200~", "\033[201~")  # what terminals put around a bracketed paste


class Lines:
    """The user's messages: asked for in a terminal, a line each from a pipe.

    What is pasted into a terminal is one message, however many lines it has. GNU readline knows a
    paste by the terminal's marks; elsewhere it is what arrives in one go after the prompt.

    Attributes:
        terminal: Whether somebody sits there.
        readline: What edits a line there; None where there is nothing of the kind.

    Raises:
        ValueError: Standard input is closed.
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise ValueError("a chat reads standard input, which is closed")
        self.terminal = sys.stdin.isatty()
        self._warned = False
        self.readline = _readline() if self.terminal else None

    def next(self, prompt: str) -> str | None:
        """The next message, empty where there was none to take; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C, in a terminal the second one in a row.
            ValueError: A pipe holds something else than text.
        """
        return self._ask(prompt) if self.terminal else self._read()

    def _ask(self, prompt: str) -> str | None:
        # Lines that were waiting were typed during the last answer, each to be sent alone.
        ahead = _arrived(0)
        lines: list[str] = []
        try:
            lines.append(ask(prompt))
            while not ahead and _arrived(PAUSE):
                lines.append(ask(""))
        except EOFError:
            if not lines:
                say("")
                return None
        except UnicodeDecodeError as error:
            complain(ValueError(f"this line is not text ({error.reason}); type it again"))
            return ""
        except KeyboardInterrupt:
            self._warn()
            return ""
        self._warned = False
        text = "\n".join(lines)
        for mark in PASTE_MARKS:
            text = text.replace(mark, "")
        self._remember(text)
        return text

    def _remember(self, text: str) -> None:
        """Put a line under the arrow keys; of a paste its lines would come back one by one."""
        if self.readline is None or not text.strip() or "\n" in text:
            return
        last = self.readline.get_current_history_length()
        if not last or self.readline.get_history_item(last) != text:
            self.readline.add_history(text)

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


def _arrived(seconds: float) -> bool:
    """Whether more of standard input is there, or comes within that time."""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # no file: an object that stands for a terminal
        return False


# ---- history ---------------------------------------------------------------------------------


@contextlib.contextmanager
def history(path: Path | None, lines: Lines) -> Iterator[None]:
    """Earlier chats' lines under the arrow keys, and this one's for later ones.

    A file that cannot be read or written costs the history alone; None is no file.
    """
    readline = lines.readline
    if readline is None or path is None:
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
    """The standard library's, which some builds of Python lack; it knows pastes where it can."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)
    dumb = os.environ.get("TERM", "dumb") == "dumb"  # would show the marks as text
    if not dumb and "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
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
