"""Prefill with one model, hand over, decode with another.

There are three thin layers, as in mlx-lm: ``fill`` makes a cache, ``stream_generate`` yields one
response per token, ``generate`` joins the text. The decode model always runs the last prompt token
itself, since a translated cache holds no prediction (section "Cache translation", equation (2.1)).
"""

import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Unpack

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches.limits import check_bits, check_draft
from kvlingo_mlx.engine import guarding, healing
from kvlingo_mlx.engine.one_turn import OneTurn
from kvlingo_mlx.engine.plan import HandoverRequest, Plan, prepare
from kvlingo_mlx.engine.responses import GenerationResponse, joined
from kvlingo_mlx.engine.sampling import DecodingOptions, choice_of, given
from kvlingo_mlx.loading.models import Model
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt
from kvlingo_mlx.translators.base import Translator

DECODE_OPTIONS = ("kv_bits", "kv_group_size", "quantized_kv_start")


class GenerateOptions(DecodingOptions, total=False):
    """The options of :func:`generate` and :func:`stream_generate`, for type checkers."""

    translator: Translator | str | os.PathLike[str] | None
    strategy: str
    prefill_step_size: int
    native_layers: int | str | None
    native_head: int
    native_tail: int
    native_middle: int
    allow_mismatch: bool
    heal: str | None
    heal_share: float
    guard: int
    on_doubt: str
    kv_bits: int | None  # bits per number of a quantised cache
    kv_group_size: int | None  # numbers that share a scale in it (64)
    # Number of tokens from which the cache is quantised (mlx-lm: 5000)
    quantized_kv_start: int | None


def check_max_tokens(max_tokens: int) -> None:
    """Raise ValueError unless ``max_tokens`` is a positive number or -1."""
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens}; give a positive number, or -1 for no limit")


@checked
def stream_generate(
    prefill_model: Model, decode_model: Model, prompt: Prompt, **options: Unpack[GenerateOptions]
) -> Generator[GenerationResponse, None, None]:
    """Prefill with one model, decode with another; yield one response per token.

    The arguments are those of :func:`generate`.

    Raises:
        UnsupportedModelError: mlx-lm cannot quantise a model's cache, or cannot remove rejected
            draft tokens from it. This is found before anything is prefilled. The other errors are
            those of :func:`generate`.
    """
    known = given(options)
    choice = choice_of(known)
    max_tokens, drafts = known.get("max_tokens", 256), known.get("num_draft_tokens", 2)
    check_max_tokens(max_tokens)
    request = HandoverRequest.of(known)
    # mlx-lm's options for a quantised cache
    decode_options = {n: known[n] for n in DECODE_OPTIONS if "kv_bits" in known and n in known}

    def check(plan: Plan) -> None:
        for model in (plan.target, plan.draft) if decode_options else ():
            if model is not None:
                group = decode_options.get("kv_group_size", 64)
                check_bits(model, decode_options["kv_bits"], group)
        if request.heal is not None:
            _check_healing(plan, f"heal is {request.heal!r}", decode_options)
        elif request.guard and request.on_doubt == guarding.HEAL:
            _check_healing(plan, "on_doubt is 'heal'", decode_options)
        if plan.draft is not None:
            check_drafting(plan.target, plan.draft, plan.tokens, max_tokens)

    plan = prepare(prefill_model, decode_model, prompt, request, check)
    turn = OneTurn(plan, request)
    yield from turn.answered(choice, max_tokens, request.tools, decode_options, drafts)


def _check_healing(plan: Plan, asked: str, options: Mapping[str, Any]) -> None:
    """Refuse what cannot be healed while it is decoded, before anything is prefilled."""
    healing.check_models(plan.source, plan.target)
    if options or plan.draft is not None:
        other = "draft_model" if plan.draft is not None else "kv_bits"
        raise ValueError(
            f"{asked}, which needs a cache that nothing else changes, and {other} does; leave one "
            "of them out"
        )


def check_drafting(
    target: LanguageModel, draft: LanguageModel, tokens: Sequence[int], max_tokens: int
) -> None:
    """Refuse a draft model that cannot draft for ``target`` after ``tokens``.

    Raises:
        ValueError: The draft model has another vocabulary, or a number is out of range.
        UnsupportedModelError: mlx-lm cannot remove rejected draft tokens from the cache.
    """
    if max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens}; with a draft model give a positive number")
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise ValueError(
            f"the draft model {draft.name} has another vocabulary than {target.name}; "
            "give one with the same"
        )
    draft.check_tokens(tokens)
    check_draft(target, draft, len(tokens), max_tokens)


@checked
def generate(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    *,
    verbose: bool = False,
    **options: Unpack[GenerateOptions],
) -> str:
    """Prefill a prompt with one model and answer with another, from the translated cache.

    Any thread may call this on models that other threads use. The threads take turns, after each
    chunk or token (:mod:`kvlingo_mlx.threads`).

    Args:
        prefill_model: The model that reads the prompt: a folder, a Hub id or a loaded model; or the
            address of another machine on which `kvlingo-mlx serve-prefill` offers it
            (``mac-studio.local:8090``), or what ``connect`` returns for one.
        decode_model: The model that writes the answer: a folder, a Hub id or a loaded model.
        prompt: For a chat model: messages, which the decode model's own chat template renders.
            Text and token ids are taken as they are, as in mlx-lm.
        verbose: Write the text as it comes, and the times at the end.
        options: ``translator`` (a loaded one, a folder or a Hub id; None searches the local
            store), ``strategy`` (``accelerator``; ``native``: the decode model reads the prompt
            itself), ``max_tokens`` (256; with -1, or more than the context has room
            for, the answer ends when the context is full, with ``finish_reason`` "length"),
            ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, ``seed``,
            ``stop`` (a text, or several, before which the answer ends), ``tools`` (which the chat
            template announces), or mlx-lm's own ``sampler`` and ``logits_processors``,
            ``prefill_step_size`` (2048), ``enable_thinking`` (the template's switch; off
            puts the empty think block into the prompt; None is on, as in mlx-lm, but off for the
            embedded models), ``native_layers``, ``native_head``, ``native_tail`` and
            ``native_middle`` (layers and tokens that the decode model reads itself, as in
            :func:`hand_over`), ``heal`` (``interleaved``: between two steps the decode model
            reads the prompt itself, in the place of the translation; ``layers``: it also reads its
            first layers at once, ``native_layers`` or a quarter of all;
            not with ``kv_bits`` or ``draft_model``, nor for models with windows), ``heal_share``
            (0.5: the share of its speed that decoding keeps meanwhile), ``guard`` (0: none; else
            the number of last tokens that the decode model reads itself and over which both models
            are compared: 32 as in the receipt) and ``on_doubt`` (what is done if the translation
            looks out of its depth: ``warn``; ``heal``, as if ``heal`` were ``interleaved``;
            ``reread``, the decode model reads the prompt itself before it answers),
            ``allow_mismatch``; ``draft_model``
            (speculative decoding as in mlx-lm; the prefill model can be the draft model, and then
            reads the prompt only once) and ``num_draft_tokens`` (2); the rest as in
            :func:`stream_generate`.

    Returns:
        The answer, without the prompt, as it was written: a reasoning trace is part of it. The
        responses of :func:`stream_generate` have the two apart, ``content`` and ``reasoning``.

    The same model twice answers as with mlx-lm alone, unless a ``translator`` is given.

    Raises:
        ValueError: The prompt is empty or beyond a model's context, or an argument is bad.
        MissingModelError, UnsupportedModelError: A model cannot be used, or not in this way.
        RemoteModelError: The prefill model's machine fails, or sends what is wrong.
        NotEnoughMemoryError: The models, the translator and the prompt's caches do not fit.
        MissingTranslatorError, IncompatibleTranslatorError, MalformedTranslatorError: No
            translator for this pair can be used.

    Warns:
        KVLingoWarning: The answer is empty, ends within its reasoning, or goes on with the chat
            template's marks; or an embedded model was asked for what it cannot know.
    """
    return joined(stream_generate(prefill_model, decode_model, prompt, **options), verbose)


__all__ = ["generate", "stream_generate"]
