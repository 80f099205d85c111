"""How an answer's tokens are chosen, by checked arguments with the names of mlx-lm's server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from kvlingo_mlx.backend import mx

from mlx_lm.sample_utils import make_logits_processors, make_sampler

from kvlingo_mlx.loading.models import Model
from kvlingo_mlx.options import SamplingOptions, check

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class AnswerOptions(TypedDict, total=False):
    """How an answer's tokens are chosen, and where it ends; None leaves an option out."""

    # 0, the default, takes the likeliest token; above 0, tokens are sampled
    temperature: float | None
    top_p: float | None  # samples from the likeliest tokens that make up this share; 1 is off
    top_k: int | None  # samples from this many of the likeliest tokens; 0 is off
    # Leaves out tokens with less than this share of the likeliest one's probability; 0 is off
    min_p: float | None
    # Makes the last 20 tokens, prompt included, less likely; 1 is off
    repetition_penalty: float | None
    seed: int | None  # seeds the random numbers for sampling, which the whole process shares
    # A text, or several, before which the answer ends, ``finish_reason`` "stop". Within the
    # reasoning and calls they count for nothing.
    stop: str | Sequence[str] | None
    # The tools that the chat template announces, in OpenAI's form
    tools: Sequence[Mapping[str, Any]] | None


class DecodingOptions(AnswerOptions, total=False):
    """The options of an answer, and by whom it is drafted."""

    max_tokens: int
    sampler: Sampler | None
    logits_processors: list[LogitsProcessor] | None
    enable_thinking: bool | None
    draft_model: Model | None
    num_draft_tokens: int | None


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen, and before which texts the answer ends."""

    sampler: Sampler | None = None  # mlx-lm's sampler; None is greedy
    logits_processors: list[LogitsProcessor] | None = None  # mlx-lm's logits processors
    seed: int | None = None  # the seed of the random numbers, or None
    stop: tuple[str, ...] = ()  # the stop texts, none of them empty


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The ``options`` that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def sampler_of(options: Mapping[str, Any]) -> Sampler | None:
    """mlx-lm's sampler, of those of its options that are given; None is greedy."""
    if not options.get("temperature"):
        return None
    names = "top_p min_p top_k xtc_probability xtc_threshold".split()
    return make_sampler(
        options["temperature"], **{name: options[name] for name in names if name in options}
    )


def choice_of(options: Mapping[str, Any]) -> Choice:
    """How tokens are chosen, from the :class:`DecodingOptions` that are given.

    Raises:
        ValueError: A value is out of range, or an option would have no effect.
    """
    check(SamplingOptions, options)
    penalty, processors = options.get("repetition_penalty"), [*options.get("logits_processors", ())]
    if penalty not in (None, 0, 1):  # the last two are off
        processors += make_logits_processors(repetition_penalty=penalty)
    stop = options.get("stop") or ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    sampler = options["sampler"] if "sampler" in options else sampler_of(options)
    return Choice(sampler, processors or None, options.get("seed"), texts)
