"""One answer on its way in a conversation of models with several tokenizers."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from kvlingo_mlx.engine.cross_exchange import CrossExchange
from kvlingo_mlx.engine.cross_transcript import CrossTranscript
from kvlingo_mlx.engine.exchange import Switch
from kvlingo_mlx.engine.line import Steps
from kvlingo_mlx.engine.offers import Known
from kvlingo_mlx.engine.reading import Reading
from kvlingo_mlx.engine.responses import GenerationResponse
from kvlingo_mlx.engine.transcript import Transcript
from kvlingo_mlx.engine.turn import Decoding, Part, Turn
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message

HEADER = 8  # characters at the end of a prompt by which an answer's header is recognised


class CrossTurn(Turn):
    """An answer in progress, which every model reads in its own tokens.

    A model of one tokenizer goes on from the text that models of another have written.

    Raises:
        ValueError: A model's prompt cannot be rendered, or is beyond its context.
    """

    def __init__(
        self,
        exchange: CrossExchange,
        transcript: CrossTranscript,
        messages: Sequence[Message],
        names: Sequence[str],
        max_tokens: int,
        decoding: Decoding,
    ) -> None:
        self._across, self._transcript = exchange, transcript
        self._readings: dict[str, Reading] = {}
        self._marks: dict[str, int | None] = {}
        for name in names:
            model, key = exchange.line(name).model, exchange.key(name)
            if key not in self._readings:
                found = transcript.reading(model, messages)
                self._readings[key] = found
                self._marks[key] = transcript.end_of_messages(model, messages, found.tokens)
            model.check_tokens(self._readings[key].tokens)
        self._latest = exchange.key(names[0])
        self._writer: str | None = None
        self._wrote: set[str] = set()
        self._said = ""
        prompt, mark = self._readings[self._latest].tokens, self._marks[self._latest]
        super().__init__(exchange, messages, prompt, mark, max_tokens, decoding)

    def length(self, name: str) -> int:
        return len(self._reading(name).tokens)

    def _begin(self, name: str) -> Generator[None, None, tuple[list[int], Switch]]:
        key = self._across.key(name)
        reading = self._readings[key] = self._reading(name)
        known = Known(
            reading,
            {
                other: [r for r in (self._readings.get(other), before.get(other)) if r is not None]
                for before in [self._transcript.readings]
                for other in {*self._readings, *before}
            },
        )
        tokens = reading.tokens
        switch = yield from self._across.bring(name, tokens[:-1], self._marks[key], known)
        return tokens, switch

    def write(self, part: Part, *, last: bool) -> Iterator[GenerationResponse | None]:
        begun = len(self.answer)
        try:
            yield from super().write(part, last=last)
        except GeneratorExit:
            self._add(part.name, self.answer[begun:])
            raise
        self._add(part.name, self.answer[begun:])

    def said(self, name: str, *, cut: bool) -> str:
        if len(self._wrote) > 1:
            return self._said
        # The model that was to finish may have another tokenizer and have written nothing yet.
        return super().said(self._writer or name, cut=cut)

    def book(self, transcript: Transcript, text: str) -> None:
        assert transcript is self._transcript
        said = {"role": "assistant", "content": text}
        names = {self._across.key(name): name for name in self._across.lines}
        readings = {key: self._reading(names[key]) for key in self._readings}
        self._transcript.book([*self.messages, said], readings, self._latest)

    def follow(self, transcript: Transcript, *, eager: bool) -> Steps:
        assert isinstance(transcript, CrossTranscript)
        wanted = {}
        for name in self._across.lines:
            if (key := self._across.key(name)) not in wanted:
                done = key == transcript.latest
                wanted[key] = (
                    transcript.readings[key] if done else transcript.ahead(self._model(name))
                )
        others = {key: [transcript.readings[key]] for key in transcript.readings}
        if eager:
            yield from self._across.follow_across(wanted, others, self._marks[self._latest])
        self._across.forget(wanted, others)

    # ---- the answer in other tokens -------------------------------------------------------

    def _model(self, name: str) -> LanguageModel:
        return self._across.line(name).model

    def _reading(self, name: str) -> Reading:
        """The prompt and the answer so far, as a model reads them."""
        model, reading = self._model(name), self._readings[self._across.key(name)]
        if reading.said == self._said:
            return reading
        gap = ""
        if reading.answer is None:
            gap = self._transcript.gap(model, self.messages, reading.text[-HEADER:])
        return reading.told(model.tokenizer, self._said, gap)

    def _add(self, name: str, ids: list[int]) -> None:
        """Book tokens that a model has added to the answer."""
        if not ids:
            return
        tokenizer, key = self._model(name).tokenizer, self._across.key(name)
        self._readings[key] = self._readings[key].wrote(tokenizer, ids, tokenizer.eos_token_ids)
        self._said, self._latest, self._writer = self._readings[key].said, key, name
        self._wrote.add(key)
