"""The turns and commands of a chat, over a conversation."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli.chat_input import Lines, Stop, interruptible
from kvlingo_mlx.cli.output import complain, facts, ms, say, table, tell_of_machine
from kvlingo_mlx.errors import KVLingoError, printable
from kvlingo_mlx.group import leads

if TYPE_CHECKING:
    from kvlingo_mlx.engine.accounting import Stats
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
COLUMNS = ["model", "tokens", "own", "translated", "cache (MB)", "for others (MB)", "where"]


class Chat:
    """A chat of one user with several models."""

    def __init__(
        self,
        conversation: Conversation,
        lines: Lines,
        options: Mapping[str, Any],  # of every reply
        *,
        route: Route | None = None,  # chooses who answers, unless the user has
        use: str | None = None,  # who answers first
        save: str | None = None,  # the folder for the end
        resume: str | None = None,  # the folder from which the conversation was resumed
    ) -> None:
        self.conversation, self.names = conversation, tuple(conversation.lines)
        self._lines, self._options, self._route = lines, options, route
        self._save_at_end, self._folder = save, save or resume
        self._active = use or (AUTO if route else self.names[0])
        self._measured: tuple[Switch, float] | None = None
        self._ended, self._group = False, conversation.exchange.group
        self._idle: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def heal_while_idle(self) -> None:
        """Let the model that answered last read what it holds translated while the user types.

        Raises:
            UnsupportedModelError: A model's cache cannot be healed.
        """
        self.conversation.check_healing()
        self._idle = functools.partial(self.conversation.healing, answers=True)

    def run(self) -> None:
        """Take the user's lines until there are no more.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C twice in a row.
        """
        if self._lines.terminal:
            self._show_last_turns()
            say("/help lists the commands")
        try:
            while not self._ended and (line := self._next_line()) is not None:
                self._try_to_take(line)
        finally:
            answered = any(m["role"] == "assistant" for m in self.conversation.messages)
            if self._save_at_end and answered:
                self._save_somewhere(self._save_at_end)

    def _show_last_turns(self) -> None:
        """Show the last turns of a conversation that was resumed."""
        said = [m for m in self.conversation.messages if m["role"] != "system"]
        asked = [index for index, m in enumerate(said) if m["role"] == "user"]
        for message in said[asked[-SHOWN_TURNS:][0] :] if asked else said:
            text = str(message.get("content") or "")
            cut = text[:SHOWN_CHARACTERS] + (" ..." if len(text) > SHOWN_CHARACTERS else "")
            # It may be another person's conversation, so control codes other than line ends are
            # removed.
            lines = "\n".join(map(printable, cut.split("\n")))
            say(f"{message['role']}: {lines}")

    def _next_line(self) -> str | None:
        """What the user types; meanwhile the model that answered last may heal."""
        stack = contextlib.ExitStack()
        self._heal(lambda: stack.enter_context(self._idle()))
        try:
            return self._lines.next(f"{self._active}> ")
        finally:
            self._heal(stack.close)

    def _heal(self, work: Callable[[], None]) -> None:
        """Begin or end healing; what goes wrong with it ends it, and nothing else."""
        try:
            work()
        except (KVLingoError, ValueError, MemoryError, RuntimeError) as error:
            self._idle = contextlib.nullcontext
            text = f"healing has ended ({error}); the conversation goes on without it"
            complain(KVLingoError(text))

    def _try_to_take(self, text: str) -> None:
        """Take a message or commands; most errors end only these, and not the chat."""
        try:
            self._take(text)
        except BrokenPipeError:
            raise  # nobody reads the output any more
        except (KVLingoError, ValueError) as error:
            if leads():
                complain(error)
        except (OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
            if self._group.several:  # the others have gone on
                raise
            if isinstance(error, KeyboardInterrupt):
                say("stopped")
            else:
                complain(error if isinstance(error, OSError) else _out_of_memory(error))

    def _take(self, text: str) -> None:
        lines = [line for line in text.splitlines() if line.strip()]
        if lines and all(line.startswith("/") for line in lines):
            for line in lines:
                if not self._ended:
                    self._command(line)
        elif lines:
            self._answer(text.strip())

    # ---- turns ------------------------------------------------------------------------------

    def _answer(self, message: str) -> None:
        """One turn, which Ctrl-C can end."""
        before = len(self.conversation.messages)
        try:
            alone = not self._group.several
            with interruptible() if alone else contextlib.nullcontext(Stop()) as stop:
                self._stream(self._who(message), message, stop)
        except KeyboardInterrupt:
            if self._group.several:
                raise
            # Ctrl-C may fall between the arrival of the first token and the note of it.
            if len(self.conversation.messages) > before:
                self.conversation.undo()
            say("stopped; nothing was kept")

    def _who(self, message: str) -> str:
        """The model that the user named or, if none, the one that the route chooses."""
        route = self._route
        if route is None or self._active != AUTO:
            return self._active
        messages = [*self.conversation.messages, {"role": "user", "content": message}]
        name = self._group.firsts(lambda: route(messages, self.names))
        say(typer.style(f"[{name}]", dim=True))
        return name

    def _stream(self, name: str, message: str, stop: Stop) -> None:
        """Print an answer as it arrives; when it is closed, the conversation keeps that much."""
        responses = self.conversation.stream_reply(name, message, **self._options)
        before = self.conversation.exchange.active
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
        switch = self.conversation.last_switch
        if switch and before not in (None, switch.name) and self._lines.terminal:
            say(typer.style(_line_of(switch), dim=True))
        if cut:
            say("stopped; what was written is kept")

    # ---- commands ---------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        word, _, rest = (part.strip() for part in line.strip().partition(" "))
        commands = dict.fromkeys(each.split()[0] for each in HELP if each.startswith("/"))
        if word not in commands:
            raise ValueError(
                f"there is no {word}; there are {', '.join(commands)} (a message that begins with "
                "/ needs a space before it)"
            )
        named = word in ("/use", "/save")
        if rest and not named:
            raise ValueError(f"{word} stands alone; found {rest!r} after it")
        command = getattr(self, f"_{word[1:]}")
        command(rest) if named else command()

    def _use(self, name: str) -> None:
        names = [*self.names, *([AUTO] if self._route else [])]
        if name not in names:
            raise ValueError(f"/use is followed by {name!r}; give one of {', '.join(names)}")
        self._active = name

    def _undo(self) -> None:
        self.conversation.undo()
        say("took back the last message and its answer")

    def _save(self, folder: str) -> None:
        place = folder or self._folder
        if not place:
            raise ValueError("/save needs a folder: /save FOLDER (or start the chat with --save)")
        say(f"saved to {self.conversation.save(os.path.expanduser(place))}")

    def _save_somewhere(self, folder: str) -> None:
        """Save where the user said; if that fails, save beside the store and raise the error."""
        try:
            self._save(folder)
        except (ValueError, OSError):
            from kvlingo_mlx.loading.translators import store

            fresh = store().parent / "conversations" / time.strftime("%Y-%m-%d-%H%M%S")
            self._save(str(fresh))
            raise

    def _help(self) -> None:
        width = max(map(len, HELP))
        for word, meaning in HELP.items():
            say(f"{word:<{width}}  {meaning}")

    def _exit(self) -> None:
        self._ended = True

    def _stats(self) -> None:
        _print_stats(self.conversation.stats())
        switch = self.conversation.last_switch
        if switch is None:
            say("no model has answered since this chat began")
        else:
            _print_switch(switch, self._reprefill(switch))

    def _reprefill(self, switch: Switch) -> float | None:
        """Seconds in which the last switch's model reads all tokens anew; None if skipped."""
        if self._measured is None or self._measured[0] is not switch:
            count = switch.kept + switch.translated + switch.read
            say(f"reading {count} tokens anew with {switch.name} to compare; Ctrl-C skips")
            try:
                self._measured = switch, self.conversation.measure_reprefill()
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


# ---- what /stats prints ----------------------------------------------------------------------


def _print_stats(stats: Stats) -> None:
    """Print a row per model, and the memory of all."""
    rows = [
        [
            line.name, *map(str, (line.tokens, line.native, line.translated)),
            *map(_mb, (line.cache_bytes, line.recording_bytes)), line.where,
        ]
        for line in stats.lines
    ]  # fmt: skip
    table("Tokens in each model's cache, written by itself or translated", COLUMNS, rows)
    facts(
        {
            "models (MB)": _mb(stats.models),
            "translators (MB)": _mb(stats.translators),
            "total (MB)": _mb(stats.total),
            "MLX's active memory (MB)": _mb(stats.mlx_active),
            **{f"translator, {ends}": name for ends, name in stats.used.items()},
        }
    )


def _line_of(switch: Switch) -> str:
    """What a switch took, in a line."""
    ahead = f" ({switch.ahead} of them before you asked)" if switch.ahead else ""
    return (
        f"[{switch.name} took over in {ms(switch.seconds)} ms; tokens: {switch.kept} kept, "
        f"{switch.translated} translated{ahead}, {switch.read + 1} read; /stats compares it with "
        "reading all]"
    )


def _print_switch(switch: Switch, anew: float | None) -> None:
    """Print the last switch, beside the seconds of reading the same prompt anew."""
    facts(
        {
            "last switch": f"to {switch.name}",
            "tokens kept": switch.kept,
            "tokens translated": switch.translated,
            "of them before you asked": switch.ahead,
            "tokens read": switch.read + 1,
            **({"native layers": switch.native_layers} if switch.native_layers else {}),
            **({"guard": str(switch.guarded)} if switch.guarded else {}),
            "took (ms)": ms(switch.seconds),
            "reading all anew (ms)": "not measured" if anew is None else ms(anew),
        }
    )
    tell_of_machine()


def _mb(count: int) -> str:
    return f"{count / 1e6:,.2f}"
