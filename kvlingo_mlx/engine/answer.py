"""The answer in progress, as the models of each tokenizer read it."""

from __future__ import annotations

from collections.abc import Sequence

from kvlingo_mlx.engine.calls import ToolCall
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.line import Steps
from kvlingo_mlx.engine.line_set import LineSet
from kvlingo_mlx.engine.messages import answer_message
from kvlingo_mlx.engine.offers import Known
from kvlingo_mlx.engine.reading import Reading, Segment
from kvlingo_mlx.engine.transcript import Transcript, Written
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message

HEADER = 8  # characters at the end of a prompt by which an answer's header is recognised
LAST = 24  # tokens at the end of a prompt that hold the mark with which a header ends


class AnswerInProgress:
    """An answer in progress, which every model reads in its own tokens.

    A model of one tokenizer goes on from the text that models of another have written.

    Args:
        exchange: The models' lines.
        transcript: The conversation before the answer.
        messages: The messages that it answers.
        names: The models that read or write; the first one's prompt is the answer's.

    Attributes:
        messages: The messages that it answers; none where it goes on with a plain text.
        prompt: The tokens up to the end of the answer's header.
        opened: Whether it opens a reasoning trace.
        latest: The tokenizer that wrote last, or is to write first.

    Raises:
        ValueError: A model's prompt cannot be rendered, or is beyond its context.
    """

    def __init__(
        self,
        exchange: LineSet,
        transcript: Transcript,
        messages: Sequence[Message],
        names: Sequence[str],
    ) -> None:
        self.messages = list(messages)
        self._exchange, self._transcript = exchange, transcript
        self._readings: dict[str, Reading] = {}
        self._marks: dict[str, int | None] = {}
        for name in names:
            model, key = exchange.line(name).model, exchange.key(name)
            if key not in self._readings:
                found = transcript.reading(model, messages)
                self._readings[key] = found
                self._marks[key] = transcript.header(model, messages, found)
            model.check_tokens(self._readings[key].tokens)
        self._begin(exchange.line(names[0]).model)

    def _begin(self, model: LanguageModel) -> None:
        self.latest, self._tokenizer = model.tokenizer_fingerprint, model.tokenizer
        self._said, self._parts = "", 0
        self.prompt = self._readings[self.latest].tokens
        mark, begun = self.mark(), self._transcript.begun  # which has marks of its own
        header = "" if mark is None else self._tokenizer.decode(self.prompt[mark:])
        self._open(begun or header)

    def _open(self, header: str) -> None:
        """Find out whether the prompt opens a reasoning trace.

        Only the template can, in the answer's header: users, files and tools bring marks, too.
        """
        start, end = self._tokenizer.think_start, self._tokenizer.think_end
        if not header:  # it is unknown
            header = self._tokenizer.decode(self.prompt[-LAST:]).rstrip()
            header = header[-len(start or "") :]
        self.opened = bool(start) and header.rfind(start) > header.rfind(end)

    @classmethod
    def to_text(
        cls, exchange: LineSet, name: str, tokens: list[int], header: str | None = None
    ) -> AnswerInProgress:
        """What goes on with a plain text, or behind the ``header`` of an answer; not to be booked.

        A plain text may have been rendered by a template, so its last mark counts.
        """
        model = exchange.line(name).model
        made = cls.__new__(cls)
        made.messages, made._exchange, made._transcript = [], exchange, Transcript()
        reading = Reading(model.tokenizer, (Segment("", tokens),))
        made._readings = {model.tokenizer_fingerprint: reading}
        made._marks = {model.tokenizer_fingerprint: None}
        made._begin(model)
        made._open(model.tokenizer.decode(tokens) if header is None else header)
        return made

    def reading(self, name: str) -> Reading:
        """The prompt and the answer so far, as a model reads them."""
        key = self._exchange.key(name)
        reading = self._readings[key]
        if reading.said != self._said:
            gap = ""
            if reading.answer is None:
                model = self._exchange.line(name).model
                gap = self._transcript.gap(model, self.messages, reading.text[-HEADER:])
            reading = self._readings[key] = reading.told(self._said, gap)
        return reading

    def known(self, name: str) -> Known | None:
        """How the models of all tokenizers have read the conversation, if there are several."""
        if not self._transcript.several:
            return None
        before = self._transcript.readings
        others = {
            key: [r for r in (self._readings.get(key), before.get(key)) if r is not None]
            for key in {*self._readings, *before}
        }
        return Known(self.reading(name), others)

    def mark(self, name: str | None = None) -> int | None:
        """The number of a model's prompt tokens before the answer's header; None if unknown.

        Without a name, those of the tokenizer that wrote last.
        """
        return self._marks[self.latest if name is None else self._exchange.key(name)]

    def add(self, name: str, ids: list[int]) -> None:
        """Add tokens that a model has written."""
        if not ids:
            return
        key, tokenizer = self._exchange.key(name), self._exchange.line(name).model.tokenizer
        self._readings[key] = self.reading(name).wrote(ids, tokenizer.eos_token_ids)
        self._said, self.latest, self._tokenizer = self._readings[key].said, key, tokenizer
        self._parts += 1

    def text(self, streamed: str, *, cut: bool) -> str:
        """The answer as text; ``streamed`` is what was given out of it.

        A character's bytes may come from two models, or be incomplete when an answer is cut short.
        In these cases the answer is decoded as a whole.
        """
        return self._said if cut or self._parts > 1 else streamed

    def book(self, text: str, calls: Sequence[ToolCall]) -> None:
        """Add the messages and the answer to the transcript.

        ``calls`` are those in ``text`` as they were given out.
        """
        names = {self._exchange.key(name): name for name in self._exchange.lines}
        readings = {key: self.reading(names[key]) for key in self._readings}
        begun = self._transcript.begun
        opened = self.opened and not begun  # what opens a trace is then part of the answer
        message = answer_message(
            self._tokenizer, begun + text, opened=opened, calls=calls,
            tools=self._transcript.switches.get("tools"),
        )  # fmt: skip
        written = Written(message, begun + text, opened, begun)
        self._transcript.book(self.messages, readings, self.latest, written)

    def follow(self, *, eager: bool) -> Steps:
        """Bring a conversation's other lines up to date with the answer, booked if it was."""
        transcript, exchange = self._transcript, self._exchange
        assert isinstance(exchange, Exchange)
        done = transcript.readings.get(self.latest, self._readings[self.latest])
        if eager:
            yield from exchange.follow(self.latest, done, self.mark())
        exchange.forget()
