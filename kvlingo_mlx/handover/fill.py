"""From what a source writes to a target's cache: hand-overs, whoever decodes afterwards.

The prefix comes chunk by chunk: captured, taken to the translator's capture point, translated,
written. Some of it the target may read itself (:mod:`.hybrid`); two tokenizers have their own path
(:mod:`.cross_tokenizer`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches.memory import check_caches
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.handover import cross_tokenizer, hybrid
from kvlingo_mlx.handover.hybrid import Native, native_part
from kvlingo_mlx.loading.models import Model, load_pair
from kvlingo_mlx.loading.notes import tell_of_length
from kvlingo_mlx.loading.translators import resolve_translator
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, check_tools, encode
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.two_tokenizers import Handover
from kvlingo_mlx.translators.base import Translator

PHASES = ("prefill", "translate", "native")


class Clock:
    """Seconds by phase: each ``lap`` books the time since the last one."""

    def __init__(self) -> None:
        self.started = self._last = time.perf_counter()
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


def translated_cache(
    source: LanguageModel,
    target: LanguageModel,
    tokens: Sequence[int],
    translator: Translator | None,
    native: Native,
    step_size: int,
    clock: Clock,
    source_cache: list[Any] | None = None,
    held: KVStates | None = None,
) -> list[Any]:
    """The target's cache of ``tokens[:-1]``: translated chunk by chunk, evaluated.

    The map is token-wise, so each chunk's capture is dropped once translated. After the
    last prefill chunk there is one synchronisation, for all layers together. The source's own
    cache is dropped too, unless ``source_cache`` is given to be filled; what that holds already
    is ``held``.
    """
    prefix = tokens[:-1]
    if not prefix:
        return make_prompt_cache(target.model)
    assert translator is not None
    span = native.translated(len(prefix), len(target.attentions))
    read = prefix if source_cache is not None else prefix[: span.stop]
    first: Iterator[KVStates] = iter(())
    begun = 0
    if held is not None:
        begun, starts = held.end, range(held.start, held.end, step_size)
        first = (held.part(start, min(start + step_size, held.end)) for start in starts)
    with (
        mx.stream(generation_stream),
        contextlib.closing(capture.prefill(source, read, step_size, source_cache, begun)) as rest,
    ):
        spans = itertools.chain(first, rest)
        return take_over(spans, source, target, translator, prefix, native, step_size, clock)


def hand_over_across(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    handover: Handover,
    step_size: int = 2048,
    clock: Clock | None = None,
) -> list[Any]:
    """The target's cache of what two models with two tokenizers read, as ``handover`` has it.

    Args:
        source: Reads its own rendering, up to the last token that is translated.
        target: Whose cache is wanted; prefills the rest of its rendering, but for the last token.
        translator: Of this pair, ``alignment`` minimal_groups.
        handover: Both renderings, and what of them is translated.
        step_size: Tokens per prefill chunk.
        clock: Is told of each phase.

    Returns:
        Stock mlx-lm caches, evaluated, whose ``offset`` is the number of their entries, which need
        not be that of tokens. They cannot be trimmed into what was handed over.
    """
    read = handover.source_ids[: handover.num_read]
    lap = (clock or Clock()).lap
    with (
        mx.stream(generation_stream),
        contextlib.closing(capture.prefill(source, read, step_size)) as spans,
    ):
        cache = cross_tokenizer.take_over(
            spans, source, target, translator, handover, step_size, lap
        )
    validate_cache(cache, target, handover.num_entries)
    return cache


def take_over(
    spans: Iterable[KVStates],
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    prefix: Sequence[int],
    native: Native,
    step_size: int = 2048,
    clock: Clock | None = None,
) -> list[Any]:
    """The target's cache of a prefix whose source states are at hand, or come span by span.

    Args:
        spans: What the source wrote of it, in order; each is let go of once translated.
        source: Who wrote that.
        target: Whose cache is wanted.
        translator: Of this pair.
        prefix: The tokens.
        native: What the target reads itself.
        step_size: Tokens per chunk that it reads.
        clock: Is told of each phase.

    Returns:
        Stock mlx-lm caches, evaluated.
    """
    lap = (clock or Clock()).lap
    span = native.translated(len(prefix), len(target.attentions))
    upper = translator.above(native.layers)
    cache = hybrid.allocate(target, prefix[: span.stop], native, step_size)
    lap("native")
    wanted = target.geometry.first_kept(span.stop)[native.layers :]
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
            hybrid.read_layers(target, prefix[start:stop], cache, step_size, native.layers)
            lap("native")
        with working():
            if start < stop:
                translate_span(cache, states.part(start, stop), source, target, upper, span.stop)
            del states
            mx.eval(caches.arrays(cache))
        lap("translate")
    hybrid.read_layers(target, prefix[span.stop :], cache, step_size)
    lap("native")
    validate_cache(cache, target, len(prefix))
    return cache


def check_tokens(
    source: LanguageModel, target: LanguageModel, tokens: Sequence[int], step_size: int
) -> None:
    """Refuse (ValueError) a prompt that one of two models cannot read, or chunks of no tokens."""
    if not tokens:
        raise ValueError("the prompt is empty; give some text")
    if step_size < 1:
        raise ValueError(f"prefill_step_size is {step_size}; it must be at least 1")
    if source.tokenizer_fingerprint == target.tokenizer_fingerprint:  # else it has its own ids
        source.check_tokens(tokens)
    target.check_tokens(tokens)


def across_plan(
    source: LanguageModel,
    target: LanguageModel,
    prompt: Prompt,
    translator: Translator,
    native: Native,
    enable_thinking: bool | None = None,
    **switches: Any,
) -> Handover | None:
    """The prompt as both models read it, for a translator between two tokenizers; else None."""
    if translator.config.alignment is None:
        return None
    if native != Native():
        raise ValueError(
            "native_layers, native_head and native_tail cannot be used between two tokenizers, "
            "where the decode model reads what is not translated already; leave them out"
        )
    return cross_tokenizer.plan(source, target, prompt, enable_thinking, **switches)


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
    source, target = load_pair(prefill_model, decode_model, tokens, translator=translator)
    check_tools(target, tokens, tools)
    prompt, tokens = tokens, encode(target, tokens, enable_thinking, tools=tools)
    check_tokens(source, target, tokens, prefill_step_size)
    check_caches((source, target), len(tokens))
    resolved, native = None, Native()
    if len(tokens) > 1:  # a single token leaves nothing to translate
        resolved = resolve_translator(translator, source, target, allow_mismatch=allow_mismatch)
        native = native_part(resolved.config, native_layers, native_head, native_tail)
        tell_of_length(resolved.config, len(tokens))
        if across := across_plan(
            source, target, prompt, resolved, native, enable_thinking, tools=tools
        ):
            if prompt_cache is not None:
                raise ValueError("prompt_cache cannot be used between two tokenizers; leave it out")
            return hand_over_across(source, target, resolved, across, prefill_step_size)
    held = None
    if prompt_cache is not None and resolved is not None:
        held = _held(prompt_cache, source, resolved, len(tokens) - 1)
    options = prefill_step_size, Clock(), prompt_cache, held
    return translated_cache(source, target, tokens, resolved, native, *options)


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
