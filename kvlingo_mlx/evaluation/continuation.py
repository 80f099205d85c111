"""A known continuation of a prefix, read token by token from a cache: what the target predicts.

Logits are computed one block of tokens at a time. Only the target's own predictions are kept for a
whole continuation, (M, V) in float32, since those from every other cache are compared with them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np

from kvlingo_mlx.embedded.dialogues import ANSWER, Dialogue
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, native
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization.renderings import bare
from kvlingo_mlx.tokenization.samples import Sample, asked_next, between, other_tokenizer, said

BLOCK = 256  # tokens; with a vocabulary of 150k one block is 150 MB


@dataclass(frozen=True)
class RecallSample(Sample):
    """A sample with the places of recalled values; its continuation asks no fact twice."""

    # For each question, the continuation indices of the value's tokens.
    recalled: tuple[tuple[int, ...], ...] = ()
    # For each question, the continuation index at which its answer begins.
    answers: tuple[int, ...] = (0,)

    @property
    def read(self) -> Prefix:
        """The prefix in the form that conditions take."""
        return self.prefix if self.aligned is None else self.aligned


def recall_sample(
    model: LanguageModel, dialogue: Dialogue, source: LanguageModel | None = None
) -> RecallSample:
    """Tokenise a dialogue for the target ``model`` and, if given, for a ``source``.

    The source may have another tokenizer.
    """
    text, before = "", ("", "")
    spans: list[tuple[int, int]] = []
    begins: list[int] = []
    for index, (fact, question) in enumerate(zip(dialogue.asked, dialogue.questions, strict=True)):
        answer = fact.say(ANSWER)
        if index:
            text += asked_next(*before, question, model.tokenizer)
        before = question, answer
        begins.append(len(text))
        text += said(question, answer, model.tokenizer)
        start = text.rindex(answer) + answer.rindex(fact.value)
        spans.append((start, start + len(fact.value)))
    read = bare(model.tokenizer, text)
    recalled = tuple(
        tuple(np.flatnonzero((start < read.ends) & (read.ends <= stop)).tolist())
        for start, stop in spans
    )
    answers = tuple(int(np.flatnonzero(read.ends > begin)[0]) for begin in begins)
    prefix, aligned = encode(model, dialogue.messages, enable_thinking=False), None
    if source is not None and other_tokenizer(source.tokenizer, model.tokenizer) is not None:
        ends = source.tokenizer, model.tokenizer
        aligned = between(dialogue.messages, *ends, enable_thinking=False).aligned
    return RecallSample(tuple(prefix), tuple(read.ids.tolist()), aligned, recalled, answers)


@dataclass(frozen=True)
class PerToken:
    """The predictions at each of M continuation tokens."""

    kl: np.ndarray  # (M,) KL(native || this), in nats
    nll: np.ndarray  # (M,) minus the log probability of the true token, in nats
    best: np.ndarray  # (M,) the token id of the highest probability

    def hits(self, sample: RecallSample) -> list[bool]:
        """Per question, whether every token of the value was the first choice."""
        right = self.best == np.array(sample.continuation)
        return [bool(right[list(indices)].all()) for indices in sample.recalled]


def log_probabilities(
    target: LanguageModel, cache: list, last: int, continuation: Sequence[int]
) -> Iterator[mx.array]:
    """The target's log probabilities at each continuation token, as (at most BLOCK, V) blocks.

    ``cache`` holds the tokens before ``last``; it cannot be used again afterwards.
    """
    tokens = [last, *continuation[:-1]]
    for start in range(0, len(tokens), BLOCK):
        block = mx.array(tokens[start : start + BLOCK])
        logits = target.model(block[None], cache=cache)[0]
        yield nn.log_softmax(logits.astype(mx.float32))


def predicted(target: LanguageModel, make: CacheMaker, sample: Any) -> Iterator[mx.array]:
    """:func:`log_probabilities` of a sample's continuation, from the cache that ``make`` fills."""
    cache = make(sample.aligned or sample.prefix)
    return log_probabilities(target, cache, sample.prefix[-1], sample.continuation)


def per_token(
    reference: Iterable[mx.array], blocks: Iterable[mx.array], continuation: Sequence[int]
) -> PerToken:
    """Compare the predictions from a cache with the target's own (``reference``)."""
    parts: list[tuple[np.ndarray, ...]] = []
    start = 0
    for own, logs in zip(reference, blocks, strict=True):
        true = mx.array(list(continuation[start : start + len(logs)]))[:, None]
        kl = (mx.exp(own) * (own - logs)).sum(axis=-1)
        nll = -mx.take_along_axis(logs, true, axis=-1)[:, 0]
        parts.append(tuple(np.array(a) for a in (kl, nll, mx.argmax(logs, axis=-1))))
        start += len(logs)
    return PerToken(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def comparer(target: LanguageModel, sample: Any) -> Callable[[CacheMaker | None], PerToken]:
    """A function from a way to make a cache to what it predicts; None is the target's own way.

    The target reads the sample once, now.
    """
    reference = list(predicted(target, native(target), sample))
    own = per_token(reference, reference, sample.continuation)

    def compare(make: CacheMaker | None) -> PerToken:
        if make is None:
            return own
        return per_token(reference, predicted(target, make, sample), sample.continuation)

    return compare
