"""The ways to a first token, phase by phase, as work that can be timed.

A switch starts from a source that has served the conversation. Its states exist already, so only
translation and one step of the target remain. The accelerator also counts the source's prefill
(appendix "Dense-to-MoE cache translation", paragraph "Timing").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.paper.timing import healing
from benchmarks.paper.timing.phases import HEAL_INTERLEAVED, HEAL_LAYERS, HYBRID
from kvlingo_mlx import caches
from kvlingo_mlx.engine.fill import bring, take_over
from kvlingo_mlx.engine.hybrid import Native, native_part
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.families.base import text_model
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.hidden import decoder_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.timing.switching import again, first_token
from kvlingo_mlx.translators.base import Translator

FEW = 8  # the least tokens over which a decoding speed is measured


class Paths:
    """The work that is timed, for one pair and one prompt; each phase is one method.

    Args:
        source: The model that has read the conversation.
        target: The model that is to answer.
        translators: By form ("float32", "8 bits"); the first one serves every whole path.
        tokens: The prompt.
        step_size: Tokens per prefill chunk.
        decoded: The tokens over which decoding speeds are measured.

    Attributes:
        meanwhile: What was decoded while the target read, by phase, run by run.
    """

    def __init__(
        self,
        source: LanguageModel,
        target: LanguageModel,
        translators: Mapping[str, Translator],
        tokens: Sequence[int],
        step_size: int = 2048,
        decoded: int = FEW,
    ) -> None:
        self.source, self.target, self.translators = source, target, translators
        self.tokens, self.step_size, self.decoded = list(tokens), step_size, decoded
        self.first = next(iter(translators.values()))
        self._own, self._kept = make_prompt_cache(source.model), self.first.config.state_maps
        self._recorded = self._read()
        self._cache = self.translate()
        self._eager: list[Any] | None = None
        self._native: list[Any] | None = None
        self.meanwhile: dict[str, list[healing.Meanwhile]] = {}

    def _read(self) -> list[KVStates]:
        """Let the source read the prompt into its own cache; return its states by chunk."""
        with mx.stream(generation_stream):
            ends = self.tokens[:-1], self.step_size, self._own
            return list(capture.prefill(self.source, *ends, kept=self._kept))

    def phase(self, name: str) -> Callable[[], object]:
        """The function of a phase.

        A method's name, ``translate FORM``, or ``hybrid J`` or ``heal_layers J`` (layers).
        """
        if name.startswith("translate "):
            return lambda: self.translate(name.removeprefix("translate "))
        if name.startswith(HYBRID):
            return partial(self.hybrid, int(name.removeprefix(HYBRID)))
        if name.startswith(HEAL_LAYERS):
            return partial(self.heal_layers, int(name.removeprefix(HEAL_LAYERS)))
        return getattr(self, name)

    def decode(self, name: str, count: int) -> None:
        """Run a phase that decodes, over ``count`` tokens."""
        whole, self.decoded = self.decoded, count
        try:
            self.phase(name)()
        finally:
            self.decoded = whole

    def source_prefill(self) -> None:
        """The source reads the prompt and records its keys and values."""
        read = self.tokens[:-1]
        for _ in capture.prefill(self.source, read, self.step_size, kept=self._kept):
            pass

    def target_step(self) -> object:
        """One step of the target over the last prompt token."""
        return first_token(self.target, self.tokens[-1:], again(self._cache))

    def source_step(self) -> None:
        """One step of the source from its cache: the first token, if the source may write it."""
        first_token(self.source, self.tokens[-1:], again(self._own))

    def native(self) -> object:
        """The target reads the prompt itself, as mlx-lm does: all but one token, then that one."""
        return first_token(self.target, self.tokens, None, self.step_size)

    def native_single(self) -> int:
        """The target reads the whole prompt in one pass; returns the token that it predicts."""
        cache = make_prompt_cache(self.target.model)
        with mx.stream(generation_stream):
            hidden = decoder_of(self.target)(mx.array(self.tokens)[None], cache=cache)
            token = head(self.target)(hidden[:, -1:]).argmax(axis=-1)
            mx.eval(token, caches.arrays(cache))
        return int(token[0, 0])

    def translate(self, form: str | None = None) -> list[Any]:
        """A fresh cache of the target from the recorded states, evaluated."""
        translator = self.first if form is None else self.translators[form]
        length = len(self.tokens) - 1
        with mx.stream(generation_stream):
            cache = caches.empty(self.target)
            caches.reserve(cache, self.target, length)
            for states in self._recorded:
                moved = capture.move(states, self.source, translator.config.capture)
                firsts = self.target.geometry.first_kept(length)
                caches.append(cache, translator(moved, firsts), self.target)
            mx.eval(caches.arrays(cache))
        return cache

    def switch(self) -> object:
        """Translation and the target's step: the cost of a switch."""
        return first_token(self.target, self.tokens[-1:], self.translate())

    def eager_switch(self) -> object:
        """A switch that was translated while the source wrote; only the target's step remains."""
        if self._eager is None:
            self._eager = self._grown()
        return first_token(self.target, self.tokens[-1:], again(self._eager))

    def _grown(self) -> list[Any]:
        """The target's cache of the recorded states, grown span by span as in a conversation."""
        with mx.stream(generation_stream):
            cache = make_prompt_cache(self.target.model)
            for states in self._recorded:
                moved = capture.move(states, self.source, self.first.config.capture)
                caches.append(cache, self.first(moved), self.target)
                mx.eval(caches.arrays(cache))
        return cache

    def hybrid(self, layers: int) -> object:
        """A switch at which the target reads its first ``layers`` cache layers itself."""
        with mx.stream(generation_stream):
            cache = take_over(self._plan(Native(layers)), self._recorded).cache
        return first_token(self.target, self.tokens[-1:], cache)

    def _plan(self, native: Native) -> Plan:
        ends = self.source, self.target
        return Plan(*ends, self.tokens, self.first, native, step_size=self.step_size)

    def heal_idle(self) -> None:
        """A switch; then the target reads the prompt behind it, and decodes nothing meanwhile."""
        healing.read_on(take_over(self._plan(Native()), self._recorded))

    def heal_interleaved(self) -> None:
        """A switch; then the target reads the prompt behind it between the tokens of an answer."""
        self._answer(HEAL_INTERLEAVED, 0)

    def heal_layers(self, layers: int) -> None:
        """A switch with some native layers; then the others are read as in an answer."""
        self._answer(f"{HEAL_LAYERS}{layers}", layers)

    def _answer(self, phase: str, layers: int) -> None:
        found = healing.answered(self._plan(Native(layers)), self._recorded)
        self.meanwhile.setdefault(phase, []).append(found)

    def accelerator(self) -> None:
        """Source prefill, translation and the target's step."""
        plan = self._plan(native_part(self.first.config))
        first_token(self.target, self.tokens[-1:], bring(plan).cache)

    def decode_source(self) -> None:
        """The source decodes some tokens from its own cache."""
        first_token(self.source, self.tokens[-1:], again(self._own), count=self.decoded)

    def decode_translated(self) -> None:
        """The target decodes some tokens from the translated cache."""
        first_token(self.target, self.tokens[-1:], again(self._cache), count=self.decoded)

    def decode_native(self) -> None:
        """The target decodes some tokens from a cache that it filled itself."""
        if self._native is None:
            self._native = make_prompt_cache(self.target.model)
            first_token(self.target, self.tokens, self._native, self.step_size)
        first_token(self.target, self.tokens[-1:], again(self._native), count=self.decoded)


def head(model: LanguageModel) -> Callable[[mx.array], mx.array]:
    """A text model's output head, tied or not."""
    text = text_model(model.model)
    return text.lm_head if "lm_head" in text else decoder_of(model).embed_tokens.as_linear
