"""One conversation, several models: each keeps its own cache line, and no span is read twice.

Alternated translation and generation (section 4.6, "Multi-turn cache translation"): a line is
made of spans that its model read or wrote itself and of spans that were translated, once, from
what another model wrote. At a switch only the spans that the incoming model lacks are
translated.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvlingo_mlx.conversation import folder as folders
from kvlingo_mlx.conversation.accounting import Stats, stats_of
from kvlingo_mlx.conversation.exchange import Exchange, Given, Switch
from kvlingo_mlx.conversation.line import Line
from kvlingo_mlx.conversation.transcript import Transcript
from kvlingo_mlx.conversation.turn import THOUGHT, Turn
from kvlingo_mlx.generation import GenerationResponse, Model
from kvlingo_mlx.loading import load
from kvlingo_mlx.prompts import Message

__all__ = ["Conversation", "Stats", "Switch"]


class Conversation:
    """Several models over one context.

    Args:
        models: By name, each a folder, a Hub id or a loaded model. Their tokenizers must agree.
        translators: Loaded, or folders or Hub ids; each serves the directions that its two
            models fit. What is missing is looked for in the local store.
        strategy: ``alternated``; for comparison ``naive``, which translates the whole prefix
            anew at every switch, translated spans included, and ``reprefill``.
        eager: Translate what one model wrote for all the others as soon as it is finished, so
            that a switch costs one decoding step. Off saves the other lines' memory.
        on_missing: ``error``, or ``reprefill`` to let a model read what no translator brings it.
        offload: Where a line goes while another model decodes, but for what was just written:
            ``8bit`` rounds it to 8 bits in memory, ``disk`` writes it to a file (beside the
            local store, private to this process). None keeps all lines in memory.
        system: A system message to begin with.
        enable_thinking: The chat template's switch.
        tools: The tools that the chat template announces.
        verbatim: Go on from what was written, whatever the template makes of earlier turns: Qwen's
            strips their thinking, so that the answers after it must be read anew.
        prefill_step_size: Tokens per chunk.
        allow_mismatch: Accept translators made for other checkpoints of the same shape.
        quantize: Bits of the translators that are loaded here, as in :func:`load_translator`.

    Raises:
        ValueError: No models, or an argument without meaning.
        IncompatibleTranslatorError: The tokenizers differ, or a translator fits no direction.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        translators: Iterable[Given] = (),
        *,
        strategy: str = "alternated",
        eager: bool = True,
        on_missing: str = "error",
        offload: str | None = None,
        system: str | None = None,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        verbatim: bool = False,
        prefill_step_size: int = 2048,
        allow_mismatch: bool = False,
        quantize: int | None = None,
    ) -> None:
        if not models:
            raise ValueError("a conversation needs a model; give models={'name': model}")
        self.exchange = Exchange(
            {name: load(model) for name, model in models.items()}, translators,
            strategy=strategy, on_missing=on_missing, offload=offload,
            step_size=prefill_step_size, allow_mismatch=allow_mismatch, quantize=quantize,
        )  # fmt: skip
        self.eager = eager
        start = [{"role": "system", "content": system}] if system is not None else []
        switches = {"enable_thinking": enable_thinking, "tools": tools and list(tools)}
        self.transcript = Transcript(start, verbatim=verbatim, switches=switches)

    @property
    def lines(self) -> Mapping[str, Line]:
        """What each model holds, by name."""
        return self.exchange.lines

    @property
    def last_switch(self) -> Switch | None:
        """What the last answer's model lacked, and how it got that."""
        return self.exchange.last

    @property
    def messages(self) -> list[Message]:
        """Every message so far."""
        return [dict(message) for message in self.transcript.messages]

    def undo(self) -> None:
        """Take back the last message and its answer; what was before is not read again.

        Raises:
            ValueError: Nobody has answered yet.
        """
        self.transcript = self.transcript.undo()

    def branch(self) -> Conversation:
        """A conversation that goes on from here on its own; models and numbers are shared."""
        made = copy.copy(self)
        made.transcript, made.exchange = self.transcript.copy(), self.exchange.copy()
        return made

    # ---- replies ----------------------------------------------------------------------------

    def reply(self, name: str, message: str | Sequence[Message], **options: Any) -> str:
        """One model's whole answer; arguments are those of :meth:`stream_reply`."""
        return "".join(response.text for response in self.stream_reply(name, message, **options))

    def stream_reply(
        self,
        name: str,
        message: str | Sequence[Message],
        *,
        prefill: str | None = None,
        first_token: str = "target",
        reasoning: str | None = None,
        max_tokens: int = 256,
        sampler: Any = None,
        logits_processors: list[Any] | None = None,
    ) -> Generator[GenerationResponse, None, None]:
        """Let a model answer; yields a response a token.

        The message and the answer join the conversation when the answer ends, or when the
        caller stops asking for more of it. If anything fails before, the conversation stays as
        it was.

        Args:
            name: Who answers.
            message: What the user says, or several messages (a tool's result, say).
            prefill: Who reads the message: by default the model that answers, so that the
                context alone is handed over. Another one hands it over after the prompt.
            first_token: ``source`` lets ``prefill`` write the first token as well.
            reasoning: Who writes the reasoning trace, up to its end mark; ``name`` then writes
                the answer alone (appendix "Moving the switch point").
            max_tokens: Most tokens of the answer, a trace included; -1 for no limit.
            sampler: As in mlx-lm.
            logits_processors: As in mlx-lm; they see the whole conversation.

        Raises:
            ValueError: No model of that name, or a message that cannot be rendered.
            MissingTranslatorError: A span that only another model wrote cannot be translated.
        """
        if max_tokens == 0 or max_tokens < -1:
            raise ValueError(f"max_tokens is {max_tokens}; give a positive number, or -1")
        if first_token not in ("target", "source") or (first_token == "source" and not prefill):
            raise ValueError(
                f"first_token is {first_token!r}; it must be target, or source beside a prefill"
            )
        for writer in filter(None, (name, prefill, reasoning)):
            self.exchange.line(writer)  # all must be there before anybody begins
        model = self.exchange.line(name).model
        new = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        prompt = self.transcript.prompt(model, new)
        model.check_tokens(prompt)
        options = {"sampler": sampler, "logits_processors": logits_processors}
        mark = self.transcript.end_of_messages(model, new, prompt)
        turn = Turn(self.exchange, new, prompt, mark, max_tokens, options)
        if prefill is not None and first_token == "target":
            self.exchange.bring(prefill, prompt[:-1], mark)
        parts: list[tuple[str, int, str | None]] = [(name, -1, None)]
        if reasoning is not None:
            parts.insert(0, (reasoning, -1, THOUGHT))
        if prefill is not None and first_token == "source":
            parts.insert(0, (prefill, 1, None))
        try:
            for part in parts:
                if not turn.ended:
                    yield from turn.write(*part)
        except GeneratorExit:
            self._finish(turn)
            raise
        self._finish(turn)

    def _finish(self, turn: Turn) -> None:
        """Let what was said join the conversation, and the other lines follow."""
        answer = {"role": "assistant", "content": turn.text}
        self.transcript.wrote([*turn.messages, answer], turn.prompt, turn.answer)
        if self.eager and self.exchange.strategy == "alternated":
            self.exchange.follow(turn.prompt + turn.answer, turn.mark)

    # ---- memory -----------------------------------------------------------------------------

    def offload(self, name: str, where: str = "8bit") -> int:
        """Put a model's line away until that model is to answer; returns the bytes given back.

        Args:
            name: Whose line.
            where: ``8bit`` (in memory, rounded) or ``disk`` (exact, checked when it comes back).

        Raises:
            ValueError: No such model or place.
            OSError: It cannot be written; the line is as it was.
        """
        return self.exchange.put_away(name, where)

    def stats(self) -> Stats:
        """What each line holds, and what everything takes in memory."""
        return stats_of(self.exchange)

    def measure_reprefill(self) -> float:
        """Seconds that the last answer's model takes to read its whole prompt, measured now.

        What :attr:`last_switch` took is to be compared with; a cache of that length is made
        and dropped.

        Raises:
            ValueError: Nobody has answered yet.
        """
        return self.exchange.measure_reprefill()

    # ---- on disk ----------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write everything but models and translators to a folder: all of it, or nothing.

        A conversation that was saved there before is replaced.

        Raises:
            ValueError: ``folder`` exists and is no conversation of ours.
        """
        return folders.write(folder, self.exchange, self.transcript)

    @classmethod
    def resume(
        cls,
        folder: str | os.PathLike[str],
        models: Mapping[str, Model],
        translators: Iterable[Given] = (),
        **options: Any,
    ) -> Self:
        """Go on with a saved conversation; nothing is read or translated anew.

        Args:
            folder: What :meth:`save` wrote.
            models: By the names they had.
            translators: As for a new conversation; those that were in use must be among them
                or in the local store.
            options: ``eager``, ``on_missing``, ``offload``, ``prefill_step_size``, ``quantize``
                and ``allow_mismatch``; everything else is the saved conversation's.

        Raises:
            MalformedConversationError: No saved conversation, one of another version, or damaged.
            ValueError: A model is missing, or another than it was.
            IncompatibleTranslatorError: A translator is missing, or another than it was.
        """
        saved = folders.Saved(folder)
        loaded = {name: load(model) for name, model in models.items()}
        saved.check_models(loaded)
        talk = cls(loaded, translators, strategy=saved.strategy, **options)
        talk.transcript = saved.restore(talk.exchange)
        return talk
