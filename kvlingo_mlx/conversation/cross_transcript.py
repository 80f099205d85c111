"""A conversation's messages as models of several tokenizers hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvlingo_mlx.conversation.reading import Reading, moved
from kvlingo_mlx.conversation.transcript import (
    MARK,
    Transcript,
    by_difference,
    from_difference,
    whole_tokens,
    written_stop,
)
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message, render_text
from kvlingo_mlx.tokenization.renderings import content_parts, content_spans, written

NEXT = "\u2039next\u203a"  # stands for the user's next words, which are not known yet
UNKNOWN = Reading()


class CrossTranscript(Transcript):
    """Messages, and for each tokenizer the tokens in which its models read and wrote them.

    Attributes:
        readings: By tokenizer fingerprint, the conversation as its models last held it. Messages
            since then, which a model of another tokenizer answered, are missing.
        tokens: The tokens of the tokenizer that wrote last.
        boundaries: The boundaries in these tokens.
    """

    def __init__(
        self,
        messages: Sequence[Message] = (),
        *,
        verbatim: bool = False,
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(messages, verbatim=verbatim, switches=switches)
        self.readings: dict[str, Reading] = {}
        self.latest: str | None = None

    def copy(self) -> Self:
        """An independent copy."""
        made = super().copy()
        made.readings, made.latest = dict(self.readings), self.latest
        return made

    def prompt(self, model: LanguageModel, new: Sequence[Message]) -> list[int]:
        """The tokens up to the header of the answer to ``new``, by ``model``'s template.

        Raises:
            ValueError: The model has no template, or it does not take these messages.
        """
        return self.reading(model, new).tokens

    def reading(self, model: LanguageModel, new: Sequence[Message]) -> Reading:
        """The same prompt, with the places of its tokens and of the messages' contents.

        Raises:
            ValueError: As for :meth:`prompt`.
        """
        before = self.readings.get(model.tokenizer_fingerprint, UNKNOWN)
        messages = [*self.messages, *new]
        if self.verbatim and before.tokens:
            start = before.end(len(before.tokens))
            rest, found = content_spans(
                lambda m: self._after(model, before.tokens[-1], [*map(dict, m)]),
                messages[before.messages :],
            )
            contents = (*before.asked, *moved(found, start))
            kept = len(before.tokens)
            return before.prompt(model.tokenizer, before.text + rest, contents, len(messages), kept)
        text, contents = content_spans(
            lambda m: render_text(model, [*map(dict, m)], **self.switches), messages
        )
        agreeing = (b for b in before.boundaries if text.startswith(before.text[: before.end(b)]))
        return before.prompt(
            model.tokenizer, text, contents, len(messages), max(agreeing, default=0)
        )

    def _after(self, model: LanguageModel, last: int, messages: Sequence[Message]) -> str:
        """The text that the template puts after an answer whose last token is ``last``."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        text = render_text(model, [*before, *messages], **self.switches).split(MARK, 1)[1]
        return text[len(written_stop(model, last, text)) :]

    def ahead(self, model: LanguageModel) -> Reading | None:
        """The part that will be read whatever the user says next; None if it is unknown."""
        try:
            found = self.reading(model, [{"role": "user", "content": NEXT}])
        except ValueError:
            return None
        place = found.contents[-1]
        return None if place is None else found.cut(place[0])

    def gap(self, model: LanguageModel, messages: Sequence[Message], header: str) -> str:
        """The white space that the template puts between an answer's header and the answer.

        ``header`` is the end of the text up to there.
        """
        try:
            answered = [*self.messages, *messages, {"role": "assistant", "content": MARK}]
            text = render_text(model, answered, **self.switches).split(MARK, 1)[0]
        except ValueError:
            return ""
        found = text[len(text.rstrip(" ")) :]
        return found if text.endswith(header + found) and not header.endswith(" ") else ""

    def book(
        self, messages: Sequence[Message], readings: Mapping[str, Reading], latest: str
    ) -> None:
        """Book messages and an answer, with their ``readings`` by tokenizer.

        The readings hold the whole answer, which a model of tokenizer ``latest`` finished.
        """
        self.previous = self.copy()
        self.messages = [*self.messages, *messages]
        self.held = count = len(self.messages)
        self.readings |= {key: reading.booked(count) for key, reading in readings.items()}
        self._believe(latest)

    def remember(self, model: LanguageModel) -> None:
        """Do nothing: an answer that comes after a change is cut into tokens anew."""

    def _cut_tokens(self, models: Sequence[LanguageModel], content: str, left: str) -> None:
        """Shorten the last answer to ``left`` in every reading."""
        tokenizers = {model.tokenizer_fingerprint: model.tokenizer for model in models}
        for key, reading in self.readings.items():
            if reading.messages == len(self.messages):
                answer = reading.tokens[reading.boundaries[-2] :]
                ids, _ = whole_tokens(tokenizers[key], answer, content, len(left))
                cut = reading.shortened(tokenizers[key], ids, content, left)
                self.readings[key] = cut
        self._believe(self.latest)

    def _believe(self, latest: str | None) -> None:
        self.latest = latest
        found = self.readings.get(latest or "", UNKNOWN)
        self.tokens, self.boundaries = list(found.tokens), list(found.boundaries)

    # ---- as JSON --------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The whole transcript with its undo history; each reading as a difference to the last."""
        last: dict[str, tuple[int, Reading]] = {}
        listed: list[dict[str, Any]] = []
        states = []
        for state in (self, *self._history()):
            assert isinstance(state, CrossTranscript)
            numbers = {}
            for key, reading in state.readings.items():
                number, before = last.get(key, (-1, UNKNOWN))
                if reading is not before:
                    listed.append(reading.to_json(before) | {"before": number})
                    number = len(listed) - 1
                    last[key] = number, reading
                numbers[key] = number
            states.append(
                {
                    **by_difference(state.messages, self.messages),
                    "latest": state.latest,
                    "readings": numbers,
                }
            )
        return {
            "messages": self.messages,
            "verbatim": self.verbatim,
            "switches": self.switches,
            "readings": listed,
            "states": states,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The transcript that :meth:`to_json` described.

        Raises:
            ValueError, KeyError, TypeError, IndexError: The data are not a transcript.
        """
        readings: list[Reading] = []
        for each in data["readings"]:
            before = UNKNOWN if each["before"] < 0 else readings[each["before"]]
            readings.append(Reading.from_json(each, before))
        newest: Self | None = None
        later: Self | None = None
        for state in data["states"]:
            made = cls(
                from_difference(state, data["messages"]),
                verbatim=data["verbatim"],
                switches=data["switches"],
            )
            made.readings = {key: readings[n] for key, n in state["readings"].items()}
            made.held = max((reading.messages for reading in made.readings.values()), default=0)
            made._believe(state["latest"])
            if later is None:
                newest = made
            else:
                later.previous = made
            later = made
        if newest is None:
            raise ValueError("the transcript has no state")
        return newest

    @classmethod
    def of_one(cls, one: Transcript, model: LanguageModel) -> Self:
        """A transcript of several tokenizers from one of ``model``'s tokenizer.

        Its tokens are kept. The places of contents in them were not saved, so models of other
        tokenizers read all of it themselves.
        """
        made = cls(one.messages, verbatim=one.verbatim, switches=one.switches)
        if one.tokens:
            text, ends = written(model.tokenizer, one.tokens)
            held = one.messages[: one.held]
            parts = [part for m in held for part in content_parts(m.get("content"))]
            reading = Reading(
                text,
                list(one.tokens),
                ends,
                (None,) * len(parts),
                one.held,
                list(one.boundaries),
                own=len(one.tokens),
            )
            made.readings = {model.tokenizer_fingerprint: reading}
            made._believe(model.tokenizer_fingerprint)
        made.held = one.held
        if one.previous is not None:
            made.previous = cls.of_one(one.previous, model)
        return made
