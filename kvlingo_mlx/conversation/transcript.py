"""A conversation's messages as the tokens that a model must hold to answer the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from kvlingo_mlx.conversation.spans import common_prefix
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.prompts import Message, encode, render_text

MARK = "\u2039answer\u203a"  # an answer that no conversation holds
SAMPLE = [
    {"role": "user", "content": "One."},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three."},
]


class Transcript:
    """Messages, and the tokens in which they were read and written.

    Text can be cut into tokens in several ways, and a model that wrote an answer holds the one
    it chose. So what a template renders is compared as text with what was written, up to the
    last boundary between turns at which they agree, and only the rest is encoded. Where a
    template changes what was written (thinking that it strips from earlier turns), they agree
    no further than that. ``verbatim`` goes on from what was written instead.

    Attributes:
        messages: Every message so far.
        tokens: The tokens of the conversation as it was last read and written.
        boundaries: Lengths of ``tokens`` at which a prompt or an answer ended.
        verbatim: Whether to go on from what was written.
        switches: The chat template's (``enable_thinking``, ``tools``).
        previous: As it was before the last exchange, or None.
    """

    def __init__(
        self,
        messages: Sequence[Message] = (),
        *,
        verbatim: bool = False,
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages: list[Message] = list(messages)
        self.tokens: list[int] = []
        self.boundaries: list[int] = []
        self.verbatim, self.switches = verbatim, dict(switches or {})
        self.previous: Transcript | None = None

    def copy(self) -> Self:
        """One that goes its own way."""
        made = type(self)(self.messages, verbatim=self.verbatim, switches=self.switches)
        made.tokens, made.boundaries = list(self.tokens), list(self.boundaries)
        made.previous = self.previous
        return made

    def undo(self) -> Transcript:
        """As it was before the last exchange.

        Raises:
            ValueError: There has been none.
        """
        if self.previous is None:
            raise ValueError("there is nothing to undo: nobody has answered yet")
        return self.previous.copy()

    def prompt(self, model: LanguageModel, new: Sequence[Message]) -> list[int]:
        """The tokens up to the header of the answer to ``new``, by ``model``'s template.

        Raises:
            ValueError: The model has no template, or it does not take these messages.
        """
        if self.verbatim and self.tokens:
            return self.tokens + self._continuation(model, new)
        text = render_text(model, [*self.messages, *new], **self.switches)
        for boundary in sorted(self.boundaries, reverse=True):
            written = model.tokenizer.decode(self.tokens[:boundary])
            if text.startswith(written):
                rest = text[len(written) :]
                return self.tokens[:boundary] + (_encode(model, rest) if rest else [])
        return encode(model, [*self.messages, *new], **self.switches)

    def _continuation(self, model: LanguageModel, new: Sequence[Message]) -> list[int]:
        """What the template puts after an answer: its end, and the ``new`` messages."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        text = render_text(model, [*before, *new], **self.switches).split(MARK, 1)[1]
        return _encode(model, text[len(written_stop(model, self.tokens[-1], text)) :])

    def end_of_messages(
        self, model: LanguageModel, new: Sequence[Message], prompt: Sequence[int]
    ) -> int | None:
        """Where the answer's header begins in the ``prompt`` made of ``new``, if it can be told.

        Up to there a template renders the same when the answer has become an earlier one; what
        it puts at an answer's beginning (an empty think block) may go.
        """
        whole = render_text(model, [*self.messages, *new], **self.switches)
        bare = render_text(
            model, [*self.messages, *new], add_generation_prompt=False, **self.switches
        )
        header = _encode(model, whole[len(bare) :]) if whole.startswith(bare) else []
        found = header and list(prompt[-len(header) :]) == header
        return len(prompt) - len(header) if found else None

    def wrote(self, new: Sequence[Message], prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Book messages, the prompt that ended with their header, and the answer's tokens."""
        self.previous = self.copy()
        self.messages = [*self.messages, *new]
        # Elsewhere in tokens that were cut anew, a boundary might divide a character.
        shared = common_prefix(self.tokens, prompt)
        kept = {b for b in self.boundaries if b <= shared}
        self.tokens = [*prompt, *answer]
        self.boundaries = sorted({*kept, len(prompt), len(self.tokens)})

    # ---- as JSON --------------------------------------------------------------------------

    def _history(self) -> Iterator[Transcript]:
        """As it was before the last exchange, the one before that, and so on."""
        state = self.previous
        while state is not None:
            yield state
            state = state.previous

    def to_json(self) -> dict[str, Any]:
        """Everything, what can be undone included: each earlier state by how it differs."""
        earlier, later = [], self.tokens
        for state in self._history():
            shared = common_prefix(state.tokens, later)
            earlier.append({
                "messages": len(state.messages), "shared": shared,
                "tokens": state.tokens[shared:], "boundaries": state.boundaries,
            })  # fmt: skip
            later = state.tokens
        return {
            "messages": self.messages, "tokens": self.tokens, "boundaries": self.boundaries,
            "verbatim": self.verbatim, "switches": self.switches, "earlier": earlier,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Transcript:
        """The transcript that :meth:`to_json` described."""
        made = cls(data["messages"], verbatim=data["verbatim"], switches=data["switches"])
        made.tokens, made.boundaries = list(data["tokens"]), list(data["boundaries"])
        state = made
        for fact in data["earlier"]:
            before = cls(
                made.messages[: fact["messages"]],
                verbatim=made.verbatim, switches=made.switches,
            )  # fmt: skip
            before.tokens = state.tokens[: fact["shared"]] + fact["tokens"]
            before.boundaries = list(fact["boundaries"])
            state.previous = before
            state = before
        return made


def template_difference(
    models: Iterable[LanguageModel], switches: Mapping[str, Any]
) -> tuple[LanguageModel, LanguageModel, int] | None:
    """Two models whose chat templates render a conversation as other tokens, and from which on.

    What lies behind that position in one's line is of no use to the other: it is read anew.
    """
    first, *others = models
    try:
        expected = encode(first, SAMPLE, **switches)
        found = [(other, encode(other, SAMPLE, **switches)) for other in others]
    except ValueError:
        return None  # told when there is something to render
    for other, tokens in found:
        if tokens != expected:
            return first, other, common_prefix(expected, tokens)
    return None


def written_stop(model: LanguageModel, last: int, text: str) -> str:
    """What of ``text``, which a template puts after an answer, is that answer's last token.

    Who wrote it may stop at another token than ``model`` does, as a chat model beside its base
    model: every added token counts.
    """
    tokenizer = model.tokenizer
    stops = {*tokenizer.eos_token_ids, *tokenizer.get_added_vocab().values()}
    stop = tokenizer.decode([last])
    return stop if last in stops and text.startswith(stop) else ""


def _encode(model: LanguageModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))
