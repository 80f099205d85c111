"""How well a model continues a prefix from a cache: native, translated, or a control."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlingo_mlx.embedded.dialogues import ANSWER, Dialogue, for_distilling, held_out
from kvlingo_mlx.evaluation.conditions import CacheMaker, native
from kvlingo_mlx.evaluation.teacher_forcing import PerToken, log_probabilities, per_token
from kvlingo_mlx.language_model import LanguageModel
from kvlingo_mlx.prompts import encode
from kvlingo_mlx.samples import Sample


@dataclass(frozen=True)
class RecallSample:
    """A prefix, its continuation, and where in it recalled values stand.

    Attributes:
        prefix: Token ids up to and including the header that opens the first answer.
        continuation: Answers and further questions; no fact is asked twice.
        recalled: For each question, the continuation indices of the value's tokens.
        answers: For each question, the continuation index at which its answer begins.
    """

    prefix: tuple[int, ...]
    continuation: tuple[int, ...]
    recalled: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Score:
    """Sums over samples of one condition, for one target.

    Attributes:
        hits: Per question, whether every token of the value was the model's first choice.
        kl: Per sample, mean KL(native || condition) over the continuation, in nats.
        value_kl: Per sample, the same over the recalled values' tokens only.
    """

    hits: tuple[bool, ...]
    kl: tuple[float, ...]
    value_kl: tuple[float, ...]

    @property
    def recall(self) -> float:
        """Share of questions answered right."""
        return float(np.mean(self.hits))


def recall_sample(model: LanguageModel, dialogue: Dialogue) -> RecallSample:
    """Tokenise a dialogue for a pair that shares ``model``'s tokenizer and template."""
    text, spans, begins = "", [], []
    for index, (fact, question) in enumerate(zip(dialogue.asked, dialogue.questions, strict=True)):
        if index:
            text += "\n" + _open(model, question)
        answer = fact.say(ANSWER)
        begins.append(len(text))
        start = len(text) + answer.rindex(fact.value)
        spans.append((start, start + len(fact.value)))
        text += answer + model.tokenizer.eos_token
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    # Dialogues are ASCII, so a token is as long in the text as when decoded alone.
    ends = np.cumsum([len(model.tokenizer.decode([token])) for token in tokens])
    assert ends[-1] == len(text)
    recalled = tuple(
        tuple(np.flatnonzero((start < ends) & (ends <= stop)).tolist()) for start, stop in spans
    )
    prefix = encode(model, dialogue.messages, enable_thinking=False)
    answers = tuple(int(np.searchsorted(ends, begin, side="right")) for begin in begins)
    return RecallSample(tuple(prefix), tuple(tokens), recalled, answers)


def _open(model: LanguageModel, question: str) -> str:
    """A user turn and the header that opens the reply, as the template renders them."""
    return model.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


class DialogueStream:
    """Dialogues as a training stream: a sample's continuation asks and answers six facts.

    The prefix is tokenised by ``model``'s own template, as :func:`recall_sample` has it. ``facts``
    are the fewest and most a dialogue states. With ``turns`` a prefix ends at any of its questions,
    those before it and their answers included, as the prefix of a conversation that goes on does.
    """

    def __init__(
        self,
        model: LanguageModel,
        seed: int = 0,
        facts: Sequence[int] | None = None,
        *,
        turns: bool = False,
    ) -> None:
        self.model, self.seed, self.turns = model, seed, turns
        self._options: dict[str, Any] = {"facts": tuple(facts)} if facts else {}

    def sample(self, index: int) -> Sample:
        """Sample number ``index``, the same whenever it is asked for."""
        return self._cut(for_distilling(index, seed=self.seed, **self._options), index)

    def held_out(self, count: int = 64) -> list[Sample]:
        """The first ``count`` held-out dialogues, which no seed's stream contains."""
        talks = held_out(count, **self._options)
        return [self._cut(talk, index) for index, talk in enumerate(talks)]

    def _cut(self, talk: Dialogue, index: int) -> Sample:
        sample = recall_sample(self.model, talk)
        cut = random.Random(index).choice(sample.answers) if self.turns else 0
        return Sample(sample.prefix + sample.continuation[:cut], sample.continuation[cut:])


def score(
    target: LanguageModel,
    samples: Sequence[RecallSample],
    conditions: dict[str, CacheMaker],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Score every condition against the target's own cache, on first askings only.

    Returns:
        A score for "native" and for each condition.
    """
    makers = {"native": native(target), **conditions}
    sums: dict[str, tuple[list, list, list]] = {name: ([], [], []) for name in makers}
    for sample in samples:
        reference: list = []
        for name, make in makers.items():
            last, continuation = sample.prefix[-1], sample.continuation
            logs = log_probabilities(target, make(sample.prefix), last, continuation)
            reference = reference or list(logs)
            found = per_token(reference, reference if name == "native" else logs, continuation)
            hits, kls, value_kls = sums[name]
            hits += hits_of(found, sample)
            kls.append(float(found.kl.mean()))
            value_kls.append(float(found.kl[[i for row in sample.recalled for i in row]].mean()))
        progress()
    return {name: Score(*(tuple(part) for part in parts)) for name, parts in sums.items()}


def hits_of(found: PerToken, sample: RecallSample) -> list[bool]:
    """Per question, whether every token of the value was the first choice."""
    right = found.best == np.array(sample.continuation)
    return [bool(right[list(indices)].all()) for indices in sample.recalled]
