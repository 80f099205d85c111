"""One conversation with several models: each keeps its own cache line and reads no span twice.

Alternated translation and generation (section "Multi-turn cache translation"): a line consists of
spans that its model read or wrote itself, and of spans that another model wrote and that were
translated once. At a switch only the spans that the incoming model lacks are translated.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from kvlingo_mlx.arguments import checked, renamed
from kvlingo_mlx.conversation import folder as folders
from kvlingo_mlx.conversation.accounting import Stats, check_room, stats_of
from kvlingo_mlx.conversation.asking import Asking, ReplyOptions, history_of
from kvlingo_mlx.conversation.cross_exchange import CrossExchange
from kvlingo_mlx.conversation.cross_transcript import CrossTranscript
from kvlingo_mlx.conversation.directions import Given
from kvlingo_mlx.conversation.exchange import Exchange, Switch
from kvlingo_mlx.conversation.line import Line
from kvlingo_mlx.conversation.rules import Rules
from kvlingo_mlx.conversation.transcript import (
    Transcript,
    same_message,
    template_difference,
)
from kvlingo_mlx.conversation.turn import Decoding, Turn, thought_end
from kvlingo_mlx.conversation.use import Use, claiming
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.handover.generation import check_max_tokens
from kvlingo_mlx.handover.responses import GenerationResponse
from kvlingo_mlx.handover.sampling import (
    DecodingOptions,
    LogitsProcessor,
    Sampler,
    choice_of,
    given,
)
from kvlingo_mlx.loading.models import Model, load_together
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message, check_tools

__all__ = ["Conversation", "Stats", "Switch"]

ON_FULL = ("error", "drop_oldest")


class ResumeOptions(TypedDict, total=False):
    """The arguments of :class:`Conversation` that a saved conversation does not fix."""

    eager: bool
    on_missing: str
    offload: str | None
    prefill_step_size: int
    quantize: int | None
    native_layers: int | str | None
    allow_mismatch: bool
    on_full: str


class Conversation:
    """Several models over one context.

    Args:
        models: The models by name, each a folder, a Hub id or a loaded model. Where tokenizers
            differ, each model reads the messages by its own chat template: contents are translated,
            and each model reads the text that its template puts around them.
        translators: Loaded translators, folders or Hub ids; each serves the directions that its two
            models fit. Translators that are missing are searched for in the local store.
        switching: ``alternated``; or, for comparison, ``naive``, which translates the whole prefix
            anew at every switch, translated spans included (not between tokenizers), and
            ``reprefill``.
        eager: Translate what one model wrote for all the others as soon as it is finished, so
            that a switch costs one decoding step. Off saves the other lines' memory.
        on_missing: ``error``; ``reprefill`` lets a model read a span that has no translator.
        offload: Where a line is kept while another model decodes, except for its newest tokens:
            ``8bit`` rounds it to 8 bits in memory, ``disk`` writes it to a file (beside the
            local store, private to this process). None keeps all lines in memory.
        system: A system message to begin with.
        enable_thinking: The chat template's switch.
        tools: The tools that the chat template announces.
        verbatim: Continue from the tokens as written, even where the template changes earlier
            turns. Qwen's template strips their thinking, so that later answers are read anew.
        prefill_step_size: Tokens per prefill chunk.
        allow_mismatch: Accept translators made for other checkpoints of the same shape.
        quantize: Bits of the translators that are loaded here, as in :func:`load_translator`.
        native_layers: Number of cache layers, from the first on, that the incoming model reads
            itself at a switch, as in :func:`hand_over`; the layers above them are translated. Not
            between tokenizers.
        on_full: What happens where a prompt leaves no room in a model's context: ``error``, or
            ``drop_oldest``, which drops whole turns, the oldest first, until ``max_tokens`` (at
            most half of the context) fit after the prompt. The system message stays. The rest is
            read anew from the first token that differs.

    Raises:
        ValueError: There are no models, or an argument is bad.
        IncompatibleTranslatorError: A translator fits no direction.
        UnsupportedModelError: A translator is given for a model that cannot take over from another
            tokenizer; models with windows cannot.
        NotEnoughMemoryError: The models that are loaded here do not fit; none was read.

    Any thread may use a conversation, one at a time: a second one is refused while an answer is
    written. Several conversations may share models and translators; they take turns, after each
    chunk or token (see :mod:`kvlingo_mlx.threads`). Samplers and logits processors run within a
    conversation's turn and must not wait for another thread. ``with Conversation(...) as talk``
    closes the conversation at the end.
    """

    @renamed(strategy="switching")
    @checked
    def __init__(
        self,
        models: Mapping[str, Model],
        translators: Iterable[Given] = (),
        *,
        switching: str = "alternated",
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
        native_layers: int | str | None = None,
        on_full: str = "error",
    ) -> None:
        if on_full not in ON_FULL:
            raise ValueError(f"on_full is {on_full!r}; give {' or '.join(ON_FULL)}")
        if not models:
            raise ValueError("a conversation needs a model; give models={'name': model}")
        if tools is not None:
            _check_json(tools)
        loaded = _loaded(models)
        several = len(_by_tokenizer(loaded.values())) > 1
        rules = Rules(
            *(switching, on_missing, offload, prefill_step_size, allow_mismatch),
            *(quantize, native_layers),
        )
        self.exchange = (CrossExchange if several else Exchange)(loaded, translators, rules)
        self.eager, self._use, self._compared = eager, Use(), False
        self.on_full = on_full
        start = [{"role": "system", "content": system}] if system is not None else []
        switches = {"enable_thinking": enable_thinking, "tools": tools and list(tools)}
        kind: type[Transcript] = CrossTranscript if several else Transcript
        self.transcript = kind(start, verbatim=verbatim, switches=switches)

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
            listed = history_of(messages) if messages else []
            made, rest = self.transcript.at(listed, self._same())
            made.messages += rest
            made.previous = self.transcript
            self.transcript = made

    def undo(self) -> None:
        """Take back the last message and its answer; what came before is not read again.

        If ``messages`` were set since the last answer, that change is taken back instead.

        Raises:
            ValueError: No model has answered yet, or an answer is still being written.
        """
        with self._use.claimed():
            self.transcript = self.transcript.undo()

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
            made.cut_answer([line.model for line in self.lines.values()], characters)
            self.transcript = made

    def _same(self) -> Callable[[Message, Message], bool]:
        """A function that says whether a message is one of this conversation's own."""
        models = _by_tokenizer([line.model for line in self.lines.values()])
        return same_message([alike[0].tokenizer for alike in models])

    def branch(self) -> Conversation:
        """An independent conversation that goes on from here; models and arrays are shared.

        The branch takes no memory of its own at first. When either conversation goes on, each
        model's caches are copied once, for the one that writes first.

        Raises:
            ValueError: An answer is still being written.
        """
        with self._use.claimed():
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
            self._use.close()

    def __enter__(self) -> Self:
        self._check_closed()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_closed(self) -> None:
        """Raise ValueError if the conversation is closed, or an answer is being written."""
        self._use.check()

    def _compare_templates(self) -> None:
        """Warn, once, where chat templates differ so that nothing can be handed over."""
        alternated = self.exchange.rules.switching != "reprefill" and not self.transcript.verbatim
        if self._compared or not alternated:
            return
        self._compared = True
        for models in _by_tokenizer([line.model for line in self.lines.values()]):
            if not (found := template_difference(models, self.transcript.switches)):
                continue
            one, other, position = found
            warnings.warn(
                f"the chat templates of {one.name} and {other.name} differ from token {position} "
                "of a conversation on, so each switch reads what follows anew and translates none "
                "of it; give verbatim=True (--verbatim) to keep the tokens as written",
                stacklevel=5,
            )

    # ---- replies ----------------------------------------------------------------------------

    @checked
    def reply(
        self,
        name: str,
        message: str | Sequence[Message] | None = None,
        **options: Unpack[ReplyOptions],
    ) -> str:
        """One model's whole answer. The arguments are those of :meth:`stream_reply`."""
        return "".join(response.text for response in self.stream_reply(name, message, **options))

    @checked
    @claiming
    def stream_reply(
        self,
        name: str,
        message: str | Sequence[Message] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        prefill: str | None = None,
        first_token: str = "target",
        reasoning: str | None = None,
        max_tokens: int = 256,
        sampler: Sampler | None = None,
        logits_processors: list[LogitsProcessor] | None = None,
        enable_thinking: bool | None = None,
        draft_model: Model | None = None,
        num_draft_tokens: int | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Let a model answer; yield one response per token.

        The message and the answer join the conversation when the answer ends, or when the caller
        closes the generator. If anything fails before that, the conversation stays as it was. Until
        then, the conversation refuses other questions and changes.

        Args:
            name: The model that answers.
            message: The user's message, or several messages (with a tool's result, for example).
            messages: Instead of ``message``, the whole conversation, as clients of a server send
                it. The part that it shares with this conversation is not read again. Answers that
                a model wrote keep their tokens, even if they come back without their reasoning or
                with parsed tool calls. Without either argument, the messages that were set are
                answered.
            prefill: The model that reads the message. By default it is the model that answers, so
                that only the context is handed over. Another model hands over after the prompt.
            first_token: ``source`` lets ``prefill`` write the first token as well.
            reasoning: The model that writes the reasoning trace, up to its end mark; ``name`` then
                writes only the answer (appendix "Moving the switch point"). If the answer ends
                without that mark, ``name`` wrote nothing, and a warning says so.
            max_tokens: Most tokens of the answer, a trace included; -1 for no limit but the
                model's context.
            sampler: As in mlx-lm.
            logits_processors: As in mlx-lm; they see the whole conversation.
            enable_thinking: The chat template's switch, for this reply.
            draft_model: A draft model for ``name``, as in :func:`generate`: the name of one of
                this conversation's models, which has read most of the prompt, or another model.
                Not between several tokenizers, nor with ``reasoning`` or ``first_token``.
            num_draft_tokens: How many tokens it drafts at a time (2).
            options: Those of :class:`~kvlingo_mlx.handover.sampling.DecodingOptions`;
                ``kv_bits`` quantises a copy of the cache, and not between several tokenizers.
                After a reply with ``kv_bits`` or ``draft_model``, ``name`` reads its answer once.

        Raises:
            ValueError: There is no model of that name, a message cannot be rendered, the prompt is
                beyond a model's context, an argument is bad, or an answer is still being written.
            MissingTranslatorError: A span that only another model wrote cannot be translated.
            UnsupportedModelError: mlx-lm cannot quantise a cache, or remove rejected drafts from
                it.
            NotEnoughMemoryError: The prompt's caches do not fit; nothing has changed.
        """
        known = given(options, DecodingOptions, "a conversation")
        choice = choice_of(known, sampler, logits_processors)
        check_max_tokens(max_tokens)
        if first_token not in ("target", "source"):
            raise ValueError(f"first_token is {first_token!r}; it must be target or source")
        self._compare_templates()
        named = [n for n in (name, prefill, reasoning) if n is not None]
        for each in named:  # check all names before any model begins
            self.exchange.line(each)
        asking = Asking(self.exchange, self.transcript, self._same(), self.on_full)
        base, new = asking.begun(message, messages, enable_thinking, known.get("tools"))
        check_tools(self.exchange.line(name).model, [*base.messages, *new], known.get("tools"))
        alone = reasoning is None and first_token == "target"
        draft = asking.draft(draft_model, alone=alone)
        decoding = Decoding(
            choice,
            base.switches.get("tools"),
            asking.quantised(named, known),
            draft,
            num_draft_tokens or 2,
        )
        base, new = asking.fitting(base, new, named, max_tokens)
        turn = asking.turn(base, named, new, max_tokens, decoding)
        parts: list[tuple[str, int | None, str | None]] = [(name, None, None)]
        if reasoning is not None:
            parts.insert(0, (reasoning, None, thought_end(self.exchange.line(reasoning).model)))
        if prefill is not None and first_token == "source":
            parts.insert(0, (prefill, 1, None))
        self._check_room(turn, named)
        reader = prefill if first_token == "target" else None
        latest = yield from self._answered(base, turn, parts, reader)
        if reasoning is not None and latest != name:
            warnings.warn(
                f"the answer ended before {latest} ended a reasoning trace ({parts[-2][2]}), so "
                f"{name} wrote nothing of it; undo, and ask again without reasoning, with "
                "thinking enabled, or with more max_tokens",
                stacklevel=3,
            )

    def _answered(
        self,
        base: Transcript,
        turn: Turn,
        parts: Sequence[tuple[str, int | None, str | None]],
        reader: str | None,
    ) -> Generator[GenerationResponse, None, str]:
        """Let the writers give an answer: each has a name, a token limit and an end mark.

        The answer joins ``base``, which becomes the conversation. ``reader`` reads the prompt
        before the writers begin. Returns the name of the last writer.
        """
        latest = name = parts[-1][0]
        try:
            if reader is not None:
                turn.read(reader)
            for index, (writer, most, until) in enumerate(parts, start=1):
                if not turn.ended and turn.room(writer) > 0:
                    latest = writer
                    yield from turn.write(writer, most, until, last=index == len(parts))
        except GeneratorExit:
            if not self._use.over:
                self._finish(base, turn, turn.said(name, cut=True))
            raise
        else:
            self._finish(base, turn, turn.said(name, cut=False))
        return latest

    def _check_room(self, turn: Turn, names: Iterable[str]) -> None:
        """Raise NotEnoughMemoryError if a prompt's caches do not fit; nothing has changed then."""
        check_room({name: turn.length(name) for name in names}, self.lines)

    def _finish(self, base: Transcript, turn: Turn, text: str) -> None:
        """Add the message and the answer to the conversation, and let the other lines follow."""
        models = [line.model for line in self.lines.values()]
        turn.book(base, text)
        base.previous, own = self.transcript, self.transcript.switches
        base.remember(models[0])
        if (characters := turn.stopped_at(text)) is not None:
            base.cut_answer(models, characters)
        self.transcript = base
        eager = self.eager and self.exchange.rules.switching == "alternated"
        try:
            if eager:
                here = [name for name, line in self.lines.items() if not line.away]
                check_room(dict.fromkeys(here, len(base.tokens)), self.lines)
            turn.follow(base, eager=eager)
        except (MemoryError, RuntimeError, KVLingoError) as error:
            # The answer stays. The next switch will translate it, or say why it cannot.
            warnings.warn(f"the other lines could not follow ({error})", stacklevel=2)
        finally:
            base.switches = dict(own)  # this reply's switches were for this reply only

    # ---- memory -----------------------------------------------------------------------------

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
            return self.exchange.measure_reprefill()

    # ---- on disk ----------------------------------------------------------------------------

    @checked
    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write everything except models and translators to a folder: all of it, or nothing.

        A conversation that was saved there before is replaced.

        Raises:
            ValueError: ``folder`` exists and is not a saved conversation, or an answer is still
                being written.
        """
        with self._use.claimed():
            return folders.write(folder, self.exchange, self.transcript)

    @classmethod
    @checked
    def resume(
        cls,
        folder: str | os.PathLike[str],
        models: Mapping[str, Model],
        translators: Iterable[Given] = (),
        **options: Unpack[ResumeOptions],
    ) -> Self:
        """Go on with a saved conversation; nothing is read or translated anew.

        Args:
            folder: The folder that :meth:`save` wrote.
            models: The models, by the names that they had.
            translators: As for a new conversation; the translators that were in use must be among
                them or in the local store, unless ``on_missing`` is ``reprefill``.
            options: ``eager``, ``on_missing``, ``offload``, ``prefill_step_size``, ``quantize``,
                ``native_layers``, ``allow_mismatch`` and ``on_full``; everything else comes from
                the saved conversation.

        Raises:
            MalformedConversationError: The folder holds no saved conversation, or one that is
                damaged or of another version.
            ValueError: A model is missing, or is another than before.
            IncompatibleTranslatorError: A translator is missing and ``on_missing`` is ``error``, or
                one is another than before.
        """
        known = ResumeOptions.__annotations__
        for name in options:
            if name not in known:
                raise ValueError(
                    f"{name} is what the saved conversation has; give it {', '.join(known)}"
                )
        saved = folders.Saved(folder)
        loaded = _loaded(models)
        saved.check_models(loaded)
        talk = cls(loaded, translators, switching=saved.switching, **options)
        talk.transcript = saved.restore(talk.exchange)
        return talk


def _loaded(models: Mapping[str, Model]) -> dict[str, LanguageModel]:
    """The models, loaded, by name; a folder with two names is loaded once."""
    keys = {n: id(m) if isinstance(m, LanguageModel) else os.fspath(m) for n, m in models.items()}
    once = {keys[name]: model for name, model in models.items()}
    loaded = dict(zip(once, load_together(list(once.values())), strict=True))
    return {name: loaded[key] for name, key in keys.items()}


def _by_tokenizer(models: Iterable[LanguageModel]) -> list[list[LanguageModel]]:
    """The models, grouped by tokenizer."""
    listed = list(models)
    if len(listed) < 2:
        return [listed]
    found: dict[str, list[LanguageModel]] = {}
    for model in listed:
        found.setdefault(model.tokenizer_fingerprint, []).append(model)
    return list(found.values())


def _check_json(tools: object) -> None:
    try:
        json.dumps(tools)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tools must be what JSON can hold ({error})") from None
