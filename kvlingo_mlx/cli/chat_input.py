"""The user's input in a chat: lines, and Ctrl-C."""

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

from kvlingo_mlx.cli.output import ask, complain, say
from kvlingo_mlx.group import launched

ASKED_S = 0.05  # seconds between two questions whether a line was typed
KEPT_LINES = 1000  # lines in the history file
PAUSE = 0.03  # seconds: nobody types the next line sooner, and a paste has no such gap
PASTE_MARKS = ("\033[200~", "\033[201~")  # terminals put these around a bracketed paste


class Lines:
    """The user's messages: typed in a terminal, or one per line from a pipe.

    Text pasted into a terminal is one message, even with several lines. GNU readline recognises a
    paste by the terminal's marks; without it, a paste is the text that arrives at once after the
    prompt.

    Raises:
        ValueError: Standard input is closed.
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise ValueError("a chat reads standard input, which is closed")
        self.terminal = sys.stdin.isatty()
        self.readline = _readline() if self.terminal else None  # which edits lines
        self._warned = False
        self._typed: queue.Queue[str | ValueError | None] = queue.Queue()
        self._reading: threading.Thread | None = None

    def next(self, prompt: str) -> str | None:
        """The next message, empty if a line was not usable; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C; in a terminal, the second one in a row.
            ValueError: A pipe holds something other than text.
        """
        if launched():
            return self._of_first(prompt)
        return self._ask(prompt) if self.terminal else self._read()

    def _of_first(self, prompt: str) -> str | None:
        """The message that the first process of mlx.launch reads, in all of them.

        mlx.launch gives none a terminal. They ask one another now and then, since MLX's ring keeps
        a processor busy while it waits.
        """
        from kvlingo_mlx.machines import here

        group = here()
        if group.leads:
            say(prompt, end="")
            if self._reading is None or not self._reading.is_alive():
                self._reading = threading.Thread(target=self._read_ahead, daemon=True)
                self._reading.start()
        while not (found := group.firsts(self._arrived)):
            if not group.leads:
                time.sleep(ASKED_S)
        return found[0]

    def _arrived(self) -> list[str | None]:
        """The line that was read, if there is one soon."""
        try:
            found = self._typed.get(timeout=ASKED_S)
        except queue.Empty:
            return []
        if isinstance(found, ValueError):
            raise found
        return [found]

    def _read_ahead(self) -> None:
        """Read a line, in a thread of its own."""
        try:
            self._typed.put(self._read())
        except ValueError as error:  # raised where the line is waited for
            self._typed.put(error)

    def _read(self) -> str | None:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 text ({error.reason})") from None
        return line.rstrip("\r\n") if line else None

    def _ask(self, prompt: str) -> str | None:
        # Waiting lines were typed during the last answer, so each is sent alone.
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
            say("")
            if self._warned:
                raise
            self._warned = True
            say("/exit or Ctrl-D leaves, and so does another Ctrl-C")
            return ""
        self._warned = False
        text = "\n".join(lines)
        for mark in PASTE_MARKS:
            text = text.replace(mark, "")
        if self.readline is not None and text.strip() and "\n" not in text:  # not a paste's lines
            _remember(self.readline, text)
        return text


def _arrived(seconds: float) -> bool:
    """Whether more of standard input is available, or arrives within ``seconds``."""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # not a file, but an object that acts as a terminal
        return False


def _readline() -> ModuleType | None:
    """The standard library's readline, if Python has it; it detects pastes where it can."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)
    dumb = os.environ.get("TERM", "dumb") == "dumb"  # such a terminal would show the marks as text
    if not dumb and "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
    return readline


def _remember(readline: ModuleType, text: str) -> None:
    """Add a line to the history, unless it is the last one again."""
    last = readline.get_current_history_length()
    if not last or readline.get_history_item(last) != text:
        readline.add_history(text)


@contextlib.contextmanager
def history(path: Path | None, readline: ModuleType | None) -> Iterator[None]:
    """Load earlier chats' lines into the history, and save this chat's lines for later ones.

    If the file cannot be read or written, only the history is lost. None stands for no file.
    """
    if readline is None or path is None:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # At no moment may others read the user's lines.
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            path.chmod(0o600)
            readline.set_history_length(KEPT_LINES)
            readline.write_history_file(path)
            path.chmod(0o600)


class Stop:
    """The handler of Ctrl-C while an answer is made.

    Before the first token it raises KeyboardInterrupt, once. Later it only sets ``asked``, which
    the loop over the tokens checks.
    """

    def __init__(self) -> None:
        self.began = False  # whether the first token has arrived
        self.asked = False  # whether Ctrl-C was pressed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raises = not self.began and not self.asked
        self.asked = True
        if raises:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Let Ctrl-C stop an answer within this context."""
    stop, before = Stop(), signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, stop)
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
