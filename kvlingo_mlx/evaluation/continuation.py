"""Quality of the continuations of a prefix from a cache: native, translated, or a control."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlingo_mlx.embedded.dialogues import ANSWER, Dialogue, for_distilling, held_out
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, native
from kvlingo_mlx.evaluation.teacher_forcing import PerToken, per_token, predicted
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.renderings import bare
from kvlingo_mlx.tokenization.samples import Sample, asked_next, between, other_tokenizer, said


@dataclass(frozen=True)
class RecallSample:
    """A prefix, its continuation, and the places of recalled values in the continuation."""

    prefix: tuple[int, ...]  # token ids up to and including the header that opens the first answer
    continuation: tuple[int, ...]  # answers and further questions; no fact is asked twice
    # For each question, the continuation indices of the value's tokens.
    recalled: tuple[tuple[int, ...], ...]
    # For each question, the continuation index at which its answer begins.
    answers: tuple[int, ...] = (0,)
    # The prefix in the tokens of two tokenizers; None where there is one tokenizer.
    aligned: AlignedPrefix | None = field(default=None, compare=False, repr=False)

    @property
    def read(self) -> Prefix:
        """The prefix in the form that conditions take."""
        return self.prefix if self.aligned is None else self.aligned


@dataclass(frozen=True)
class Score:
    """The results of one condition for one target."""

    # Per question, whether every token of the value was the model's first choice.
    hits: tuple[bool, ...]
    # Per sample, the mean KL(native || condition) over the continuation, in nats.
    kl: tuple[float, ...]
    value_kl: tuple[float, ...]  # per sample, the same mean over the recalled values' tokens only

    @property
    def recall(self) -> float:
        """The share of questions answered correctly."""
        return float(np.mean(self.hits))


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
    prefix = encode(model, dialogue.messages, enable_thinking=False)
    aligned = _aligned_prefix(model, dialogue, source)
    return RecallSample(tuple(prefix), tuple(read.ids.tolist()), recalled, answers, aligned)


def _aligned_prefix(
    model: LanguageModel, dialogue: Dialogue, source: LanguageModel | None
) -> AlignedPrefix | None:
    """The dialogue's prefix in both models' tokens; None if ``source`` has the same tokenizer."""
    if source is None or other_tokenizer(source.tokenizer, model.tokenizer) is None:
        return None
    ends = source.tokenizer, model.tokenizer
    return between(dialogue.messages, *ends, enable_thinking=False).aligned


class DialogueStream:
    """Dialogues as a training stream; a sample's continuation asks and answers six facts.

    ``model``'s own template tokenises the prefix, as in :func:`recall_sample`. ``facts`` are the
    least and the largest number of facts in a dialogue. With ``turns``, a prefix ends at any of the
    questions and includes the earlier questions and answers, as in a longer conversation.
    ``source`` is the model that reads the prefix first, if it may have another tokenizer.
    """

    def __init__(
        self,
        model: LanguageModel,
        seed: int = 0,
        facts: Sequence[int] | None = None,
        *,
        turns: bool = False,
        source: LanguageModel | None = None,
    ) -> None:
        self.model, self.seed, self.turns, self.source = model, seed, turns, source
        if turns and source and other_tokenizer(source.tokenizer, model.tokenizer):
            raise ValueError(
                "turns are cut by one tokenizer, and this pair has two; leave them out"
            )
        self._options: dict[str, Any] = {"facts": tuple(facts)} if facts else {}

    def sample(self, index: int) -> Sample:
        """Sample number ``index``, which is the same at each call."""
        return self._cut(for_distilling(index, seed=self.seed, **self._options), index)

    def held_out(self, count: int = 64) -> list[Sample]:
        """The first ``count`` held-out dialogues, which no seed's stream contains."""
        talks = held_out(count, **self._options)
        return [self._cut(talk, index) for index, talk in enumerate(talks)]

    def _cut(self, talk: Dialogue, index: int) -> Sample:
        sample = recall_sample(self.model, talk, self.source)
        cut = random.Random(index).choice(sample.answers) if self.turns else 0
        prefix, rest = sample.prefix + sample.continuation[:cut], sample.continuation[cut:]
        return Sample(prefix, rest, sample.aligned)


def score(
    target: LanguageModel,
    samples: Sequence[RecallSample],
    conditions: dict[str, CacheMaker],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Score every condition against the target's own cache, on each fact's first question.

    Returns:
        A score for "native" and for each condition.
    """
    makers = {"native": native(target), **conditions}
    found = []
    for sample in samples:
        found.append(_scores(target, sample, makers))
        progress()
    scores = {}
    for name in makers:
        rows = [each[name] for each in found]
        hits = tuple(hit for row in rows for hit in row[0])
        scores[name] = Score(hits, tuple(row[1] for row in rows), tuple(row[2] for row in rows))
    return scores


def _scores(
    target: LanguageModel, sample: RecallSample, makers: Mapping[str, CacheMaker]
) -> dict[str, list[Any]]:
    """Of each condition, the native one first: hits, KL, and KL of the recalled values."""
    reference: list = []
    scores = {}
    for name, make in makers.items():
        logs = predicted(target, make, sample)
        reference = reference or list(logs)
        own = reference if name == "native" else logs
        found = per_token(reference, own, sample.continuation)
        value = found.kl[[i for row in sample.recalled for i in row]]
        scores[name] = [hits_of(found, sample), float(found.kl.mean()), float(value.mean())]
    return scores


def hits_of(found: PerToken, sample: RecallSample) -> list[bool]:
    """Per question, whether every token of the value was the first choice."""
    right = found.best == np.array(sample.continuation)
    return [bool(right[list(indices)].all()) for indices in sample.recalled]
