"""Recall and KL fact by fact, for whoever has cache makers and no conditions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvlingo_mlx.evaluation.conditions import CacheMaker
from kvlingo_mlx.evaluation.continuation import PerToken, RecallSample, comparer
from kvlingo_mlx.models.language_model import LanguageModel


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


def score(
    target: LanguageModel,
    samples: Sequence[RecallSample],
    conditions: Mapping[str, CacheMaker],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Score "native" and every condition against the target's own cache, fact by fact."""
    found: dict[str, list[tuple[PerToken, RecallSample]]] = {"native": []}
    for sample in samples:
        compare = comparer(target, sample)
        for name, make in {"native": None, **conditions}.items():
            found.setdefault(name, []).append((compare(make), sample))
        progress()
    return {
        name: Score(
            tuple(hit for each, sample in rows for hit in each.hits(sample)),
            tuple(float(each.kl.mean()) for each, _ in rows),
            tuple(float(each.kl[list(sum(s.recalled, ()))].mean()) for each, s in rows),
        )
        for name, rows in found.items()
    }
