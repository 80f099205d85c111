"""One answer on its way, perhaps by several models one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate

from kvlingo_mlx.conversation.exchange import Exchange, Switch
from kvlingo_mlx.conversation.line import Line
from kvlingo_mlx.conversation.transcript import Transcript
from kvlingo_mlx.generation import GenerationResponse, check_numbers, timed, with_prefix
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.prompts import Message
from kvlingo_mlx.threads import stepping, wired, working
from kvlingo_mlx.validation import room_for

THOUGHT = "</think>"  # what ends a reasoning trace where a tokenizer has no mark of its own


def thought_end(model: LanguageModel) -> str:
    """What ends a model's reasoning trace, in its text."""
    return getattr(model.tokenizer, "think_end", None) or THOUGHT


class Turn:
    """An answer on its way.

    Attributes:
        messages: What it answers.
        prompt: Tokens up to the end of its header.
        mark: How many of them come before the header, if that is known.
        answer: Its tokens so far.
        text: The same as text.
        ended: Whether a stop token or the limit has come.
    """

    def __init__(
        self, exchange: Exchange, messages: Sequence[Message], prompt: Sequence[int],
        mark: int | None, max_tokens: int, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.messages, self.prompt, self.mark = list(messages), list(prompt), mark
        self.answer: list[int] = []
        self.text, self.ended, self._parts = "", False, 0
        self._exchange, self._options, self._most = exchange, options, max_tokens
        self._started, self._ttft = time.perf_counter(), 0.0

    def room(self, name: str) -> int:
        """How many tokens a model can still add: its context's, no more than the limit's."""
        left = -1 if self._most == -1 else self._most - len(self.answer)
        model = self._exchange.line(name).model
        return room_for(model, self.length(name), left)

    def length(self, name: str) -> int:
        """Tokens of the prompt and of the answer so far, in those of a model."""
        return len(self.prompt) + len(self.answer)

    def read(self, name: str) -> None:
        """Let a model's line hold the whole prompt but for its last token."""
        self._exchange.bring(name, self.prompt[:-1], self.mark)

    def _begin(self, name: str) -> tuple[list[int], Switch]:
        """All tokens so far, in those of a model whose line now holds all but the last of them."""
        tokens = [*self.prompt, *self.answer]
        return tokens, self._exchange.bring(name, tokens[:-1], self.mark)

    def write(
        self, name: str, most: int | None = None, until: str | None = None, *, last: bool = True
    ) -> Iterator[GenerationResponse]:
        """Let a model go on with it: up to ``most`` tokens, or until its text holds a mark.

        ``last``: nobody goes on after it.
        """
        self._parts += 1
        tokens, switch = self._begin(name)
        line = self._exchange.line(name)
        limit = self.room(name) if most is None else min(most, self.room(name))
        text, begun = "", len(self.answer)
        for response in self._decoded(line, tokens, limit):
            if begun and not text:
                before = [tokens[-1], *self.answer[begun:]]
                response = _joined(response, line.model.tokenizer, before)
            text += response.text
            booked = self._booked(response, switch.seconds)
            done = until is not None and until in text
            if not last and not self.ended:
                booked = replace(booked, finish_reason=None)
            yield booked
            if len(self.answer) == begun + 1:
                self._exchange.put_others_away(name)
            if done:
                return

    def said(self, name: str, *, cut: bool) -> str:
        """The answer as text.

        A character's bytes may be of two models, or wait for more when an answer is cut short;
        then it is decoded as a whole.
        """
        if self._parts < 2 and not cut:
            return self.text
        tokenizer = self._exchange.line(name).model.tokenizer
        stopped = self.answer and self.answer[-1] in tokenizer.eos_token_ids
        return tokenizer.decode(self.answer[:-1] if stopped else self.answer)

    def book(self, transcript: Transcript, text: str) -> None:
        """Let what was asked and answered, as ``text``, join the conversation."""
        said = {"role": "assistant", "content": text}
        transcript.wrote([*self.messages, said], self.prompt, self.answer)

    def follow(self, *, eager: bool) -> None:
        """Let the other lines have what was said, once it is booked."""
        if eager:
            self._exchange.follow(self.prompt + self.answer, self.mark)

    def _decoded(self, line: Line, tokens: list[int], most: int) -> Iterator[MLXResponse]:
        """What mlx-lm decodes from a line that holds all of ``tokens`` but the last one.

        Its loop has run every token that it gave out, a stop token included.
        """
        with line.decoding(tokens[-1]) as (run, listening), wired(line.model.model):
            responses = mlx_stream_generate(
                line.model.model, line.model.tokenizer, tokens[-1:], max_tokens=most,
                prompt_cache=line.cache, sampler=self._options["sampler"],
                logits_processors=with_prefix(self._options["logits_processors"], tokens[:-1]),
            )  # fmt: skip
            with stepping(responses) as step:
                while True:
                    with working(), listening():
                        response = step()
                    if response is None:
                        return
                    if len(run) == 1:
                        check_numbers(response, line.model, line.model, line.cache)
                    run.append(int(response.token))
                    yield response

    def _booked(self, response: MLXResponse, switch_s: float) -> GenerationResponse:
        """Book a token; returns it with this turn's times and count."""
        if not self.answer:
            self._ttft = time.perf_counter() - self._started
        self.answer.append(int(response.token))
        self.text += response.text
        self.ended = response.finish_reason == "stop" or len(self.answer) == self._most
        booked = timed(response, len(self.prompt), self._ttft, {"translate": switch_s})
        return replace(booked, generation_tokens=len(self.answer))


def _joined(response: MLXResponse, tokenizer: Any, before: Sequence[int]) -> MLXResponse:
    """A response whose text goes on from the tokens ``before`` it, the first of them another's.

    mlx-lm takes the first spaces off whatever it decodes, as if nothing came before.
    """
    told = tokenizer.decode([*before, int(response.token)])
    rest, word = told.removeprefix(tokenizer.decode(before[:1])), response.text.lstrip(" ")
    bare = rest.lstrip(" ")
    if not response.text or not bare.startswith(word):
        return response
    return replace(response, text=rest[: len(rest) - len(bare)] + word)
