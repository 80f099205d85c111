"""Prefill with one model, hand over, decode with another.

Three thin layers, as in mlx-lm: ``fill`` makes a cache, ``stream_generate`` yields a response a
token, ``generate`` joins the text. The decode model always runs the last prompt token itself, since
a translated cache holds no prediction (paper: section "Cache translation", equation (2.1)).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack

from kvlingo_mlx.backend import mx

from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.generate import generation_stream
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.caches.limits import check_bits, check_draft
from kvlingo_mlx.caches.memory import check_caches
from kvlingo_mlx.caches.validation import first_bad, room_for
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.handover import timings
from kvlingo_mlx.handover.answers import AnswerReader, ToolCall
from kvlingo_mlx.handover.fill import (
    PHASES,
    Clock,
    across_plan,
    check_tokens,
    hand_over_across,
    translated_cache,
)
from kvlingo_mlx.handover.hybrid import Native, native_part
from kvlingo_mlx.handover.sampling import (
    DecodingOptions,
    LogitsProcessor,
    Sampler,
    choice_of,
    given,
)
from kvlingo_mlx.loading.models import Model, load, load_pair
from kvlingo_mlx.loading.notes import tell_of_length
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.loading.translators import resolve_translator, translator_facts
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, check_tools, encode
from kvlingo_mlx.threads import in_turn, wired, working
from kvlingo_mlx.tokenization.two_tokenizers import Handover
from kvlingo_mlx.translators.base import Translator

STRATEGIES = ("accelerator", "native", "auto")
DECODE_OPTIONS = ("kv_bits", "kv_group_size", "quantized_kv_start")


@dataclass
class GenerationResponse(MLXResponse):
    """mlx-lm's response, with what its text says and the times and tokens of a hand-over.

    ``text`` is all that was written, marks included. ``content``, ``reasoning`` and ``tool_calls``
    are what has come with this response: joined, those of all responses are the whole. What may
    yet be part of a mark, or of a stop text, comes with a later response.

    Attributes:
        content: Text for the user.
        reasoning: Text between the tokenizer's think marks.
        tool_calls: Calls that are complete, as OpenAI's clients read them. A call that cannot be
            parsed is content.
        cached_tokens: Tokens of the prompt that the decode model's cache held before. (Where
            another model has begun the answer, these three count its tokens too.)
        translated_tokens: Those that went through the translator.
        read_tokens: Those that the decode model read itself, the last one among them.
        prefill_s: Seconds the prefill model took for the prompt; the decode model where it read
            the prompt itself (0 if it has a draft model as well: mlx-lm does not tell).
        translate_s: Seconds the translation took, cache write included.
        native_s: Seconds the decode model took for what it read itself of the prompt, but for
            its last token.
        ttft_s: Seconds from the call (models loaded) to the first token in hand.
        strategy: How the prompt was read: ``accelerator``, ``native`` or ``folded``; ``switch``
            in a conversation, whose own ``last_switch`` tells more.
        translator: The folder of the translator that was used, "made in this process" if it has
            none; None where nothing was translated. A conversation's can be several.
        translator_digest: What it computes, as a sha256 (``Translator.digest``).
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    cached_tokens: int = 0
    translated_tokens: int = 0
    read_tokens: int = 0
    prefill_s: float = 0.0
    translate_s: float = 0.0
    native_s: float = 0.0
    ttft_s: float = 0.0
    strategy: str = "switch"
    translator: str | None = None
    translator_digest: str | None = None


class GenerateOptions(DecodingOptions, total=False):
    """What :func:`generate` passes on to :func:`stream_generate`, for checkers and editors."""

    translator: Translator | str | os.PathLike[str] | None
    strategy: str
    max_tokens: int
    sampler: Sampler | None
    logits_processors: list[LogitsProcessor] | None
    prefill_step_size: int
    enable_thinking: bool | None
    native_layers: int | str | None
    native_head: int
    native_tail: int
    allow_mismatch: bool
    draft_model: Model | None
    num_draft_tokens: int


def check_max_tokens(max_tokens: int) -> None:
    """Refuse (ValueError) what is neither a positive number nor -1."""
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens}; give a positive number, or -1 for no limit")


@checked
def stream_generate(
    prefill_model: Model,
    decode_model: Model,
    prompt: Prompt,
    *,
    translator: Translator | str | os.PathLike[str] | None = None,
    strategy: str = "accelerator",
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prefill_step_size: int = 2048,
    enable_thinking: bool | None = None,
    native_layers: int | str | None = None,
    native_head: int = 0,
    native_tail: int = 0,
    allow_mismatch: bool = False,
    draft_model: Model | None = None,
    num_draft_tokens: int = 2,
    **options: Unpack[DecodingOptions],
) -> Generator[GenerationResponse, None, None]:
    """Prefill with one model, decode with another; yield a response a token.

    Arguments are those of :func:`generate`, ``options`` those of
    :class:`~kvlingo_mlx.handover.sampling.DecodingOptions`.

    Raises:
        UnsupportedModelError: mlx-lm cannot quantise a model's cache, or cannot take back
            rejected drafts from it; found before anything is prefilled. Else as
            :func:`generate`.
    """
    known = given(options, DecodingOptions, "a hand-over")
    choice = choice_of(known, sampler, logits_processors)
    decode_options = {name: known[name] for name in DECODE_OPTIONS if name in known}
    check_max_tokens(max_tokens)
    asked = native_layers, native_head, native_tail
    check_strategy(strategy)
    source, target = load_pair(
        prefill_model, decode_model, prompt, translator=translator, native=strategy == "native"
    )
    draft = _draft(draft_model, prefill_model, source)
    clock = Clock()
    tools = known.get("tools")
    check_tools(target, prompt, tools)
    tokens = encode(target, prompt, enable_thinking, tools=tools)
    way = strategy
    if strategy == "auto":
        way = _quickest(
            source, target, len(tokens), translator, allow_mismatch, *asked,
            step_size=prefill_step_size, source_drafts=draft is source,
        )  # fmt: skip
    check_tokens(target if way == "native" else source, target, tokens, prefill_step_size)
    check_caches((target,) if way == "native" else (source, target), len(tokens))
    if (bits := decode_options.get("kv_bits")) is not None:
        for model in (target,) if draft is None else (target, draft):
            check_bits(model, bits, decode_options.get("kv_group_size", 64))
    if draft is not None:
        check_drafting(target, draft, tokens, max_tokens, num_draft_tokens)
        decode_options |= {"draft_model": draft.model, "num_draft_tokens": num_draft_tokens}
    room = min(room_for(model, len(tokens), max_tokens) for model in (target, draft or target))
    resolved, native, across = None, Native(), None
    if len(tokens) > 1 and way != "native":
        resolved = resolve_translator(translator, source, target, allow_mismatch=allow_mismatch)
        native = native_part(resolved.config, *asked)
        tell_of_length(resolved.config, len(tokens))
        across = across_plan(source, target, prompt, resolved, native, enable_thinking, tools=tools)
    clock.lap("prepare")
    with wired(target.model):
        if way == "native":
            start = _native_start(tokens, prefill_step_size, clock)
        else:
            start = _translated_start(
                source, target, tokens, resolved, native, prefill_step_size, clock, draft, across
            )
        choice.begin()
        processors = with_prefix(choice.logits_processors, tokens[: -len(start["prompt"])])
        responses = mlx_stream_generate(
            target.model,
            target.tokenizer,
            max_tokens=room,
            sampler=choice.sampler,
            logits_processors=processors,
            **start,
            **decode_options,
        )
        translated = _translated(target, len(tokens), resolved, native, across)
        reader = AnswerReader(target.tokenizer, tokens, choice.stop, tools)
        held = start.get("prompt_cache", ())
        yield from answered(
            responses, reader, clock, Counts.of(len(tokens), translated), way,
            lambda first: check_numbers(first, source, target, held, processors), resolved,
        )  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Where the tokens before an answer come from.

    Attributes:
        prompt: Those of the prompt.
        cached: Those that the model's cache held before.
        translated: Those that went through the translator.
        read: Those that the model read itself, the last one among them.
    """

    prompt: int
    cached: int
    translated: int
    read: int

    @classmethod
    def of(cls, prompt: int, translated: int) -> Counts:
        """Of a prompt of which the model's cache held nothing."""
        return cls(prompt, 0, translated, prompt - translated)


def _translated(
    target: LanguageModel,
    num_tokens: int,
    translator: Translator | None,
    native: Native,
    across: Handover | None,
) -> int:
    """How many of a prompt's tokens come through the translator."""
    if translator is None:
        return 0
    if across is not None:
        return num_tokens - 1 - len(across.own)
    return len(native.translated(num_tokens - 1, len(target.attentions)))


def answered(
    responses: Generator[MLXResponse, None, None],
    reader: AnswerReader,
    clock: Clock,
    counts: Counts,
    strategy: str,
    check: Callable[[MLXResponse], None],
    translator: Translator | None = None,
) -> Iterator[GenerationResponse]:
    """mlx-lm's responses as ours, up to a stop text; the first one is checked.

    They came by ``translator``, if anything was translated.
    """
    ttft, used = None, () if translator is None else (translator,)
    with contextlib.closing(in_turn(responses)) as steps:
        for response in steps:
            if ttft is None:
                ttft = time.perf_counter() - clock.started
                check(response)
            booked = timed(response, counts, ttft, clock.seconds, strategy, used)
            told = reader.take(booked)
            yield told
            if told.finish_reason is not None:
                return


def check_strategy(strategy: str) -> None:
    """Refuse what is no way to read a prompt.

    Raises:
        ValueError: Says which there are; a switch needs a source that holds the conversation.
    """
    if strategy == "switch":
        raise ValueError(
            "strategy is 'switch', but nobody has read this prompt yet; switches are made by "
            "Conversation and `kvlingo-mlx chat`; give accelerator, native or auto"
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; give accelerator, native or auto")


def _quickest(
    source: LanguageModel,
    target: LanguageModel,
    num_tokens: int,
    translator: Translator | str | os.PathLike[str] | None,
    allow_mismatch: bool,
    native_layers: int | str | None,
    native_head: int,
    native_tail: int,
    *,
    step_size: int,
    source_drafts: bool,
) -> str:
    """The way that this machine's profile of the pair names for a prompt's length.

    A profile is of one choice of native layers and tokens and one size of chunks; times of another
    say nothing of it. A source that drafts reads the prompt whichever way is taken.
    """
    if num_tokens < 2:
        return "native"  # nothing to translate
    facts = translator_facts(translator, source, target, allow_mismatch=allow_mismatch)
    check_one_tokenizer(facts.config, "strategy auto")
    native = native_part(facts.config, native_layers, native_head, native_tail)
    if not native.translated(num_tokens - 1, len(target.attentions)):
        return "native"  # nothing would be translated
    key = timings.key_of(source, target, facts, native, step_size)
    names, given = (source.name, target.name), translator
    if given is not None:
        given = "FOLDER" if isinstance(given, Translator) else os.fspath(given)
    profile = timings.read(key, names, given, facts.config.native_layers)
    # What remains then is a switch, which a profile knows of plain translation alone.
    remains = "switch" if source_drafts and native == Native() else "accelerator"
    return "native" if profile.best(num_tokens, remains) == "native" else "accelerator"


def _native_start(tokens: Sequence[int], step_size: int, clock: Clock) -> dict[str, Any]:
    """The whole prompt for mlx-lm to read, the time of all but its last token booked."""

    def read(done: int, total: int) -> None:
        if done < total:
            clock.lap("prefill" if done else "prepare")

    return {
        "prompt": tokens, "prefill_step_size": step_size, "prompt_progress_callback": read,
    }  # fmt: skip


def _translated_start(
    source: LanguageModel,
    target: LanguageModel,
    tokens: Sequence[int],
    translator: Translator | None,
    native: Native,
    step_size: int,
    clock: Clock,
    draft: LanguageModel | None,
    across: Handover | None = None,
) -> dict[str, Any]:
    """The last token for mlx-lm to run, and caches of all before it, a draft's own too."""
    draft_cache = [] if draft is None else make_prompt_cache(draft.model)
    own = draft_cache if draft is source and across is None else None
    if across is not None and translator is not None:
        cache = hand_over_across(source, target, translator, across, step_size, clock)
    else:
        cache = translated_cache(source, target, tokens, translator, native, step_size, clock, own)
    if draft is not None and own is None:
        with mx.stream(generation_stream):
            for _ in capture.prefill(draft, tokens[:-1], step_size, draft_cache):
                pass
        clock.lap("draft")
    cache += draft_cache  # no second list: mlx-lm lets go of what it quantises in this one
    return {"prompt": tokens[-1:], "prompt_cache": cache}


def _draft(
    draft_model: Model | None, prefill_model: Model, source: LanguageModel
) -> LanguageModel | None:
    """The draft model, which may be the prefill model by the same name, loaded already."""
    if draft_model is None:
        return None
    if not isinstance(draft_model, LanguageModel) and draft_model == prefill_model:
        return source
    return load(draft_model)


def check_drafting(
    target: LanguageModel,
    draft: LanguageModel,
    tokens: Sequence[int],
    max_tokens: int,
    num_draft_tokens: int,
) -> None:
    """Refuse a draft model that cannot draft for ``target`` after ``tokens``.

    Raises:
        ValueError: Another vocabulary, or a number without meaning.
        UnsupportedModelError: mlx-lm cannot take back rejected drafts.
    """
    if max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens}; with a draft model give a positive number")
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}; it must be at least 1")
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise ValueError(
            f"the draft model {draft.name} has another vocabulary than {target.name}; "
            "give one with the same"
        )
    draft.check_tokens(tokens)
    check_draft(target, draft, len(tokens), max_tokens)


class Sound:
    """Whether a model's own logits are numbers, before any logits processor has them.

    It stands before a user's processors and changes nothing. It listens until the first response is
    checked, since a draft model's logits may come first.
    """

    def __init__(self) -> None:
        self._bad: list[mx.array] | None = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._bad is not None:
            self._bad.append(mx.isnan(logits).any())
        return logits

    def told(self) -> bool:
        """Whether all were numbers so far; the last question."""
        bad, self._bad = self._bad, None
        return bad is not None and len(bad) > 0 and not any(flag.item() for flag in bad)


def check_numbers(
    response: MLXResponse, source: LanguageModel, target: LanguageModel, cache: Sequence[Any],
    processors: Sequence[LogitsProcessor] | None = None,
) -> None:  # fmt: skip
    """Refuse a first prediction that is not a number: decoding would go on with token 0.

    ``cache`` is what it was made from; it is searched for the place only then. ``processors`` are
    :func:`with_prefix`'s, one of which may be to blame.
    """
    sound = processors[0] if processors else None
    with working():
        blameless = isinstance(sound, Sound) and sound.told()
        bad = mx.isnan(response.logprobs).any().item()
        place = first_bad(cache, target) if bad and not blameless else None
    if bad:
        if blameless:
            raise ValueError(
                "logits_processors made the first prediction not a number, while the logits of "
                f"{target.name} are numbers: one of them returns NaN, or rules out every token "
                "(-inf everywhere); leave a token to choose"
            )
        raise KVLingoError(
            f"the first prediction of {target.name} after the hand-over from {source.name} is not "
            "a number: the translator's output overflows, or the model's weights are damaged"
            + (f" (NaN or Inf first in {place})" if place else "")
        )


def with_prefix(
    processors: list[LogitsProcessor] | None, prefix: Sequence[int]
) -> list[LogitsProcessor] | None:
    """Processors that see the whole prompt, though mlx-lm is only given its last token.

    The first of them is a :class:`Sound` of ours.
    """
    if not processors:
        return None
    head = mx.array(list(prefix))

    def whole(processor: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: processor(mx.concatenate([head, tokens]), logits)

    return [Sound(), *(map(whole, processors) if prefix else processors)]


def timed(
    response: MLXResponse,
    counts: Counts,
    ttft_s: float,
    seconds: Mapping[str, float],
    strategy: str = "switch",
    used: Sequence[Translator] = (),
) -> GenerationResponse:
    """mlx-lm's response, with the whole prompt counted and a hand-over's times by phase.

    ``used`` are the translators that it came by.
    """
    values = {f.name: getattr(response, f.name) for f in fields(MLXResponse)}
    values |= {"prompt_tokens": counts.prompt}
    values |= {"prompt_tps": (counts.translated + counts.read) / ttft_s}
    values |= {"cached_tokens": counts.cached, "translated_tokens": counts.translated}
    values |= {"read_tokens": counts.read}
    values |= {f"{name}_s": seconds.get(name, 0.0) for name in PHASES}
    if used:
        values["translator"] = ", ".join(str(t.path or "made in this process") for t in used)
        values["translator_digest"] = ", ".join(t.digest for t in used)
    return GenerationResponse(**values, ttft_s=ttft_s, strategy=strategy)


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

    Any thread may call this on models that others use; they take turns, a chunk or a token at a
    time (:mod:`kvlingo_mlx.threads`).

    Args:
        prefill_model: Reads the prompt: a folder, a Hub id or a loaded model.
        decode_model: Writes the answer; likewise.
        prompt: Text, token ids, or chat messages, which the decode model's own chat
            template renders.
        verbose: Write the text as it comes, and the times at the end.
        options: ``translator`` (loaded, a folder or Hub id; None searches the local
            store), ``strategy`` (``accelerator``; ``native``: the decode model reads the prompt
            itself; ``auto``: whichever `kvlingo-mlx bench --save-profile` found to be sooner at
            such a length), ``max_tokens`` (256; -1 and more than the context leave room for
            end with it, ``finish_reason`` "length"), ``temperature``, ``top_p``, ``top_k``,
            ``min_p``, ``repetition_penalty``, ``seed``, ``stop`` (a text, or several, before
            which the answer ends), ``tools`` (which the chat template announces), or mlx-lm's
            own ``sampler`` and ``logits_processors``,
            ``prefill_step_size`` (2048), ``enable_thinking`` (the template's switch; off
            puts the empty think block into the prompt), ``native_layers``, ``native_head`` and
            ``native_tail`` (what the decode model reads itself, as in :func:`hand_over`),
            ``allow_mismatch``; ``draft_model``
            (speculative decoding as mlx-lm does it; the prefill model can serve, and then
            reads the prompt only once) and ``num_draft_tokens`` (2); the rest as in
            :func:`stream_generate`.

    Returns:
        The answer, without the prompt.

    Raises:
        ValueError: An empty prompt, one beyond a model's context, or a bad argument.
        MissingModelError, UnsupportedModelError: A model cannot be used, or not so.
        NotEnoughMemoryError: The models, the translator and the prompt's caches do not fit.
        MissingTranslatorError, IncompatibleTranslatorError, MalformedTranslatorError: No
            translator for this pair can be used.
        MissingProfileError, MalformedProfileError: ``auto`` has no profile to go by.
    """
    return joined(stream_generate(prefill_model, decode_model, prompt, **options), verbose)


def joined(responses: Iterable[GenerationResponse], verbose: bool) -> str:
    """The text of an answer; ``verbose`` writes it as it comes, and the times at the end."""
    text, response = "", None
    for response in responses:
        text += response.text
        if verbose:
            sys.stdout.write(response.text)
            sys.stdout.flush()
    if verbose and response is not None:
        sys.stdout.write(f"\n{'=' * 10}\n{summary(response)}\n")
    return text


def summary(response: GenerationResponse) -> str:
    """The times and rates of a finished generation, in lines; of phases, those that took time."""
    phases = {
        "prefill": response.prefill_s,
        "the decode model's own part": response.native_s,
        "translation": response.translate_s,
    }
    spent = ", ".join(f"{name} {s:.3f} s" for name, s in phases.items() if s >= 0.0005)
    digest = response.translator_digest
    used = "" if digest is None else f"Translator: {response.translator} (sha256 {digest[:12]})\n"
    return (
        f"Prompt: {response.prompt_tokens} tokens ({response.strategy}), "
        f"first token after {response.ttft_s:.3f} s{spent and f' ({spent})'}\n"
        f"{used}Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB"
    )


__all__ = ["GenerationResponse", "generate", "stream_generate"]
