"""Naive switching: all that a model holds is translated at every switch, back and forth.

The paper compares it with alternated translation (appendix "Multi-turn cache translation"). What
a model reads or writes is captured beside its cache; a switch translates all of it, the parts that
were translated before included, and the translation is what the next switch translates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Message, encode, render_text
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.base import Translator

ANSWER = "\u2039answer\u203a"  # a text that no conversation holds, in place of an answer


class NaiveConversation:
    """Two models of one tokenizer that answer greedily, over one context.

    Args:
        models: The two models, by name.
        translators: From the first to the second, and back; both read keys at one capture point.
        enable_thinking: The chat templates' reasoning switch.
        verbatim: Go on from the tokens as written, even where a template changes earlier turns.

    Raises:
        ValueError: A layer has a window or a recurrence, of which no whole prefix is left.
        IncompatibleTranslatorError: The translators read keys at different points.
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        translators: Sequence[Translator],
        *,
        enable_thinking: bool,
        verbatim: bool,
    ) -> None:
        points = {translator.config.capture for translator in translators}
        if len(points) > 1:
            raise IncompatibleTranslatorError(
                f"naive switching: the translators read keys at {' and '.join(sorted(points))}; "
                "give translators of one capture point"
            )
        for model in models.values():
            if any(layer.reach is not None or layer.recurrence for layer in model.geometry.layers):
                raise ValueError(
                    f"naive switching: {model.name} has layers with windows or recurrences, which "
                    "keep too little of a translated prefix to translate it again"
                )
        self.models, self._capture = models, points.pop()
        self._translators = dict(zip(itertools.permutations(models, 2), translators, strict=True))
        self._enable_thinking, self._verbatim = enable_thinking, verbatim
        self._messages: list[Message] = []
        self.tokens: list[int] = []  # as last read and written
        self._holder, self._held = next(iter(models)), list[int]()  # whose cache holds which tokens
        self._cache = make_prompt_cache(models[self._holder].model)
        self._states: KVStates | None = None  # all that the holder's cache holds
        self.switches = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache, self._states = [], None

    def reply(self, name: str, new: Sequence[Message], *, max_tokens: int) -> str:
        """A model's answer to new messages; both join the conversation."""
        prompt = self._prompt(self.models[name], new)
        self.bring(name, prompt[:-1])
        tokenizer = self.models[name].tokenizer
        shown, answer = tokenizer.detokenizer, list[int]()
        shown.reset()
        for token in itertools.islice(self._decoded(prompt[-1]), max_tokens):
            answer.append(token)
            if token in tokenizer.eos_token_ids:
                break
            shown.add_token(token)
        shown.finalize()
        said = str(shown.text)
        self.tokens = [*prompt, *answer]
        self._messages += [*new, {"role": "assistant", "content": said}]
        return said

    def bring(self, name: str, tokens: Sequence[int]) -> None:
        """Let a model hold these tokens; a switch translates all that the other one holds."""
        shared = common_prefix(self._held, tokens)
        self._held = self._held[:shared]
        states = None if self._states is None else self._states.part(0, shared)
        if name != self._holder and shared:
            states = self._switch(name, states)
        elif name != self._holder:
            self._cache = make_prompt_cache(self.models[name].model)
        else:
            counting = (each for each in self._cache if not caches.is_recurrent(each))
            trim_prompt_cache(self._cache, next(counting).offset - shared)
        self._holder, self._states = name, states if shared else None
        model = self.models[name]
        for span in capture.prefill(model, tokens, cache=self._cache, begun=shared):
            self._append(span, tokens[span.start : span.end])

    def _switch(self, name: str, states: KVStates | None) -> KVStates:
        """Fill another model's cache from the holder's states; returns the translation."""
        assert states is not None
        model = self.models[name]
        translated = self._translators[self._holder, name](states)
        self._cache = caches.empty(model)
        with working():
            caches.append(self._cache, translated, model)
            made = translated.states(len(self._cache), model.cache_dtype)
            mx.eval([cache.state for cache in self._cache], made.arrays)
        self.switches += 1
        return made

    def _append(self, states: KVStates, tokens: Sequence[int]) -> None:
        """Keep what the holder wrote of some tokens, behind what it holds."""
        new = capture.move(states, self.models[self._holder], self._capture)
        if (old := self._states) is not None:
            sides = ((old.keys, new.keys), (old.values, new.values))
            keys, values = (
                tuple(mx.concatenate(list(pair), axis=1) for pair in zip(*side, strict=True))
                for side in sides
            )
            new = KVStates(keys, values, self._capture, 0)
        mx.eval(new.arrays)
        self._states = new
        self._held = [*self._held, *tokens]

    def _decoded(self, token: int) -> Iterator[int]:
        """The likeliest tokens after ``token``, one after another."""
        model = self.models[self._holder]
        while True:
            with working():
                ear = capture.Ear(model)
                with ear.listening():
                    logits = model.model(mx.array([[token]]), cache=self._cache)
                    states = ear.take(len(self._held))
                found = int(mx.argmax(logits[0, -1]))
                self._append(states, [token])
            yield found
            token = found

    def _prompt(self, model: LanguageModel, new: Sequence[Message]) -> list[int]:
        """The tokens up to the header of the answer to the new messages."""
        switch = {"enable_thinking": self._enable_thinking}
        if not (self._verbatim and self._messages):
            return encode(model, [*self._messages, *new], **switch)
        # What the template puts between an answer and its successor.
        sample = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}]
        between = render_text(model, [*sample, *new], **switch).split(ANSWER, 1)[1]
        stop = model.tokenizer.decode(self.tokens[-1:])
        if self.tokens[-1] in model.tokenizer.eos_token_ids:
            between = between.removeprefix(stop)
        return [*self.tokens, *model.tokenizer.encode(between, add_special_tokens=False)]
