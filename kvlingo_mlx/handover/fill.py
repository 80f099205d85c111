"""From what a source writes to a target's cache: a plan is carried out, whoever decodes then.

The prefix comes chunk by chunk: captured, taken to the translator's capture point, translated,
written. Some of it the target may read itself (:mod:`.hybrid`); two tokenizers have their own path
(:mod:`.cross_tokenizer`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.handover import cross_tokenizer, hybrid
from kvlingo_mlx.handover.plan import Asked, Plan, prepare
from kvlingo_mlx.loading.models import Model
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.base import Translator

PHASES = ("prefill", "translate", "native")


class Clock:
    """Seconds by phase since ``started``: each ``lap`` books the time since the last one."""

    def __init__(self, started: float | None = None) -> None:
        self.started = self._last = time.perf_counter() if started is None else started
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def translate_span(
    cache: Sequence[Any],
    states: KVStates,
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    num_tokens: int,
) -> None:
    """Write one span of a source's keys and values into a target's cache; lazily.

    ``num_tokens`` is the number of tokens that the cache will hold: layers with a window
    take its last positions alone.
    """
    states = capture.move(states, source, translator.config.capture)
    caches.write(cache, translator(states, target.geometry.first_kept(num_tokens)), target)


def filled(
    plan: Plan,
    clock: Clock | None = None,
    source_cache: list[Any] | None = None,
    held: KVStates | None = None,
) -> list[Any]:
    """The target's cache of a plan's prefix: translated chunk by chunk, evaluated.

    The map is token-wise, so each chunk's capture is dropped once translated. After the
    last prefill chunk there is one synchronisation, for all layers together. The source's own
    cache is dropped too, unless ``source_cache`` is given to be filled; what that holds already
    is ``held``.

    Returns:
        Stock mlx-lm caches. Between two tokenizers their ``offset`` is the number of entries, which
        need not be that of tokens, and they cannot be trimmed into what was handed over.
    """
    if plan.translator is None or not plan.prefix:
        return make_prompt_cache(plan.target.model)
    read = plan.read if source_cache is None else plan.prefix
    first: Iterator[KVStates] = iter(())
    begun = 0
    if held is not None:
        begun, starts = held.end, range(held.start, held.end, plan.step_size)
        first = (held.part(start, min(start + plan.step_size, held.end)) for start in starts)
    prefilled = capture.prefill(plan.source, read, plan.step_size, source_cache, begun)
    with mx.stream(generation_stream), contextlib.closing(prefilled) as rest:
        return take_over(plan, itertools.chain(first, rest), clock)


def take_over(plan: Plan, spans: Iterable[KVStates], clock: Clock | None = None) -> list[Any]:
    """The target's cache of a plan's prefix whose source states are at hand, or come span by span.

    Args:
        plan: Has a translator.
        spans: What the source wrote of the prefix, in order; each is let go of once translated.
        clock: Is told of each phase.

    Returns:
        Stock mlx-lm caches, evaluated.
    """
    lap = (clock or Clock()).lap
    if plan.aligned is not None:
        cache = cross_tokenizer.filled_across(plan, plan.aligned, spans, lap)
        validate_cache(cache, plan.target, plan.aligned.num_entries)
    else:
        cache = _take_over(plan, spans, lap)
        validate_cache(cache, plan.target, len(plan.prefix))
    return cache


def _take_over(plan: Plan, spans: Iterable[KVStates], lap: Callable[[str], None]) -> list[Any]:
    """The same, of one tokenizer."""
    assert plan.translator is not None
    source, target, prefix, span = plan.source, plan.target, plan.prefix, plan.span
    layers, step_size = plan.native.layers, plan.step_size
    upper = plan.translator.above(layers)
    cache = hybrid.allocate(target, prefix[: span.stop], plan.native, step_size)
    lap("native")
    wanted = target.geometry.first_kept(span.stop)[layers:]
    done = max(span.start, min(wanted, default=0))
    for states in spans:
        lap("prefill")
        if done < min(states.start, span.stop):  # what is not written would be zeros
            raise ValueError(
                f"the source holds nothing before position {states.start}, and {done} is to be "
                "translated; prefill the source"
            )
        done = max(done, states.end)
        start, stop = max(states.start, span.start), min(states.end, span.stop)
        if start < stop:
            hybrid.read_layers(target, prefix[start:stop], cache, step_size, layers)
            lap("native")
        with working():
            if start < stop:
                translate_span(cache, states.part(start, stop), source, target, upper, span.stop)
            del states
            mx.eval(caches.arrays(cache))
        lap("translate")
    hybrid.read_layers(target, prefix[span.stop :], cache, step_size)
    lap("native")
    return cache


@checked
def hand_over(
    prefill_model: Model,
    decode_model: Model,
    tokens: Prompt,
    *,
    translator: Translator | str | os.PathLike[str] | None = None,
    prefill_step_size: int = 2048,
    native_layers: int | str | None = None,
    native_head: int = 0,
    native_tail: int = 0,
    allow_mismatch: bool = False,
    prompt_cache: list[Any] | None = None,
    enable_thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Prefill with one model; return another's cache of ``tokens[:-1]``.

    Args:
        prefill_model: Reads the tokens.
        decode_model: Whose cache is wanted.
        tokens: Token ids, or text or messages; two tokenizers need the latter. The last one, by
            the decode model's tokenizer and template, is left for it to run.
        translator: Loaded, or a folder or Hub id; None searches the local store.
        prefill_step_size: Tokens per prefill chunk.
        native_layers: Cache layers, from the first on, that the decode model reads itself, which
            costs that share of a prefill; the others are translated. None is what the
            translator was tuned to, else none; ``auto`` refuses one that was not tuned. All of
            them are a prefill.
        native_head: The first so many tokens that it reads itself in all layers.
        native_tail: The last so many of the prefix, likewise.
        allow_mismatch: Accept a translator made for another checkpoint of the same shape.
        prompt_cache: The prefill model's own caches of the first of these tokens, from
            ``mlx_lm``'s ``load_prompt_cache`` perhaps; it reads the others after them, so they
            hold ``tokens[:-1]`` afterwards. The translator must read keys as they are cached
            (capture post_norm or post_rope, where keys are normed). Which tokens they are of
            nobody can check.
        enable_thinking: The chat template's switch, for messages.
        tools: What the chat template announces, for messages.

    Returns:
        Stock mlx-lm caches, evaluated, for ``mlx_lm.generate.generate_step(
        mx.array(tokens[-1:]), decode_model.model, prompt_cache=...)`` and whatever else mlx-lm
        does with caches: batches, ``save_prompt_cache``, ``trim_prompt_cache``, ``kv_bits``.
        Between two tokenizers their ``offset`` counts entries, which are not one a token, so
        nothing of them can be trimmed, only what comes after.

    Raises:
        ValueError: No tokens, an id out of range, or more than a model's context.
        IncompatibleTranslatorError: The translator is for another pair.
        MissingTranslatorError: None was given and none is stored.
        UnsupportedModelError: A ``prompt_cache`` does not hold what the translator reads.
    """
    asked = Asked(
        translator,
        prefill_step_size=prefill_step_size,
        enable_thinking=enable_thinking,
        tools=tools,
        native_layers=native_layers,
        native_head=native_head,
        native_tail=native_tail,
        allow_mismatch=allow_mismatch,
    )
    plan = prepare(prefill_model, decode_model, tokens, asked)
    held = None
    if prompt_cache is not None and plan.translator is not None:
        if plan.aligned is not None:
            raise ValueError("prompt_cache cannot be used between two tokenizers; leave it out")
        held = _held(prompt_cache, plan.source, plan.translator, len(plan.prefix))
    return filled(plan, source_cache=prompt_cache, held=held)


def _held(
    cache: list[Any], source: LanguageModel, translator: Translator, most: int
) -> KVStates | None:
    """What a source's caches hold of a prompt whose prefix has ``most`` tokens; None if nothing."""
    stock = make_prompt_cache(source.model)
    if not isinstance(cache, list) or len(cache) != len(stock):
        what = f"{len(cache)} caches" if isinstance(cache, list) else f"{cache!r:.60}"
        raise ValueError(
            f"prompt_cache is {what}; give the list of the {len(stock)} caches of {source.name}, "
            "as mlx_lm's make_prompt_cache or load_prompt_cache has it"
        )
    for own, usual in zip(cache, stock, strict=True):
        if caches.is_ring(own) and not caches.is_ring(usual) and own.offset <= own.max_size < most:
            raise ValueError(
                f"prompt_cache keeps {own.max_size} tokens, but {most} come before the prompt's "
                "last one: make it without max_kv_size"
            )
    if not any(c.offset for c in cache):
        return None
    held = caches.read(cache, source, translator.config.capture)
    if held.end > most:
        raise ValueError(
            f"prompt_cache holds {held.end} tokens, but only {most} come before the prompt's last "
            "one: trim it (mlx_lm's trim_prompt_cache), or give the whole prompt"
        )
    return held
