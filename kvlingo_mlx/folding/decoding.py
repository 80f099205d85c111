"""Prefill with one model, decode with another directly from the first one's cache.

The three layers are those of :mod:`kvlingo_mlx.engine.generation`, but nothing is translated: the
source reads the prompt as usual, and the maps are applied to the target's queries.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from kvlingo_mlx.backend import mx

from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx import caches
from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches.limits import check_groups
from kvlingo_mlx.caches.memory import check_caches
from kvlingo_mlx.engine.clock import Clock
from kvlingo_mlx.engine.generation import check_max_tokens
from kvlingo_mlx.engine.line import Steps
from kvlingo_mlx.engine.one_turn import OneTurn
from kvlingo_mlx.engine.plan import AnyTranslator, HandoverRequest, Plan, begin, check_tokens
from kvlingo_mlx.engine.responses import GenerationResponse, joined
from kvlingo_mlx.engine.sampling import AnswerOptions, LogitsProcessor, Sampler, choice_of, given
from kvlingo_mlx.folding.folds import check_foldable, check_whole, fold_caches
from kvlingo_mlx.format.translator_config import TranslatorConfig, unfoldable
from kvlingo_mlx.loading.models import Model
from kvlingo_mlx.loading.notes import tell_of_length
from kvlingo_mlx.loading.translators import find_translator, name_of, resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, as_ids
from kvlingo_mlx.threads import working


class FoldedOptions(AnswerOptions, total=False):
    """The options of :func:`folded_generate` and :func:`folded_stream_generate`."""

    translator: AnyTranslator
    max_tokens: int
    sampler: Sampler | None
    logits_processors: list[LogitsProcessor] | None
    prefill_step_size: int
    enable_thinking: bool | None
    allow_mismatch: bool
    kv_bits: int | None
    kv_group_size: int
    native_layers: int | None


def prefill(model: LanguageModel, rows: Sequence[Sequence[int]], step_size: int) -> list[Any]:
    """A model's own cache of several prompts of one length, filled as mlx-lm fills it."""
    cache = make_prompt_cache(model.model)
    tokens = mx.array([list(row) for row in rows])
    for start in range(0, tokens.shape[1], step_size):
        with working():
            model.model(tokens[:, start : start + step_size], cache=cache)
            mx.eval([c.state for c in cache])
            mx.clear_cache()
    with working():
        caches.settle(cache)
    return cache


@dataclass(frozen=True, kw_only=True)
class FoldedRequest(HandoverRequest):
    """A request whose prefix may be quantised after it is read, by mlx-lm's options."""

    kv_bits: int | None = None
    kv_group_size: int = 64


def _prepare(
    prefill_model: Model, decode_model: Model, prompt: Prompt, request: FoldedRequest
) -> Plan:
    """Load and check everything; a prompt of one token has no prefix and needs no translator."""
    plan = begin(prefill_model, decode_model, prompt, request, count=False)
    plan = replace(plan, way="folded")
    source, target = plan.source, plan.target
    check_tokens((source, target), plan.tokens)
    if request.kv_bits is not None:
        check_groups(source, request.kv_bits, request.kv_group_size)
    if len(plan.tokens) == 1:
        return plan

    def suits(config: TranslatorConfig) -> bool:
        return unfoldable(config) is None and not request.native(config).layers

    check_caches((source,), len(plan.tokens))
    match: dict[str, Any] = {"allow_mismatch": request.allow_mismatch}
    found = request.translator
    if found is None:
        found = find_translator(source, target, **match, suits=suits)
    translator = resolve_translator(found, source, target, **match)
    tell_of_length(translator.config, len(plan.tokens), name_of(translator.path))
    check_foldable(source, target, translator)
    check_whole(translator.config, request.native_layers)
    return replace(plan, translator=translator)


def _folded(
    plan: Plan, rows: Sequence[Sequence[int]], request: FoldedRequest, clock: Clock
) -> list[Any]:
    """The target's folded caches of all but the last token of each row."""
    if plan.translator is None:
        return make_prompt_cache(plan.target.model)
    with mx.stream(generation_stream):
        cache = prefill(plan.source, [row[:-1] for row in rows], plan.step_size)
        with working():
            if request.kv_bits is not None:
                caches.quantise(cache, request.kv_bits, request.kv_group_size)
        clock.lap("prefill")
        with working():
            folded = fold_caches(cache, plan.source, plan.target, plan.translator)
        clock.lap("translate")
    return folded


@checked
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
    native_layers: int | None = None,
) -> list[Any]:
    """Prefill with one model; return caches with which another model decodes from its cache.

    Args:
        prefill_model: The model that reads the tokens; its cache of them is kept.
        decode_model: The model that will decode.
        tokens: Token ids, or several prompts of one length; the last token of each is left for
            the decode model to run.
        translator: A loaded translator, a folder or a Hub id; None searches the local store. It
            must be linear and of post-RoPE keys.
        prefill_step_size: Tokens per prefill chunk.
        kv_bits: Quantise the prefix to these bits after it is read, except in layers with a window.
        kv_group_size: Numbers per group with ``kv_bits``.
        allow_mismatch: Accept a translator made for another checkpoint of the same shape.
        native_layers: 0 folds every layer of a translator that was tuned to native layers; None
            refuses such a translator.

    Returns:
        Caches for ``decode_model.model(last, cache=...)`` or mlx-lm's ``generate_step``. They
        cannot be merged into mlx-lm's batches or saved.

    Raises:
        ValueError: There are no tokens, prompts differ in length, an id is out of range, or the
            bits do not fit.
        IncompatibleTranslatorError, UnsupportedModelError: The translator cannot be folded (the
            message says why), or is for another pair.
        MissingTranslatorError: None was given and none is stored.
    """
    request, rows = FoldedRequest.of(locals()), _rows(tokens)
    plan = _prepare(prefill_model, decode_model, rows[0], request)
    for row in rows[1:]:
        check_tokens((plan.source, plan.target), row)
    return _folded(plan, rows, request, Clock())


def _rows(tokens: Any) -> list[list[int]]:
    """The prompts as rows of one length; a single prompt is one row."""
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    first = listed[0] if isinstance(listed, Sequence) and listed else None
    several = hasattr(first, "__len__") and not isinstance(first, str | Mapping)
    try:
        rows = list(map(as_ids, listed if several else [listed]))
    except (TypeError, ValueError):
        raise ValueError(
            "the prompt is not token ids; folded_hand_over takes a list of them, or several lists "
            "of one length: give text and messages to folded_generate"
        ) from None
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"the prompts have {lengths[0]} to {lengths[-1]} tokens; folded decoding takes "
            "several at once where they are of one length: hand them over one by one"
        )
    return rows


@checked
def folded_stream_generate(
    prefill_model: Model, decode_model: Model, prompt: Prompt, **options: Unpack[FoldedOptions]
) -> Generator[GenerationResponse, None, None]:
    """Prefill with one model, decode from its cache with another; yield one response per token.

    The arguments are those of :func:`folded_generate`.
    """
    known = given(options)
    choice = choice_of(known)
    max_tokens = known.get("max_tokens", 256)
    check_max_tokens(max_tokens)
    request = FoldedRequest.of(known)
    plan = _prepare(prefill_model, decode_model, prompt, request)
    yield from FoldedTurn(plan, request).answered(choice, max_tokens, request.tools)


class FoldedTurn(OneTurn):
    """A turn whose target decodes from the source's own cache."""

    def __init__(self, plan: Plan, request: FoldedRequest) -> None:
        super().__init__(plan, request)
        self._request = request

    def filled(self) -> Steps:
        plan = self.plan
        self.target.hold([], None, _folded(plan, [plan.tokens], self._request, self.clock))
        yield from ()


@checked
def folded_generate(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    *,
    verbose: bool = False,
    **options: Unpack[FoldedOptions],
) -> str:
    """Answer with one model from another's cache of the prompt, which is never translated.

    Memory holds both models, the prefill model's cache, and the answer's own tokens. In every
    step of the decode model the translator is applied once per layer (appendix "Decoding under a
    memory budget"). A head-wise translator costs little; a head-mixing one makes every query head
    read every source head.

    Args:
        prefill_model: The model that reads the prompt: a folder, a Hub id or a loaded model.
        decode_model: The model that writes the answer: a folder, a Hub id or a loaded model.
        prompt: Text, token ids, or chat messages, which the decode model's own chat template
            renders; one prompt (:func:`folded_hand_over` takes several of one length).
        verbose: Write the text as it comes, and the times at the end.
        options: ``translator`` (linear and of post-RoPE keys; loaded, a folder or a Hub id; None
            searches the local store), ``max_tokens`` (256), ``temperature``, ``top_p``, ``top_k``,
            ``min_p``, ``repetition_penalty``, ``seed``, ``stop``, ``tools``, ``sampler`` and
            ``logits_processors`` as for ``generate``,
            ``prefill_step_size`` (2048), ``enable_thinking``, ``allow_mismatch``; ``kv_bits`` and
            ``kv_group_size`` (64), which quantise the prefix after it is read; ``native_layers``
            (0 folds every layer of a translator that was tuned to native layers).

    Returns:
        The answer, without the prompt.

    Raises:
        ValueError: The prompt is empty, several prompts, or beyond a model's context, or an
            argument is bad.
        IncompatibleTranslatorError, UnsupportedModelError: The translator or a model cannot be
            used for this; the message says why.
        MissingModelError, MissingTranslatorError, MalformedTranslatorError: As for ``generate``.
    """
    return joined(folded_stream_generate(prefill_model, decode_model, prompt, **options), verbose)
