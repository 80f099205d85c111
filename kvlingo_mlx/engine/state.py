"""A conversation between two answers: its messages and lines, which can be changed and kept."""

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.engine.accounting import Stats, stats_of
from kvlingo_mlx.engine.exchange import Exchange, Switch
from kvlingo_mlx.engine.folder import Draft, Saved, check_destination, draft
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.messages import history_of
from kvlingo_mlx.engine.rules import check_all_can_heal
from kvlingo_mlx.engine.transcript import Transcript
from kvlingo_mlx.engine.use import Use
from kvlingo_mlx.machines import own_folder
from kvlingo_mlx.models.prompts import Message
from kvlingo_mlx.threads import finished


class State:
    """What a conversation holds while nobody answers, for one caller at a time.

    Attributes:
        exchange: The models' lines.
        transcript: The messages and their tokens.
    """

    def __init__(self, exchange: Exchange, transcript: Transcript) -> None:
        self.exchange, self.transcript, self._use = exchange, transcript, Use()

    @property
    def lines(self) -> Mapping[str, Line]:
        """The models' lines, by name."""
        return self.exchange.lines

    @property
    def last_switch(self) -> Switch | None:
        """How many tokens the last answer's model lacked, and how it got them."""
        return self.exchange.last

    @property
    def messages(self) -> list[Message]:
        """Every message so far. They can be set; what precedes a change is not read again."""
        return [dict(message) for message in self.transcript.messages]

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        with self._use.claimed():
            made = self.transcript.at(history_of(messages) if messages else [])
            made.previous = self.transcript
            self.transcript = made

    def undo(self) -> None:
        """Take back the last message and its answer; what came before is not read again.

        If ``messages`` were set since the last answer, that change is taken back instead.

        Raises:
            ValueError: No model has answered yet, or an answer is still being written.
        """
        with self._use.claimed():
            if self.transcript.previous is None:
                raise ValueError("there is nothing to undo: nobody has answered yet")
            self.transcript = self.transcript.previous.copy()

    @checked
    def truncate_answer(self, characters: int) -> None:
        """Keep the first ``characters`` of the last answer, reasoning and marks counted.

        The tokens that were written are kept. If the cut is inside a token, its remaining text is
        encoded anew. :meth:`undo` takes back the whole answer.

        Raises:
            ValueError: The last message is not an answer of that many characters, or an answer is
                still being written.
        """
        with self._use.claimed():
            made = self.transcript.copy()
            made.cut_answer(characters)
            self.transcript = made

    def branch(self) -> Self:
        """An independent conversation that goes on from here; models and arrays are shared.

        The branch takes no memory of its own at first. When either conversation goes on, each
        model's caches are copied once, for the one that writes first.

        Raises:
            ValueError: An answer is still being written.
        """
        with self._use.claimed():
            return self._copied()

    def snapshot(self) -> Self:
        """A branch at the state before the answer that is being written, if one is.

        Its lines keep what they have read so far of that answer's prompt. The thread that writes
        the answer calls this between two of its steps.
        """
        made = self._copied()
        for line in made.lines.values():
            line.take_back()
        return made

    def _copied(self) -> Self:
        made = copy.copy(self)
        made.transcript, made.exchange = self.transcript.copy(), self.exchange.copy()
        made._use = Use()
        return made

    def close(self) -> None:
        """Free all lines, in memory and on disk; models and saved conversations stay.

        A closed conversation cannot be used, except for :attr:`messages` and :meth:`stats`.
        Closing it again does nothing.

        Raises:
            ValueError: An answer is still being written.
        """
        if self._use.closed:
            return
        with self._use.claimed():
            for line in self.lines.values():
                line.clear()
            self._use.closed = True

    def __enter__(self) -> Self:
        self._use.check()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @checked
    def offload(self, name: str, where: str = "8bit") -> int:
        """Put a model's line away until that model is to answer; return the bytes freed.

        Args:
            name: The model's name.
            where: ``8bit`` (in memory, rounded) or ``disk`` (exact, checked when it is read back).

        Raises:
            ValueError: There is no such model or place.
            OSError: The file cannot be written; the line is as it was.
        """
        with self._use.claimed():
            return self.exchange.put_away(name, where)

    @checked
    def heal(
        self,
        name: str | None = None,
        *,
        answers: bool = False,
        seconds: float | None = None,
        until: Callable[[], bool] | None = None,
    ) -> int:
        """Let a model read what it holds translated, in the place of the translation.

        Afterwards its cache is its own prefill of these tokens. It reads from the front on, in
        chunks of about 50 ms (at least one token). Interrupted at any point, the conversation goes
        on as well as before; the next call goes on where this one ended.

        Args:
            name: The model; None is the one that answered last.
            answers: Whether it also reads again what it wrote itself after translated tokens. Then
                the cache is the one that it would have if it had read everything alone. A model
                with windows or recurrent states always does, and begins with its first token.
            seconds: The most time to take; None is as long as it takes.
            until: Called before each chunk; healing ends where it returns True.

        Returns:
            The number of tokens that are still to be read.

        Raises:
            ValueError: There is no such model, or an answer is still being written.
            UnsupportedModelError: The models have several tokenizers.
        """
        with self._use.claimed():
            name = name or self.exchange.active
            if name is None:
                return 0
            line = self.exchange.line(name)
            check_all_can_heal(self.exchange.models)
            began = time.monotonic()

            def over() -> bool:
                late = seconds is not None and time.monotonic() - began >= seconds
                ended = late or (until is not None and until())
                return self.exchange.group.firsts(lambda: ended)

            while (left := line.left(answers)) and not over():
                self.exchange.heal(name, answers=answers)
            return left

    def check_healing(self) -> None:
        """Refuse (UnsupportedModelError) models that cannot be healed, as :meth:`heal` does."""
        check_all_can_heal(self.exchange.models)

    @checked
    @contextlib.contextmanager
    def healing(self, name: str | None = None, *, answers: bool = False) -> Iterator[None]:
        """Heal in a thread of its own while the context is open, as while a user types.

        The conversation is in use meanwhile. Leaving the context waits for one chunk at most. The
        arguments are those of :meth:`heal`.

        Raises:
            UnsupportedModelError: As for :meth:`heal`, at once.
        """
        self.check_healing()
        self.exchange.group.refuse({"healing in a thread (heal reads between two calls)": True})
        stop, problems = threading.Event(), list[BaseException]()

        def work() -> None:
            try:
                self.heal(name, answers=answers, until=stop.is_set)
            except BaseException as problem:  # told where the context is left
                problems.append(problem)

        worker = threading.Thread(target=work, name="healing", daemon=True)
        worker.start()
        try:
            yield
        finally:
            stop.set()
            worker.join()
        if problems:
            raise problems[0]

    def stats(self) -> Stats:
        """The contents of each line, and the memory that everything takes."""
        return stats_of(self.exchange)

    def measure_reprefill(self) -> float:
        """Seconds that the last answer's model takes to read its whole prompt, measured now.

        Compare this with the seconds of :attr:`last_switch`. A cache of the prompt's length is
        made and dropped.

        Raises:
            ValueError: No model has answered yet.
        """
        with self._use.claimed():
            if (last := self.last_switch) is None:
                raise ValueError(
                    "no model has answered yet, so there is no prompt to measure; call reply first"
                )
            line = self.exchange.line(last.name)
            prompt = line.tokens[: last.kept + last.translated + last.read]
            fresh = Line(last.name, line.model, records=False)
            started = time.perf_counter()
            finished(fresh.read(prompt, self.exchange.step_size))
            return time.perf_counter() - started

    @checked
    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write everything except models and translators to a folder: all of it, or nothing.

        A conversation that was saved there before is replaced. Where several
        machines hold a model together, each writes a folder of its own into it.

        Raises:
            ValueError: ``folder`` exists and is not a saved conversation, or an answer is still
                being written.
        """
        with self._use.claimed():
            check_destination(Path(folder))
            self.draft().write(own_folder(folder, self.exchange.group))
            self.exchange.group.wait()  # until all have written theirs
            return Path(folder)

    def draft(self) -> Draft:
        """What :meth:`save` would write now; another thread may write it meanwhile."""
        return draft(self.exchange, self.transcript)

    def restore(self, folder: Path) -> None:
        """Become the conversation of these models that :meth:`save` wrote.

        Raises:
            MalformedConversationError, ValueError, IncompatibleTranslatorError: As for
                :meth:`~.conversation.Conversation.resume`.
        """
        saved = Saved(folder)
        saved.check_models({name: line.model for name, line in self.lines.items()})
        self.transcript = saved.restore(self.exchange)
