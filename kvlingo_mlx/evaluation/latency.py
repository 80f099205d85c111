"""Time to first token: the target's own prefill, a switch, and the prefill accelerator.

A switch starts from a source that has served the conversation: its states are at hand,
and only translation and one step of the target remain. The accelerator also counts the
source's prefill (paper, appendix "Dense-to-MoE", paragraph "Timing").
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generate_step

from kvlingo_mlx import caches, capture
from kvlingo_mlx.generation import hand_over, translate_span
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.measure import median, peak_bytes, seconds
from kvlingo_mlx.translators.base import Translator

MAX_WARM_UP = 5


@dataclass(frozen=True)
class Latency:
    """Raw seconds per phase and peak bytes per path, for one prompt length."""

    prompt_tokens: int
    samples: dict[str, list[float]]
    peak: dict[str, int]

    def median(self, phase: str) -> float:
        """Median seconds of a phase."""
        return median(self.samples[phase])


class Paths:
    """The work that is timed, for one pair and one prompt; each method is one path."""

    def __init__(
        self,
        source: LanguageModel,
        target: LanguageModel,
        translator: Translator,
        tokens: Sequence[int],
        step_size: int = 2048,
    ) -> None:
        self.source, self.target, self.translator = source, target, translator
        self.tokens, self.step_size = list(tokens), step_size
        self.translate = translation(source, target, translator, self.tokens, step_size)
        self._cache = self.translate()

    def source_prefill(self) -> None:
        """The source reads the prompt, keys and values recorded."""
        for _ in capture.prefill(self.source, self.tokens[:-1], self.step_size):
            pass

    def target_step(self) -> None:
        """One step of the target over the last prompt token."""
        # Of the cache the objects alone: the step writes where the last one did.
        first_token(self.target, self.tokens[-1:], [copy.copy(c) for c in self._cache])

    def native(self) -> None:
        """The target reads the prompt itself."""
        first_token(self.target, self.tokens, None, self.step_size)

    def switch(self) -> None:
        """Translation and the target's step: what a switch costs."""
        first_token(self.target, self.tokens[-1:], self.translate())

    def accelerator(self) -> None:
        """Source prefill, translation and the target's step."""
        cache = hand_over(
            self.source,
            self.target,
            self.tokens,
            translator=self.translator,
            prefill_step_size=self.step_size,
        )
        first_token(self.target, self.tokens[-1:], cache)


def translation(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    tokens: Sequence[int],
    step_size: int = 2048,
) -> Callable[[], list]:
    """What is left to do at a switch once the source has read ``tokens[:-1]``: to translate.

    Returns:
        A function that fills a fresh cache of the target from the recorded states.
    """
    recorded = list(capture.prefill(source, tokens[:-1], step_size))

    def translate() -> list:
        cache = caches.allocate(target, len(tokens) - 1)
        for states in recorded:
            translate_span(cache, states, source, target, translator, len(tokens) - 1)
        mx.eval(caches.arrays(cache))
        return cache

    return translate


def first_token(
    target: LanguageModel, tokens: Sequence[int], cache: list | None, step_size: int = 2048
) -> None:
    """Run ``tokens`` from a cache and wait for the token after them."""
    steps = generate_step(
        mx.array(list(tokens)),
        target.model,
        max_tokens=1,
        prompt_cache=cache,
        prefill_step_size=step_size,
    )
    next(steps)
    steps.close()


def switch_times(
    target: LanguageModel,
    actions: Mapping[str, Callable[[], list]],
    last: int,
    *,
    trials: int = 5,
) -> dict[str, list[float]]:
    """Seconds to the first token by several ways to fill a cache, interleaved.

    Args:
        target: Who decodes.
        actions: By name, what makes a cache of all but the last token.
        last: That token.
        trials: How often each is timed.
    """
    runs = {
        name: (lambda make=make: first_token(target, [last], make()))
        for name, make in actions.items()
    }
    for run in runs.values():
        _warm_up(run)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(trials):
        for name, run in runs.items():
            samples[name].append(seconds(run))
    return samples


PHASES = ("source_prefill", "translate", "target_step", "native", "switch", "accelerator")
WHOLE_PATHS = ("native", "switch", "accelerator")


def measure_latency(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    prompt_tokens: int,
    *,
    trials: int = 5,
    step_size: int = 2048,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Latency:
    """Time every path ``trials`` times on random token ids, interleaved.

    Raises:
        ValueError: ``prompt_tokens`` is under 2 or beyond a model's context.
    """
    if prompt_tokens < 2 or trials < 1:
        raise ValueError(f"{prompt_tokens} prompt tokens, {trials} trials; give at least 2 and 1")
    rng = random.Random(seed)
    rows = min(source.geometry.embedding_rows, target.geometry.embedding_rows)
    tokens = [rng.randrange(rows) for _ in range(prompt_tokens)]
    source.check_tokens(tokens)
    target.check_tokens(tokens)
    paths = Paths(source, target, translator, tokens, step_size)
    for phase in PHASES:
        _warm_up(getattr(paths, phase))
    samples: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(trials):
        for phase in PHASES:
            samples[phase].append(seconds(getattr(paths, phase)))
        progress()
    peak = {
        phase: peak_bytes(getattr(paths, phase)) for phase in ("native", "switch", "accelerator")
    }
    return Latency(prompt_tokens, samples, peak)


def _warm_up(action: Callable[[], object]) -> None:
    """Run until two times in a row agree within 5 %, at most five times."""
    last = seconds(action)
    for _ in range(MAX_WARM_UP - 1):
        now = seconds(action)
        if abs(now - last) <= 0.05 * last:
            return
        last = now
