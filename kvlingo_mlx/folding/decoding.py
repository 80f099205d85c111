"""Prefill with one model, decode with another from the first one's cache as it is.

The same three layers as in :mod:`kvlingo_mlx.generation`, but nothing is translated: the source
reads the prompt as it always does, and its maps are laid at the target's queries.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.errors import IncompatibleTranslatorError, UnsupportedModelError
from kvlingo_mlx.families.base import LATENT
from kvlingo_mlx.folding.attention import Fold, Part, Rows, Side
from kvlingo_mlx.folding.cache import FoldedCache
from kvlingo_mlx.generation import (
    Clock,
    GenerationResponse,
    LogitsProcessor,
    Model,
    Sampler,
    check_max_tokens,
    check_numbers,
    check_tokens,
    summary,
    timed,
    with_prefix,
)
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.loading import load, resolve_translator
from kvlingo_mlx.prompts import Prompt, as_ids, encode
from kvlingo_mlx.translator_config import SIDES, head_map_of, unfoldable
from kvlingo_mlx.translators.base import Translator

# Tokens by which the new tokens' caches grow. mlx-lm's 256 in each of Gemma-3-12B's layers are a
# fifth of what its source holds of 8192 tokens (benchmarks/LOG.md).
STEP = 32

AnyTranslator = Translator | str | os.PathLike[str] | None
Parts = dict[tuple[str, int], Part]


def check_foldable(source: LanguageModel, target: LanguageModel, translator: Translator) -> None:
    """Refuse a translator or models that query folding does not reach.

    Raises:
        IncompatibleTranslatorError: The translator is not linear, or not of post-RoPE keys.
        UnsupportedModelError: A model caches latents; or the target's attention handles the
            cached arrays itself, or has layers that read another's cache.
    """
    why = unfoldable(translator.config)
    if why is not None:
        raise IncompatibleTranslatorError(
            f"{target.name} cannot decode from the cache of {source.name} by this translator: {why}"
        )
    for model in (source, target):
        if LATENT in model.family.points:
            raise UnsupportedModelError(
                f"{model.name} caches latents, which folded decoding does not know: use generate "
                "(leave out --memory-budget)"
            )
    readers = target.family.readers(target.model)
    shared = next((i for i, found in enumerate(readers) if len(found) > 1), None)
    reasons = {
        "its attention handles the cached arrays itself": not target.family.quantised_cache,
        f"other layers read the cache of layer {shared}": shared is not None,
    }
    for reason, found in reasons.items():
        if found:
            raise UnsupportedModelError(
                f"{target.name} cannot decode from another model's cache, since {reason}: use "
                "generate (leave out --memory-budget)"
            )


def fold_caches(
    source_cache: Sequence[Any],
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
) -> list[Any]:
    """A target's caches whose prefix is what a source's caches hold; nothing is computed.

    Should the source go on in the same caches, MLX copies what it writes to.

    Args:
        source_cache: Stock mlx-lm caches that ``source`` has filled from position 0 on, any
            number of rows; those of one row serve any number of rows of the target's tokens.
        source: Who filled them.
        target: Who will decode.
        translator: From ``source`` to ``target``, linear and of post-RoPE keys.

    Returns:
        One cache a layer, to be given to the target's model or to mlx-lm as ``prompt_cache``.

    Raises:
        IncompatibleTranslatorError, UnsupportedModelError: As :func:`check_foldable`, or a cache
            of a class that cannot be read.
        ValueError: The caches are empty or end at different positions.
    """
    check_foldable(source, target, translator)
    ends = {cache.offset for cache in source_cache}
    if len(ends) != 1 or ends == {0} or len(source_cache) != len(source.attentions):
        raise ValueError(
            f"the caches of {source.name} are {len(source_cache)} that end at {sorted(ends)}; "
            f"expected {len(source.attentions)}, filled to one position"
        )
    parts: Parts = {}
    for index, cache in enumerate(source_cache):
        *sides, packing = caches.viewed(cache)
        parts |= {(s, index): Part(a, packing) for s, a in zip(SIDES, sides, strict=True)}
    mx.eval([part.arrays for part in parts.values()])
    length = ends.pop()
    return [
        FoldedCache(_fold(translator, parts, layer, geometry.window, length), length, suffix,
                    geometry.window)
        for layer, (suffix, geometry) in enumerate(
            zip(caches.empty(target, STEP), target.geometry.layers, strict=True)
        )
    ]  # fmt: skip


def _fold(
    translator: Translator, parts: Parts, layer: int, window: int | None, length: int
) -> Fold:
    """What one target layer reads; of a window no more than its tokens."""
    config = translator.config
    head_map = None if config.head_mixing else head_map_of(config)
    rows = Rows.of(head_map, config.source.layers[0].kv_heads)
    tokens = min(length, window or length)
    keys, values = (
        Side.of(
            translator.linear_map(side, layer),
            lambda read: parts[read].last(tokens),
            heads_apart=config.head_mixing,
        )
        for side in SIDES
    )
    return Fold(keys, values, rows)


def prefill(model: LanguageModel, rows: Sequence[Sequence[int]], step_size: int) -> list[Any]:
    """A model's own cache of some prompts of one length, as mlx-lm fills it."""
    cache = make_prompt_cache(model.model)
    tokens = mx.array([list(row) for row in rows])
    for start in range(0, tokens.shape[1], step_size):
        model.model(tokens[:, start : start + step_size], cache=cache)
        mx.eval([c.state for c in cache])
        mx.clear_cache()
    caches.settle(cache)
    return cache


def _folded(
    source: LanguageModel,
    target: LanguageModel,
    rows: Sequence[Sequence[int]],
    translator: Translator | None,
    step_size: int,
    kv_bits: int | None,
    kv_group_size: int,
    clock: Clock,
) -> list[Any]:
    """The target's folded caches of all but the last token of each row."""
    if translator is None:
        return make_prompt_cache(target.model)
    with mx.stream(generation_stream):
        cache = prefill(source, [row[:-1] for row in rows], step_size)
        if kv_bits is not None:
            caches.quantise(cache, kv_bits, kv_group_size)
        clock.lap("prefill")
        folded = fold_caches(cache, source, target, translator)
        clock.lap("translate")
    return folded


def _resolve(
    translator: AnyTranslator,
    source: LanguageModel,
    target: LanguageModel,
    tokens: Sequence[int],
    allow_mismatch: bool,
    kv_bits: int | None,
    kv_group_size: int,
) -> Translator | None:
    """The translator to fold, everything checked; None where a single token leaves no prefix."""
    if kv_bits is not None:
        caches.check_groups(source, kv_bits, kv_group_size)
    if len(tokens) < 2:
        return None
    found = resolve_translator(translator, source, target, allow_mismatch=allow_mismatch)
    check_foldable(source, target, found)
    return found


def folded_hand_over(
    prefill_model: Model,
    decode_model: Model,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    *,
    translator: AnyTranslator = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    allow_mismatch: bool = False,
) -> list[Any]:
    """Prefill with one model; return caches by which another decodes from that one's cache.

    Args:
        prefill_model: Reads the tokens; its cache of them stays.
        decode_model: Who will decode.
        tokens: Token ids, or several prompts of one length; the last of each is left for the
            decode model to run.
        translator: Loaded, or a folder or Hub id; None searches the local store. It must be
            linear and of post-RoPE keys.
        prefill_step_size: Tokens per prefill chunk.
        kv_bits: Quantise the prefix once it is read, but for layers with a window.
        kv_group_size: Groups of ``kv_bits``.
        allow_mismatch: Accept a translator made for another checkpoint of the same shape.

    Returns:
        Caches for ``decode_model.model(last, cache=...)`` or mlx-lm's ``generate_step``. They
        cannot be merged into mlx-lm's batches or saved.

    Raises:
        ValueError: No tokens, prompts of several lengths, an id out of range, or bits that do
            not fit.
        IncompatibleTranslatorError, UnsupportedModelError: It cannot be folded (the message says
            why), or is for another pair.
        MissingTranslatorError: None was given and none is stored.
    """
    source, target = load(prefill_model), load(decode_model)
    rows = _rows(tokens)
    for row in rows:
        check_tokens(source, target, row, prefill_step_size)
    options = allow_mismatch, kv_bits, kv_group_size
    found = _resolve(translator, source, target, rows[0], *options)
    return _folded(source, target, rows, found, prefill_step_size, *options[1:], Clock())


def _rows(tokens: Any) -> list[list[int]]:
    """Prompts of one length; one prompt alone is one row."""
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not listed or not isinstance(listed[0], Sequence):
        return [as_ids(listed)]
    rows = [as_ids(row) for row in listed]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"the prompts have {lengths[0]} to {lengths[-1]} tokens; folded decoding takes "
            "several at once where they are of one length: hand them over one by one"
        )
    return rows


def folded_stream_generate(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    *,
    translator: AnyTranslator = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prefill_step_size: int = 2048,
    enable_thinking: bool | None = None,
    allow_mismatch: bool = False,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> Iterator[GenerationResponse]:
    """Prefill with one model, decode with another from that one's cache; a response a token.

    Arguments are those of :func:`folded_generate`.
    """
    check_max_tokens(max_tokens)
    source, target = load(prefill_model), load(decode_model)
    clock = Clock()
    tokens = encode(target, prompt, enable_thinking)
    check_tokens(source, target, tokens, prefill_step_size)
    options = allow_mismatch, kv_bits, kv_group_size
    found = _resolve(translator, source, target, tokens, *options)
    clock.lap("prepare")
    with wired_limit(target.model, [generation_stream]):  # type: ignore[list-item]
        cache = _folded(source, target, [tokens], found, prefill_step_size, *options[1:], clock)
        responses = mlx_stream_generate(
            target.model,
            target.tokenizer,
            tokens[-1:],
            max_tokens=max_tokens,
            prompt_cache=cache,
            sampler=sampler,
            logits_processors=with_prefix(logits_processors, tokens[:-1]),
        )
        ttft = None
        for response in responses:
            if ttft is None:
                ttft = time.perf_counter() - clock.started
                check_numbers(response, source, target)
            spent = clock.seconds
            yield timed(response, len(tokens), spent["translate"], ttft, spent["prefill"])


def folded_generate(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    *,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Answer with one model from another's cache of the prompt, which is never translated.

    Memory: both models, the prefill model's cache, and the answer's own tokens. In the decode
    model's every step the translator is applied once a layer (appendix "Decoding under a memory
    budget"). A head-wise translator costs little; a head-mixing one makes every query head read
    every source head.

    Args:
        prefill_model: Reads the prompt: a folder, a Hub id or a loaded model.
        decode_model: Writes the answer; likewise.
        prompt: Text, token ids, or chat messages, which the decode model's own chat template
            renders.
        verbose: Write the text as it comes, and the times at the end.
        options: ``translator`` (linear and of post-RoPE keys; loaded, a folder or Hub id; None
            searches the local store), ``max_tokens`` (256), ``sampler``, ``logits_processors``,
            ``prefill_step_size`` (2048), ``enable_thinking``, ``allow_mismatch``; ``kv_bits`` and
            ``kv_group_size`` (64), which quantise the prefix once it is read.

    Returns:
        The answer, without the prompt.

    Raises:
        ValueError: An empty prompt, one beyond a model's context, or a bad argument.
        IncompatibleTranslatorError, UnsupportedModelError: The translator or a model does not
            allow it; the message says why.
        MissingModelError, MissingTranslatorError, MalformedTranslatorError: As for ``generate``.
    """
    text, response = "", None
    for response in folded_stream_generate(prefill_model, decode_model, prompt, **options):
        text += response.text
        if verbose:
            sys.stdout.write(response.text)
            sys.stdout.flush()
    if verbose and response is not None:
        sys.stdout.write(f"\n{'=' * 10}\n{summary(response)}\n")
    return text
