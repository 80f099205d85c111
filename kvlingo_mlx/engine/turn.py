"""One answer in progress, perhaps by several models one after the other."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate

from kvlingo_mlx import caches
from kvlingo_mlx.caches.validation import room_for
from kvlingo_mlx.engine.answer import AnswerInProgress
from kvlingo_mlx.engine.answers import AnswerReader
from kvlingo_mlx.engine.batches import Batch, Row
from kvlingo_mlx.engine.clock import PHASES
from kvlingo_mlx.engine.line import Line, Listening, Steps
from kvlingo_mlx.engine.line_set import LineSet, Switch
from kvlingo_mlx.engine.responses import GenerationResponse, Heard, check_numbers, with_prefix
from kvlingo_mlx.engine.sampling import Choice
from kvlingo_mlx.engine.use import Use
from kvlingo_mlx.threads import finished, stepping, wired, working
from kvlingo_mlx.translators.base import Translator


@dataclass(frozen=True)
class Decoding:
    """How an answer is decoded."""

    choice: Choice  # how tokens are chosen, and where the answer stops
    # The tools that the chat template has announced
    tools: Sequence[Mapping[str, Any]] | None = None
    # mlx-lm's ``kv_bits`` and the options that belong to it, if they are given
    quantised: Mapping[str, Any] = field(default_factory=dict)
    draft: Line | None = None  # a separate line for a draft model, or None
    num_draft_tokens: int = 2  # how many tokens the draft model drafts at a time
    batch: Batch | None = None  # where the model decodes this answer beside others, or None
    seat: Callable[[Row | None], None] = lambda row: None  # told of its place there, and its end
    divides: bool = True  # whether the answer has parts; if not, all of it is content


@dataclass(frozen=True)
class Part:
    """A model's part of an answer: at most ``most`` tokens, or until its text holds a mark."""

    name: str
    most: int | None = None
    until: str | None = None


class Turn:
    """An answer that is being decoded.

    Attributes:
        progress: The answer as its models read it.
        answer: The answer's tokens so far.
        text: The answer's text so far.
        ended: Whether a stop token, a stop text or the limit has come.
    """

    def __init__(
        self,
        exchange: LineSet,
        progress: AnswerInProgress,
        max_tokens: int,
        decoding: Decoding,
        started: float | None = None,
    ) -> None:
        self.progress, self.answer = progress, list[int]()
        self.text, self.ended, self._stopped = "", False, False
        self._exchange, self._decoding, self._most = exchange, decoding, max_tokens
        self._reader: AnswerReader | None = None
        self._started, self._ttft = started or time.perf_counter(), 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def room(self, name: str) -> int:
        """The number of tokens that a model can still add within its context and the limit."""
        left = -1 if self._most == -1 else self._most - len(self.answer)
        draft = self._decoding.draft
        models = [line.model for line in (self._exchange.line(name), draft) if line is not None]
        return min(room_for(model, self.length(name), left) for model in models)

    def length(self, name: str) -> int:
        """The number of tokens of the prompt and the answer so far, by a model's tokenizer."""
        return len(self.progress.reading(name).tokens)

    def answer_by(
        self, parts: Sequence[Part], reader: str | None, finish: Callable[[str], Steps]
    ) -> Generator[GenerationResponse | None, None, str]:
        """Let models write the parts of the answer in turn; return the name of the last that wrote.

        A step without a token yields None. ``reader`` reads the prompt, but for its last token,
        before they begin.
        ``finish`` is taken with the answer's text, also if the caller closes the generator, but
        not after an error.
        """
        latest = parts[-1].name
        try:
            if reader not in (None, parts[0].name):
                _, switch = yield from self._begin(reader)
                self._seconds["prefill"] += switch.seconds
            for part in parts:
                if not self.ended and self.room(part.name) > 0:
                    latest = part.name
                    yield from self.write(part, last=part is parts[-1])
        except GeneratorExit:
            if not Use.over:
                finished(finish(self.progress.text(self.text, cut=True)))
            raise
        yield from finish(self.progress.text(self.text, cut=False))
        return latest

    def _begin(self, name: str) -> Generator[None, None, tuple[list[int], Switch]]:
        """All tokens so far; the model's line now holds all of them except the last."""
        tokens, known = self.progress.reading(name).tokens, self.progress.known(name)
        mark = self.progress.mark(name)
        switch = yield from self._exchange.bring(name, tokens[:-1], mark, known)
        return tokens, switch

    def write(self, part: Part, *, last: bool) -> Iterator[GenerationResponse | None]:
        """Let a model continue the answer; ``last`` says that no other model continues after it."""
        begun = len(self.answer)
        try:
            yield from self._write(part, begun, last=last)
        finally:  # after an error nothing is booked, and nobody looks at it
            self.progress.add(part.name, self.answer[begun:])

    def _write(self, part: Part, begun: int, *, last: bool) -> Iterator[GenerationResponse | None]:
        name, most = part.name, part.most
        tokens, switch = yield from self._begin(name)
        self._seconds["prefill"] += switch.prefill_s
        self._seconds["translate"] += switch.translate_s
        self._seconds["native"] += switch.read_s
        line = self._exchange.line(name)
        reader = self._read_by(line.model.tokenizer)
        limit = self.room(name) if most is None else min(most, self.room(name))
        used = self._exchange.used_by(name, switch.sources)
        line.counted = len(line)
        text = ""
        goes_on = begun or (self._exchange.keeps and not self.progress.messages)  # with a text
        for response in self._decoded(line, tokens, limit):
            if response is None:
                yield None
                continue
            if not text and goes_on:
                before = [tokens[-1], *self.answer[begun:]]
                response = _joined(response, line.model.tokenizer, before)
            text += response.text
            booked = self._booked(response, switch, used)
            done = part.until is not None and part.until in text
            if not last and not self.ended:
                booked = replace(booked, finish_reason=None)
            told = reader.take(booked)
            self._stopped = told.finish_reason == "stop" and response.finish_reason != "stop"
            self.ended |= self._stopped
            yield told
            if len(self.answer) == begun + 1:
                self._exchange.put_others_away(name)
            if done or self._stopped:
                return

    def _read_by(self, tokenizer: Any) -> AnswerReader:
        """The reader of the answer's text, which all of its writers share."""
        if self._reader is None:
            decoding, opened = self._decoding, self.progress.opened
            self._reader = AnswerReader(
                tokenizer, opened=opened, stop=decoding.choice.stop, tools=decoding.tools,
                divides=decoding.divides,
            )  # fmt: skip
            for each in decoding.choice.logits_processors or ():
                if hasattr(each, "opened"):  # it lets a reasoning trace pass
                    each.opened = opened
        self._reader.written_by(tokenizer)
        return self._reader

    def stopped_at(self, text: str) -> int | None:
        """The number of characters of ``text`` before the stop text that ended the answer."""
        return self._reader.stopped_at(text) if self._reader and self._stopped else None

    def book(self, text: str) -> None:
        """Add the messages and the answer ``text`` to the conversation."""
        self.progress.book(text, self._reader.calls if self._reader else ())

    def _decoded(self, line: Line, tokens: list[int], most: int) -> Iterator[MLXResponse | None]:
        """Decode from a line that holds all of ``tokens`` except the last one.

        mlx-lm's loop has run every token that it gave out, a stop token included.
        """
        if self._decoding.batch is not None:
            yield from self._decoded_together(self._decoding.batch, line, tokens, most)
            return
        aside = self._decoding.quantised or self._decoding.draft is not None
        if aside or not self._exchange.keeps:
            yield from self._decoded_aside(line, tokens, most)
            return
        with line.decoding(tokens[-1]) as (run, listening):
            yield from self._stepped(line, tokens, most, line.cache, run, listening)

    def _stepped(
        self,
        line: Line,
        tokens: list[int],
        most: int,
        cache: list[Any],
        run: list[int],
        listening: Listening = contextlib.nullcontext,
    ) -> Iterator[MLXResponse]:
        """Decode with mlx-lm's loop, each step in ``listening``; ``run`` gets the tokens."""
        responses = self._responses(line, tokens, most, cache)
        healing = self._exchange.healing(line)
        with (
            wired(line.model.model),
            contextlib.ExitStack() as behind,  # mlx-lm's loop begins a step ahead
            stepping(responses) as step,
        ):
            behind.callback(self._exchange.group.settle)
            while True:
                healing.began()
                with working(), listening():
                    response = step()
                if response is None:
                    return
                healing()
                if len(run) == 1:
                    self._check_numbers(response, line, cache)
                run.append(int(response.token))
                yield response

    def _decoded_together(
        self, batch: Batch, line: Line, tokens: list[int], most: int
    ) -> Iterator[MLXResponse | None]:
        """Decode beside other answers; None where the batch has to make a step first."""
        while batch.full:
            yield None
        with line.whole():
            row, kept = batch.join(line.cache, tokens, self._decoding.choice, most), True
            self._decoding.seat(row)
            try:
                while not row.over:
                    response = row.take()
                    if response is not None and not self.answer:
                        self._check_numbers(response, line, line.cache)
                    yield response
            except BaseException as error:
                kept = isinstance(error, GeneratorExit)
                raise
            finally:
                self._decoding.seat(None)
                left = batch.leave(row)
                if kept and left is not None:
                    line.adopt(row.run, *left)

    def _decoded_aside(
        self, line: Line, tokens: list[int], most: int
    ) -> Iterator[MLXResponse | None]:
        """Decode from caches that mlx-lm may quantise or remove drafts from.

        They are copies if the line goes on after the answer. Then it reads the answer itself, in
        one pass, so its caches end as usual.
        """
        drafting, keeps = self._decoding.draft, self._exchange.keeps
        with working():
            cache = [caches.shared(each) for each in line.cache] if keeps else line.cache
        if drafting is not None:
            with working():
                drafting.trim(min(drafting.common(tokens), len(tokens) - 1))
            yield from drafting.read(tokens[len(drafting) : -1], self._exchange.step_size)
            cache += drafting.cache  # in place: mlx-lm frees what it quantises only in that list
        run = [tokens[-1]]
        try:
            yield from self._stepped(line, tokens, most, cache, run)
        except GeneratorExit:
            if keeps:
                finished(line.read(run, self._exchange.step_size))
            raise
        if keeps:
            yield from line.read(run, self._exchange.step_size)

    def _responses(
        self, line: Line, tokens: list[int], most: int, cache: list[Any]
    ) -> Generator[MLXResponse, None, None]:
        """mlx-lm's responses from caches that hold all of ``tokens`` except the last one."""
        choice, options = self._decoding.choice, dict(self._decoding.quantised)
        if self._decoding.draft is not None:
            options["draft_model"] = self._decoding.draft.model.model
            options["num_draft_tokens"] = self._decoding.num_draft_tokens
        if not self.answer and choice.seed is not None:
            mx.random.seed(choice.seed)
        return mlx_stream_generate(
            line.model.model,
            line.model.tokenizer,
            tokens[-1:],
            max_tokens=most,
            prompt_cache=cache,
            sampler=choice.sampler,
            logits_processors=with_prefix(choice.logits_processors, tokens[:-1]),
            **options,
        )

    def _check_numbers(self, response: MLXResponse, line: Line, cache: Sequence[Any]) -> None:
        origin, own = self._exchange.origin(line.name), self._decoding.choice.logits_processors
        check_numbers(response, origin, line.model, cache, processed=bool(own))

    def _booked(
        self, response: MLXResponse, switch: Switch, used: Sequence[Translator]
    ) -> GenerationResponse:
        """Book a token; return its response with this turn's times and counts.

        ``used`` are the translators that the prompt went through.
        """
        if not self.answer:
            self._ttft = time.perf_counter() - self._started
        self.answer.append(int(response.token))
        self.text += response.text
        self.ended = response.finish_reason == "stop" or len(self.answer) == self._most
        values = {f.name: getattr(response, f.name) for f in fields(MLXResponse)}
        work = switch.translated + switch.read + 1
        values["prompt_tokens"], values["generation_tokens"] = switch.kept + work, len(self.answer)
        values["prompt_tps"] = (work - switch.ahead) / self._ttft
        values |= {f"{phase}_s": seconds for phase, seconds in self._seconds.items()}
        if used:
            values["translator"] = ", ".join(str(t.path or "made in this process") for t in used)
            values["translator_digest"] = ", ".join(t.digest for t in used)
        return GenerationResponse(
            **values, ttft_s=self._ttft, strategy=self._exchange.way, guarded=switch.guarded,
            cached_tokens=switch.kept, translated_tokens=switch.translated,
            ahead_tokens=switch.ahead, read_tokens=switch.read + 1,
            native_layers=switch.native_layers,
        )  # fmt: skip


def tokens_alone(
    steps: Generator[GenerationResponse | None, None, Any], heard: Heard
) -> Generator[GenerationResponse, None, None]:
    """The responses among an answer's steps; what the caller throws in goes on to them.

    At the answer's end ``heard`` warns if it gives the user nothing.
    """
    with contextlib.closing(steps):
        for response in steps:
            try:
                if response is not None:
                    heard.take(response)
                    yield response
            except (Exception, KeyboardInterrupt) as error:
                steps.throw(error)
    heard.tell()


def _joined(response: MLXResponse, tokenizer: Any, before: Sequence[int]) -> MLXResponse:
    """A response whose text continues the tokens ``before`` it.

    The first of these is another model's. mlx-lm drops the first spaces of whatever it decodes, as
    if nothing came before.
    """
    told = tokenizer.decode([*before, int(response.token)])
    rest, word = told.removeprefix(tokenizer.decode(before[:1])), response.text.lstrip(" ")
    bare = rest.lstrip(" ")
    if not response.text or not bare.startswith(word):
        return response
    return replace(response, text=rest[: len(rest) - len(bare)] + word)
