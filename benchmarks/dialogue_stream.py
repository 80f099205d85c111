"""Generated dialogues as a training stream; a sample's continuation asks and answers six facts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvlingo_mlx.embedded.dialogues import Dialogue, dialogue, held_out
from kvlingo_mlx.evaluation.continuation import recall_sample
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample, other_tokenizer


class DialogueStream:
    """Samples by number, and held-out ones.

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
        found = held_out(count, **self._options)
        return [self._cut(dialogue, index) for index, dialogue in enumerate(found)]

    def _cut(self, dialogue: Dialogue, index: int) -> Sample:
        sample = recall_sample(self.model, dialogue, self.source)
        cut = random.Random(index).choice(sample.answers) if self.turns else 0
        prefix, rest = sample.prefix + sample.continuation[:cut], sample.continuation[cut:]
        return Sample(prefix, rest, sample.aligned)


def for_distilling(
    index: int, *, seed: int = 0, facts: tuple[int, int] = (4, 28), questions: int = 6
) -> Dialogue:
    """Dialogue number ``index`` of an endless stream, disjoint from those of the package."""
    rng = random.Random(f"distil/{seed}/{index}")
    return dialogue(rng, rng.randint(*facts), questions)
