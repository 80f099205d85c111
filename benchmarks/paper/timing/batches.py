"""The ways to a first token for several prompts of one length at once.

mlx-lm's own decoding loop takes one prompt, so these phases call the models themselves: a prefill
in chunks and a step, each evaluated before the next. mlx-lm also queues the step after the first,
so a batch of one takes less time here than in :class:`Paths`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.paper.timing.paths import Paths
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.timing.switching import again
from kvlingo_mlx.translators.base import Translator

PHASES = ("source_prefill", "native", "translate", "target_step", "switch")


class Batch(Paths):
    """:class:`Paths` for ``batch`` prompts: rotations of ``tokens`` that begin at other places."""

    def __init__(
        self,
        source: LanguageModel,
        target: LanguageModel,
        translators: Mapping[str, Translator],
        tokens: Sequence[int],
        step_size: int,
        batch: int,
    ) -> None:
        rows = [[*tokens[i % len(tokens) :], *tokens[: i % len(tokens)]] for i in range(batch)]
        self.ids, self.batch = mx.array(rows), batch  # (B, T)
        super().__init__(source, target, translators, tokens, step_size)

    def _read(self) -> list[KVStates]:
        spans = []
        taps = capture.tap_keys_and_values(self.source, inputs=not self._kept)
        with taps as take, mx.stream(generation_stream):
            for start, own in self._prefill(self.source, self._own):
                kept = capture.recurrent_states(self.source, own) if self._kept else None
                spans.append(replace(take(start), kept=kept))
                mx.eval(spans[-1].arrays)
        return spans

    def _prefill(self, model: LanguageModel, cache: list[Any]) -> Any:
        """Let a model read all but the last token of each prompt; yield after each chunk."""
        prefix = self.ids[:, :-1]
        for start in range(0, prefix.shape[1], self.step_size):
            model.model(prefix[:, start : start + self.step_size], cache=cache)
            mx.eval([c.state for c in cache])
            yield start, cache

    def _step(self, cache: list[Any]) -> mx.array:
        with mx.stream(generation_stream):
            found = self.target.model(self.ids[:, -1:], cache=cache)[:, -1].argmax(axis=-1)
            mx.eval(found)
        return found

    def source_prefill(self) -> None:
        """The source reads the prompts without recording its states."""
        with mx.stream(generation_stream):
            for _ in self._prefill(self.source, make_prompt_cache(self.source.model)):
                pass

    def native(self) -> mx.array:
        """The target reads the prompts itself; returns a first token for each, (B,)."""
        cache = make_prompt_cache(self.target.model)
        with mx.stream(generation_stream):
            for _ in self._prefill(self.target, cache):
                pass
        return self._step(cache)

    def target_step(self) -> mx.array:
        """One step of the target over the last token of each prompt, (B,)."""
        return self._step(again(self._cache))

    def switch(self) -> mx.array:
        """Translation and the target's step, (B,)."""
        return self._step(self.translate())
