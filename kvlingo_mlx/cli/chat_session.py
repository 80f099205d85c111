"""The turns and commands of a chat, over a conversation."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli.chat_input import Lines, Stop, interruptible
from kvlingo_mlx.cli.chat_stats import print_lines, print_switch, switch_line
from kvlingo_mlx.cli.output import complain, say
from kvlingo_mlx.errors import KVLingoError, printable
from kvlingo_mlx.group import leads

if TYPE_CHECKING:
    from kvlingo_mlx.engine.conversation import Conversation, Switch
    from kvlingo_mlx.engine.routing import Route

# The words of MLX's memory errors on a CPU, on Metal and on CUDA.
MEMORY = re.compile("malloc|allocat|insufficient memory|out of memory", re.IGNORECASE)
AUTO = "auto"  # /use auto: the route chooses
SHOWN_TURNS, SHOWN_CHARACTERS = 2, 300  # shown of a resumed conversation
HELP = {
    "/use NAME": "this model answers from now on",
    "/use auto": "--route chooses again",
    "/undo": "take back your last message and its answer",
    "/save [FOLDER]": "save the conversation; without a folder where --save or --resume say",
    "/stats": "what each model holds, and what the last switch took",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does",
    "(paste)": "one message, however many lines; commands, if each line begins with /",
}


class Chat:
    """A chat of one user with several models."""

    def __init__(
        self,
        talk: Conversation,
        lines: Lines,
        options: Mapping[str, Any],  # of every reply
        *,
        route: Route | None = None,  # chooses who answers, unless the user has
        use: str | None = None,  # who answers first
        save: str | None = None,  # the folder for the end
        resume: str | None = None,  # the folder from which the conversation was resumed
    ) -> None:
        self.talk, self.names = talk, tuple(talk.lines)
        self._lines, self._options, self._route = lines, options, route
        self._save_at_end, self._folder = save, save or resume
        self._active = use or (AUTO if route else self.names[0])
        self._measured: tuple[Switch, float] | None = None
        self._ended, self._group = False, talk.exchange.group
        self._idle: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def heal_while_idle(self) -> None:
        """Let the model that answered last read what it holds translated while the user types.

        Raises:
            UnsupportedModelError: A model's cache cannot be healed.
        """
        self.talk.check_healing()
        self._idle = functools.partial(self.talk.healing, answers=True)

    def run(self) -> None:
        """Take the user's lines until there are no more.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C twice in a row.
        """
        if self._lines.terminal:
            self._show_last_turns()
            say("/help lists the commands")
        try:
            self._loop()
        finally:
            if self._save_at_end and any(m["role"] == "assistant" for m in self.talk.messages):
                self._save_somewhere(self._save_at_end)

    def _show_last_turns(self) -> None:
        """Show the last turns of a conversation that was resumed."""
        said = [m for m in self.talk.messages if m["role"] != "system"]
        asked = [index for index, m in enumerate(said) if m["role"] == "user"]
        for message in said[asked[-SHOWN_TURNS:][0] :] if asked else said:
            text = str(message.get("content") or "")
            cut = text[:SHOWN_CHARACTERS] + (" ..." if len(text) > SHOWN_CHARACTERS else "")
            # It may be another person's conversation, so control codes other than line ends are
            # removed.
            lines = "\n".join(map(printable, cut.split("\n")))
            say(f"{message['role']}: {lines}")

    def _loop(self) -> None:
        while not self._ended:
            with self._healing():
                line = self._lines.next(f"{self._active}> ")
            if line is None:
                return
            try:
                self._take(line)
            except BrokenPipeError:
                raise  # nobody reads the output any more
            except (OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
                if self._group.several:  # the others have gone on
                    raise
                self._tell(error)
            except (KVLingoError, ValueError) as error:
                if leads():
                    complain(error)

    def _tell(self, error: OSError | MemoryError | RuntimeError | KeyboardInterrupt) -> None:
        """Tell what ended an answer, or a command, but not the chat."""
        if isinstance(error, KeyboardInterrupt):
            say("stopped")
        else:
            complain(
                _out_of_memory(error) if not isinstance(error, KVLingoError | OSError) else error
            )

    @contextlib.contextmanager
    def _healing(self) -> Iterator[None]:
        """Heal while a line is typed; what goes wrong with it ends it, and nothing else."""
        stack = contextlib.ExitStack()
        with self._ends_healing():
            stack.enter_context(self._idle())
        try:
            yield
        finally:
            with self._ends_healing():
                stack.close()

    @contextlib.contextmanager
    def _ends_healing(self) -> Iterator[None]:
        try:
            yield
        except (KVLingoError, ValueError, MemoryError, RuntimeError) as error:
            self._idle = contextlib.nullcontext
            told = f"healing has ended ({error}); the conversation goes on without it"
            complain(KVLingoError(told))

    def _take(self, line: str) -> None:
        lines = [each for each in line.splitlines() if each.strip()]
        if lines and all(each.startswith("/") for each in lines):
            for each in lines:
                if not self._ended:
                    self._command(each)
        elif lines:
            self._answer(line.strip())

    # ---- turns ------------------------------------------------------------------------------

    def _answer(self, message: str) -> None:
        """One turn, which Ctrl-C can end."""
        before = len(self.talk.messages)
        try:
            alone = not self._group.several
            with interruptible() if alone else contextlib.nullcontext(Stop()) as stop:
                self._stream(self._who(message), message, stop)
        except KeyboardInterrupt:
            if self._group.several:
                raise
            # Ctrl-C may fall between the arrival of the first token and the note of it.
            if len(self.talk.messages) > before:
                self.talk.undo()
            say("stopped; nothing was kept")

    def _who(self, message: str) -> str:
        """The model that the user named or, if none, the one that the route chooses."""
        if self._route is None or self._active != AUTO:
            return self._active
        messages = [*self.talk.messages, {"role": "user", "content": message}]
        route = self._route
        name = self._group.firsts(lambda: route(messages, self.names))
        say(typer.style(f"[{name}]", dim=True))
        return name

    def _stream(self, name: str, message: str, stop: Stop) -> None:
        """Print an answer as it arrives; when it is closed, the conversation keeps that much."""
        responses = self.talk.stream_reply(name, message, **self._options)
        before = self.talk.exchange.active
        cut, ended = False, None
        try:
            with contextlib.closing(responses):
                for response in responses:
                    stop.began = True
                    ended = response.finish_reason
                    say(response.text, end="\n" if ended else "")
                    if cut := stop.asked and ended is None:
                        break
        finally:
            say("", end="\n" if stop.began and ended is None else "")
        switch = self.talk.last_switch
        if switch and before not in (None, switch.name) and self._lines.terminal:
            say(typer.style(switch_line(switch), dim=True))
        if cut:
            say("stopped; what was written is kept")

    # ---- commands ---------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        word, _, rest = (part.strip() for part in line.strip().partition(" "))
        commands: dict[str, Callable[[str], None]] = {
            "/use": self._use,
            "/save": self._save,
            "/undo": self._undo,
            "/stats": self._stats,
            "/help": self._help,
            "/exit": self._exit,
        }
        if word not in commands:
            raise ValueError(
                f"there is no {word}; there are {', '.join(commands)} (a message that begins with "
                "/ needs a space before it)"
            )
        if rest and word not in ("/use", "/save"):
            raise ValueError(f"{word} stands alone; found {rest!r} after it")
        commands[word](rest)

    def _use(self, name: str) -> None:
        names = [*self.names, *([AUTO] if self._route else [])]
        if name not in names:
            raise ValueError(f"/use is followed by {name!r}; give one of {', '.join(names)}")
        self._active = name

    def _undo(self, _: str) -> None:
        self.talk.undo()
        say("took back the last message and its answer")

    def _save(self, folder: str) -> None:
        place = folder or self._folder
        if not place:
            raise ValueError("/save needs a folder: /save FOLDER (or start the chat with --save)")
        say(f"saved to {self.talk.save(os.path.expanduser(place))}")

    def _save_somewhere(self, folder: str) -> None:
        """Save where the user said; if that fails, save beside the store and raise the error."""
        try:
            self._save(folder)
        except (ValueError, OSError):
            from kvlingo_mlx.loading.translators import store

            fresh = store().parent / "conversations" / time.strftime("%Y-%m-%d-%H%M%S")
            self._save(str(fresh))
            raise

    def _help(self, _: str) -> None:
        width = max(map(len, HELP))
        for word, meaning in HELP.items():
            say(f"{word:<{width}}  {meaning}")

    def _exit(self, _: str) -> None:
        self._ended = True

    def _stats(self, _: str) -> None:
        print_lines(self.talk.stats())
        switch = self.talk.last_switch
        if switch is None:
            say("no model has answered since this chat began")
        else:
            print_switch(switch, self._reprefill(switch))

    def _reprefill(self, switch: Switch) -> float | None:
        """Seconds in which the last switch's model reads all tokens anew; None if skipped."""
        if self._measured is None or self._measured[0] is not switch:
            count = switch.kept + switch.translated + switch.read
            say(f"reading {count} tokens anew with {switch.name} to compare; Ctrl-C skips")
            try:
                self._measured = switch, self.talk.measure_reprefill()
            except KeyboardInterrupt:
                return None
        return self._measured[1]


def _out_of_memory(error: MemoryError | RuntimeError) -> KVLingoError:
    """A message with a way out, if the error is about memory, for which MLX has no class.

    Any other error is raised again.
    """
    text = str(error)
    if not isinstance(error, MemoryError) and not MEMORY.search(text):
        raise error
    return KVLingoError(
        f"there is not enough memory for this answer ({text or 'MemoryError'}); the conversation "
        "is as it was: /save it, and go on with --resume and -c offload=disk"
    )
