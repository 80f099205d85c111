"""Prepare a reply: from a caller's request to a turn over a transcript."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlingo_mlx.caches.limits import check_bits
from kvlingo_mlx.caches.validation import room_for
from kvlingo_mlx.engine.answer import AnswerInProgress
from kvlingo_mlx.engine.batches import Place
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.generation import DECODE_OPTIONS, check_drafting
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.messages import history_of, messages_of, without_oldest_turn
from kvlingo_mlx.engine.sampling import DecodingOptions, LogitsProcessor, Sampler
from kvlingo_mlx.engine.transcript import Transcript
from kvlingo_mlx.engine.turn import Decoding, Turn
from kvlingo_mlx.loading.models import Model, load
from kvlingo_mlx.models.prompts import Message


class ReplyOptions(DecodingOptions, total=False):
    """The options that :meth:`Conversation.reply` passes to :meth:`Conversation.stream_reply`."""

    messages: Sequence[Message] | None
    prefill: str | None
    first_token: str
    reasoning: str | None
    max_tokens: int
    sampler: Sampler | None
    logits_processors: list[LogitsProcessor] | None
    enable_thinking: bool | None
    draft_model: Model | None
    num_draft_tokens: int | None


@dataclass(frozen=True)
class Request:
    """What :meth:`Conversation.stream_reply` was asked for; the attributes are its arguments."""

    message: str | Sequence[Message] | None = None
    messages: Sequence[Message] | None = None
    prefill: str | None = None
    first_token: str = "target"
    reasoning: str | None = None
    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: list[LogitsProcessor] | None = None
    enable_thinking: bool | None = None
    draft_model: Model | None = None
    num_draft_tokens: int | None = None
    # its :class:`~kvlingo_mlx.engine.sampling.DecodingOptions`
    options: Mapping[str, Any] = field(default_factory=dict)
    # further switches of the chat template
    template: Mapping[str, Any] = field(default_factory=dict)
    begun: str = ""  # the text with which the answer begins, which is given
    batch: Place | None = None  # the answers beside which the model decodes this one, or None


@dataclass(frozen=True)
class Asking:
    """A conversation as it is when a reply is asked for."""

    exchange: Exchange  # the conversation's lines
    transcript: Transcript  # the conversation's messages and tokens
    on_full: str  # what happens when the context is full

    def begun(self, request: Request) -> tuple[Transcript, list[Message]]:
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
        tools = request.options.get("tools")
        switches = {"enable_thinking": request.enable_thinking, "tools": tools and list(tools)}
        switches |= request.template
        base.switches |= {name: value for name, value in switches.items() if value is not None}
        return base, new

    def quantised(self, names: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
        """mlx-lm's options for a quantised cache; refuses models that cannot have one."""
        found = {option: known[option] for option in DECODE_OPTIONS if option in known}
        if found and self.exchange.several:
            raise ValueError(
                "kv_bits cannot be used in a conversation of several tokenizers, whose caches "
                "mlx-lm cannot quantise; leave it out"
            )
        for name in names if found else ():
            model = self.exchange.line(name).model
            check_bits(model, found["kv_bits"], found.get("kv_group_size", 64))
        return found

    def draft(self, request: Request) -> Line | None:
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

    def fitting(
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

    def turn(
        self,
        base: Transcript,
        names: Sequence[str],
        new: list[Message],
        max_tokens: int,
        decoding: Decoding,
    ) -> Turn:
        """A turn in which some models answer ``new``; the first model's template renders it."""
        progress = AnswerInProgress(self.exchange, base, new, names)
        if (draft := decoding.draft) is not None:
            model, drafts = self.exchange.line(names[0]).model, decoding.num_draft_tokens
            check_drafting(model, draft.model, progress.prompt, max_tokens, drafts)
        return Turn(self.exchange, progress, max_tokens, decoding)
