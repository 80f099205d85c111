"""One conversation with several models: each keeps its own cache line and reads no span twice.

Alternated translation and generation (section "Multi-turn cache translation"): a line consists of
spans that its model read or wrote itself, and of spans that another model wrote and that were
translated once. At a switch only the spans that the incoming model lacks are translated.
"""

import functools
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypedDict, Unpack

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches.validation import room_for
from kvlingo_mlx.engine import folder as folders
from kvlingo_mlx.engine.accounting import Stats, check_room
from kvlingo_mlx.engine.answer import AnswerInProgress
from kvlingo_mlx.engine.batches import Batch, Row
from kvlingo_mlx.engine.directions import Given
from kvlingo_mlx.engine.exchange import Exchange, Switch
from kvlingo_mlx.engine.generation import check_drafting, check_max_tokens
from kvlingo_mlx.engine.guarding import WARN
from kvlingo_mlx.engine.healing import HEAL_SHARE
from kvlingo_mlx.engine.line import Line, Steps
from kvlingo_mlx.engine.messages import history_of, messages_of, without_oldest_turn
from kvlingo_mlx.engine.responses import GenerationResponse, Heard
from kvlingo_mlx.engine.rules import Rules, tell_of_templates
from kvlingo_mlx.engine.sampling import Choice, DecodingOptions, choice_of, given
from kvlingo_mlx.engine.state import State
from kvlingo_mlx.engine.transcript import Transcript
from kvlingo_mlx.engine.turn import Decoding, Part, Turn, tokens_alone
from kvlingo_mlx.engine.use import claiming
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.loading.models import Model, load, load_together
from kvlingo_mlx.machines import digest_of, facts_of, group_of, own_folder
from kvlingo_mlx.models.prompts import Message, check_json, check_tools, render_text
from kvlingo_mlx.tokenization.probes import think_marks

__all__ = ["Conversation", "Stats", "Switch"]


class ReplyOptions(DecodingOptions, total=False):
    """The options of :meth:`Conversation.reply` and :meth:`Conversation.stream_reply`."""

    messages: Sequence[Message] | None
    prefill: str | None
    first_token: str
    reasoning: str | None


@dataclass(frozen=True)
class Request:
    """What :meth:`Conversation.stream_reply` was asked for; the attributes are its arguments."""

    message: str | Sequence[Message] | None = None
    messages: Sequence[Message] | None = None
    prefill: str | None = None
    first_token: str = "target"
    reasoning: str | None = None
    max_tokens: int = 256
    enable_thinking: bool | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    draft_model: Model | None = None
    num_draft_tokens: int | None = None
    choice: Choice = field(default_factory=Choice)  # how tokens are chosen
    # further switches of the chat template
    template: Mapping[str, Any] = field(default_factory=dict)
    begun: str = ""  # the text with which the answer begins, which is given
    batch: Batch | None = None  # the answers beside which the model decodes this one, or None
    seat: Callable[[Row | None], None] = lambda row: None  # told of its place there

    @classmethod
    def of(cls, message: str | Sequence[Message] | None, options: Mapping[str, Any]) -> Self:
        """The request in a caller's options, of which those that are None are not given."""
        known, own = given(options), {field.name for field in fields(cls)}
        choice = choice_of(known)
        asked = {name: value for name, value in known.items() if name in own}
        return cls(message, **asked, choice=choice)


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
    heal: str | None
    heal_share: float
    guard: int
    on_doubt: str


class Conversation(State):
    """Several models over one context.

    Args:
        models: The models by name, each a folder, a Hub id or a loaded model, perhaps a
            sharded one, if all processes of ``mlx.launch`` do the same. Where tokenizers
            differ, each model reads the messages by its own chat template: contents are translated,
            and each model reads the text that its template puts around them.
        translators: Loaded translators, folders or Hub ids; each serves the directions that its two
            models fit. Translators that are missing are searched for in the local store.
        switching: ``alternated``; or, for comparison, ``reprefill``, which reads everything again.
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
        heal: ``interleaved`` lets a model that answers read what it holds translated between its
            decoding steps, in the place of the translation. ``layers`` also lets it read some
            layers at once: ``native_layers``, the tuned number or a quarter of all; between the
            steps it reads all of them. None leaves that to :meth:`heal`, which can be called
            between two answers.
        heal_share: The share of its speed that decoding keeps meanwhile.
        guard: At a switch, compare both models over so many tokens, as in :func:`generate`; 0 for
            no guard. They are the first that follow what the outgoing model holds, or the last of
            the prompt if there are fewer. The incoming model reads them itself; the outgoing one
            runs them beside its line. Not for models with windows or states, nor between
            tokenizers.
        on_doubt: What is done if the translation looks out of its depth: ``warn``; ``heal``, the
            model reads behind it while it answers; ``reread``, it reads before it answers.

    Raises:
        ValueError: There are no models, or an argument is bad.
        IncompatibleTranslatorError: A translator fits no direction.
        UnsupportedModelError: A translator is given for a model that cannot take over from another
            tokenizer; models with windows or recurrent states cannot.
        NotEnoughMemoryError: The models that are loaded here do not fit; none was read.

    Any thread may use a conversation, one at a time: a second one is refused while an answer is
    written. Several conversations may share models and translators; they take turns, after each
    chunk or token (see :mod:`kvlingo_mlx.threads`). Samplers and logits processors run within a
    conversation's turn and must not wait for another thread. ``with Conversation(...) as talk``
    closes the conversation at the end.
    """

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
        heal: str | None = None,
        heal_share: float = HEAL_SHARE,
        guard: int = 0,
        on_doubt: str = WARN,
    ) -> None:
        rules = Rules.of(locals())
        if not models:
            raise ValueError("a conversation needs a model; give models={'name': model}")
        check_json(tools)
        loaded = dict(zip(models, load_together(list(models.values())), strict=True))
        exchange = Exchange(loaded, translators, rules)
        exchange.group.agree(lambda: facts_of(loaded) | exchange.directions.facts())
        start = [{"role": "system", "content": system}] if system is not None else []
        switches = {"enable_thinking": enable_thinking, "tools": tools and list(tools)}
        super().__init__(exchange, Transcript(start, verbatim, switches, exchange.several))
        self.eager, self.on_full, self._compared = eager, on_full, False

    def _compare_templates(self) -> None:
        """Warn, once, where chat templates differ so that nothing can be handed over."""
        alternated = self.exchange.rules.switching != "reprefill" and not self.transcript.verbatim
        if alternated and not self._compared:
            self._compared = True
            tell_of_templates(self.exchange.models, self.transcript.switches)

    @checked
    def reply(
        self,
        name: str,
        message: str | Sequence[Message] | None = None,
        **options: Unpack[ReplyOptions],
    ) -> str:
        """One model's whole answer, a reasoning trace included, as it was written.

        The arguments are those of :meth:`stream_reply`, whose responses have ``content`` apart.
        """
        return "".join(response.text for response in self.stream_reply(name, message, **options))

    @checked
    def stream_reply(
        self,
        name: str,
        message: str | Sequence[Message] | None = None,
        **options: Unpack[ReplyOptions],
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
            options: Those of :class:`~kvlingo_mlx.engine.sampling.DecodingOptions`. After a reply
                with ``draft_model``, ``name`` reads its answer once.

        Raises:
            ValueError: There is no model of that name, a message cannot be rendered, the prompt is
                beyond a model's context, an argument is bad, or an answer is still being written.
            MissingTranslatorError: A span that only another model wrote cannot be translated.
            UnsupportedModelError: mlx-lm cannot remove rejected drafts from a cache.
            NotEnoughMemoryError: The prompt's caches do not fit; nothing has changed.
        """
        request = Request.of(message, options)
        switches = dict(self.transcript.switches)
        if request.enable_thinking is not None:
            switches["enable_thinking"] = request.enable_thinking
        model = self.exchange.line(name).model
        heard = Heard(model, lambda: render_text(model, self.messages[:-1], **switches), chat=True)
        yield from tokens_alone(self.reply_in_steps(name, request), heard)

    @claiming
    def reply_in_steps(
        self, name: str, request: Request
    ) -> Generator[GenerationResponse | None, None, None]:
        """Let a model answer, as :meth:`stream_reply`, for callers that do other work in between.

        Yields None after a piece of work that brought no token: a chunk of the prompt that was read
        or translated, or a line that followed the answer. With ``request.batch`` the answer is
        decoded beside others, and None also means that the batch must make a step.
        """
        first, reasoning, rules = request.first_token, request.reasoning, self.exchange.rules
        check_max_tokens(request.max_tokens)
        self._compare_templates()
        named = [n for n in (name, request.prefill, reasoning) if n is not None]
        for each in named:  # check all names before any model begins
            self.exchange.line(each)
        base, new = self._asked(request)
        check_tools(self.exchange.line(name).model, [*base.messages, *new], request.tools)
        decoding = Decoding(
            self.exchange.chosen_together(request.choice),
            base.switches.get("tools"),
            draft=self._draft(request),
            num_draft_tokens=request.num_draft_tokens or 2,
            batch=request.batch,
            seat=request.seat,
        )
        if rules.heals_answers and decoding.draft is not None:
            asked = f"heal is {rules.heal!r}" if rules.heal else "on_doubt is 'heal'"
            raise ValueError(
                f"{asked}, and draft_model lets this answer be written from a copy of the cache; "
                "leave one of them out, or heal between two answers (Conversation.heal)"
            )
        base, new = self._fitting(base, new, named, request.max_tokens)
        progress = AnswerInProgress(self.exchange, base, new, named)
        if (draft := decoding.draft) is not None:
            model = self.exchange.line(name).model
            check_drafting(model, draft.model, progress.prompt, request.max_tokens)
        turn = Turn(self.exchange, progress, request.max_tokens, decoding)
        parts = [Part(name)]
        if reasoning is not None:
            mark = think_marks(self.exchange.line(reasoning).model.tokenizer)[1]
            parts.insert(0, Part(reasoning, until=mark))
        if request.prefill is not None and first == "source":
            parts.insert(0, Part(request.prefill, most=1))
        self.exchange.group.refuse({"draft_model": request.draft_model is not None})
        self.exchange.group.agree(functools.partial(self._facts, turn, named, request))
        lengths = {each: turn.length(each) for each in named}
        check_room(lengths, self.lines, self.exchange.group)
        reader = request.prefill if first == "target" else None
        finish = functools.partial(self._finish, base, turn)
        latest = yield from turn.answer_by(parts, reader, finish)
        if reasoning is not None and latest != name:
            warnings.warn(
                f"the answer ended before {latest} ended a reasoning trace ({parts[-2].until}), so "
                f"{name} wrote nothing of it; undo, and ask again without reasoning, with "
                "thinking enabled, or with more max_tokens",
                stacklevel=4,
            )

    def _asked(self, request: Request) -> tuple[Transcript, list[Message]]:
        """The transcript before the messages that are to be answered, and these messages.

        Raises:
            ValueError: Both or neither are given, or there is nothing to answer.
        """
        message, messages = request.message, request.messages
        if message is not None and messages is not None:
            raise ValueError(
                "message and messages are both given; give the new message alone, or the whole "
                "conversation as messages"
            )
        if messages is not None:
            base, new = self.transcript.at(history_of(messages)), []
        else:
            base = self.transcript.copy()
            new = [] if message is None else messages_of(message)
        base.begun = request.begun
        waiting = any(m.get("role") in ("user", "tool") for m in base.messages[-1:])
        if message is None and messages is None and not waiting:
            messages_of(message)  # message is None: this raises ValueError
        tools = request.tools and list(request.tools)
        switches = {"enable_thinking": request.enable_thinking, "tools": tools}
        switches |= request.template
        base.switches |= {name: value for name, value in switches.items() if value is not None}
        return base, new

    def _draft(self, request: Request) -> Line | None:
        """A separate line for a draft model; a copy if it is one of the conversation's models."""
        draft_model = request.draft_model
        if draft_model is None:
            return None
        alone = request.reasoning is None and request.first_token == "target"
        if self.exchange.several or not alone:
            what = "beside reasoning or first_token" if not alone else "between several tokenizers"
            raise ValueError(f"draft_model cannot be used {what}; leave one of them out")
        if isinstance(draft_model, str) and draft_model in self.exchange.lines:
            line = self.exchange.lines[draft_model].copy()
            line.records = False
            return line
        return Line("draft", load(draft_model), records=False)

    def _fitting(
        self, base: Transcript, new: list[Message], names: Sequence[str], max_tokens: int
    ) -> tuple[Transcript, list[Message]]:
        """The same two; for ``drop_oldest``, without the oldest turns until the answer has room."""
        if self.on_full != "drop_oldest":
            return base, new
        models = [self.exchange.line(name).model for name in names]
        messages = [*base.messages, *new]

        def fits() -> bool:
            return all(
                room_for(model, len(base.prompt(model, new)), -1)
                >= (1 if max_tokens == -1 else min(max_tokens, model.context_length // 2))
                for model in models
            )

        while not fits() and (shorter := without_oldest_turn(messages)) is not None:
            messages, new = shorter, []
            base = base.at(messages)
        return base, new

    def _facts(self, turn: Turn, names: Sequence[str], request: Request) -> dict[str, str]:
        """What is asked and held, alike in all processes, so that none waits for another."""
        asked = [names, turn.progress.prompt, request.max_tokens, request.first_token]
        held = {name: line.tokens for name, line in self.lines.items()}
        return {"prompt": digest_of(asked), "conversation": digest_of(held)}

    def _finish(self, base: Transcript, turn: Turn, text: str) -> Steps:
        """Add the message and the answer to the conversation, and let the other lines follow."""
        begun = len(base.begun)
        turn.book(text)
        base.previous, own = self.transcript, self.transcript.switches
        if (characters := turn.stopped_at(text)) is not None:
            base.cut_answer(begun + characters)
        self.transcript = base
        eager = self.eager and self.exchange.rules.switching == "alternated"
        try:
            if eager:
                here = [name for name, line in self.lines.items() if not line.away]
                lengths = dict.fromkeys(here, len(base.tokens))
                check_room(lengths, self.lines, self.exchange.group)
            yield from turn.progress.follow(eager=eager)
        except (MemoryError, RuntimeError, KVLingoError) as error:
            # The answer stays. The next switch will translate it, or say why it cannot.
            warnings.warn(f"the other lines could not follow ({error})", stacklevel=2)
        finally:
            base.switches = dict(own)  # this reply's switches were for this reply only

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
            options: Those of :class:`ResumeOptions`; everything else comes from the saved
                conversation.

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
        saved = folders.Saved(own_folder(folder, group_of(models.values())))
        loaded = dict(zip(models, load_together(list(models.values())), strict=True))
        saved.check_models(loaded)
        talk = cls(loaded, translators, switching=saved.switching, **options)
        talk.transcript = saved.restore(talk.exchange)
        return talk
