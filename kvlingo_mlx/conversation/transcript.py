"""A conversation's messages as the tokens that a model must hold to answer the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.generation import encode, render_text
from kvlingo_mlx.language_model import LanguageModel

Message = dict[str, Any]
MARK = "\u2039answer\u203a"  # an answer that no conversation holds


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
    """

    def __init__(self, messages: Sequence[Message] = (), *, verbatim: bool = False) -> None:
        self.messages: list[Message] = list(messages)
        self.verbatim = verbatim
        self.tokens: list[int] = []
        self.boundaries: list[int] = []
        self._before: list[Transcript] = []

    def copy(self) -> Transcript:
        """One that goes its own way."""
        made = Transcript(self.messages, verbatim=self.verbatim)
        made.tokens, made.boundaries = list(self.tokens), list(self.boundaries)
        made._before = list(self._before)
        return made

    def undo(self) -> Transcript:
        """As it was before the last exchange.

        Raises:
            ValueError: There has been none.
        """
        if not self._before:
            raise ValueError("there is nothing to undo: nobody has answered yet")
        return self._before[-1].copy()

    def prompt(
        self, model: LanguageModel, new: Sequence[Message], enable_thinking: bool | None
    ) -> list[int]:
        """The tokens up to the header of the answer to ``new``, by ``model``'s template.

        Raises:
            ValueError: The model has no template, or it does not take these messages.
        """
        if self.verbatim and self.tokens:
            return self.tokens + self._continuation(model, new, enable_thinking)
        text = render_text(model, [*self.messages, *new], enable_thinking)
        for boundary in sorted(self.boundaries, reverse=True):
            written = model.tokenizer.decode(self.tokens[:boundary])
            if text.startswith(written):
                rest = text[len(written) :]
                return self.tokens[:boundary] + (_encode(model, rest) if rest else [])
        return encode(model, [*self.messages, *new], enable_thinking)

    def _continuation(
        self, model: LanguageModel, new: Sequence[Message], enable_thinking: bool | None
    ) -> list[int]:
        """What the template puts after an answer: its end, and the ``new`` messages."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        text = render_text(model, [*before, *new], enable_thinking).rsplit(MARK, 1)[1]
        stop = model.tokenizer.decode(self.tokens[-1:])
        if self.tokens[-1] in model.tokenizer.eos_token_ids and text.startswith(stop):
            text = text[len(stop) :]
        return _encode(model, text)

    def wrote(self, new: Sequence[Message], prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Book messages, the prompt that ended with their header, and the answer's tokens."""
        self._before.append(self.copy())
        self.messages = [*self.messages, *new]
        self.tokens = [*prompt, *answer]
        kept = {b for b in self.boundaries if b <= len(prompt)}
        self.boundaries = sorted({*kept, len(prompt), len(self.tokens)})


def _encode(model: LanguageModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))
