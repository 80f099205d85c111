"""A conversation's messages as models of several tokenizers hold them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvlingo_mlx.engine.reading import Reading, moved
from kvlingo_mlx.engine.transcript import (
    MARK,
    Transcript,
    by_difference,
    from_difference,
    whole_tokens,
)
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message, render_text
from kvlingo_mlx.tokenization.renderings import content_parts, content_spans, written

NEXT = "\u2039next\u203a"  # stands for the user's next words, which are not known yet
UNKNOWN = Reading()


@dataclass(eq=False, repr=False)
class CrossTranscript(Transcript):
    """Messages, and for each tokenizer the tokens in which its models read and wrote them.

    Attributes:
        readings: By tokenizer fingerprint, the conversation as its models last held it. Messages
            since then, which a model of another tokenizer answered, are missing.
        latest: The tokenizer that wrote last; ``tokens`` and ``boundaries`` are of its reading.
    """

    readings: dict[str, Reading] = field(default_factory=dict)
    latest: str | None = None

    def copy(self) -> Self:
        return replace(super().copy(), readings=dict(self.readings))

    def prompt(self, model: LanguageModel, new: Sequence[Message]) -> list[int]:
        return self.reading(model, new).tokens

    def reading(self, model: LanguageModel, new: Sequence[Message]) -> Reading:
        """What :meth:`prompt` gives, with the places of its tokens and of the messages' contents.

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
        for state in self._history():
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
        states: list[Self] = []
        for state in data["states"]:
            made = cls(
                from_difference(state, data["messages"]),
                data["verbatim"],
                dict(data["switches"]),
                readings={key: readings[n] for key, n in state["readings"].items()},
            )
            made.held = max((reading.messages for reading in made.readings.values()), default=0)
            made._believe(state["latest"])
            states.append(made)
        if not states:
            raise ValueError("the transcript has no state")
        for later, earlier in itertools.pairwise(states):
            later.previous = earlier
        return states[0]

    @classmethod
    def of_one(cls, one: Transcript, model: LanguageModel) -> Self:
        """A transcript of several tokenizers from one of ``model``'s tokenizer.

        Its tokens are kept. The places of contents in them were not saved, so models of other
        tokenizers read all of it themselves.
        """
        made = cls(list(one.messages), one.verbatim, dict(one.switches), held=one.held)
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
        if one.previous is not None:
            made.previous = cls.of_one(one.previous, model)
        return made
