"""DroidSpeak's offline profiler, which chooses how many layers the target recomputes.

The group of recomputed layers starts at the first layer, since the two models' hidden states differ
in width (appendix "Comparison with DroidSpeak").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.paper.evaluation.reuse import Reuse
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation.continuation import per_token, predicted
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample, to_samples

SHARE = 0.05  # the share of verbatim reuse's KL that may remain
PROFILED = 8


@dataclass(frozen=True)
class Profile:
    """What the profiler measured.

    Attributes:
        kls: The mean KL(native || reuse above j) over the samples, for j from 0 to all layers.
        samples: The number of samples.
    """

    kls: tuple[float, ...]
    samples: int

    @property
    def recomputed(self) -> int:
        """The fewest recomputed layers that leave at most ``SHARE`` of verbatim reuse's KL."""
        return next(j for j, kl in enumerate(self.kls) if kl <= SHARE * self.kls[0])


def choose(
    source: LanguageModel, target: LanguageModel, samples: Sequence[Sample] | None = None
) -> int:
    """The number of layers to recompute (see :func:`measured`)."""
    return measured(source, target, samples).recomputed


def spelt(
    spec: str, source: LanguageModel, target: LanguageModel, samples: Sequence[Sample] | None = None
) -> str:
    """A baseline's name as the line-up takes it: ``droidspeak`` gets the number that is chosen."""
    return f"{spec}:{choose(source, target, samples)}" if spec == "droidspeak" else spec


def measured(
    source: LanguageModel, target: LanguageModel, samples: Sequence[Sample] | None = None
) -> Profile:
    """The KL at every number of recomputed layers.

    It is measured on ``samples`` (default: a few generated dialogues that no evaluation uses).

    Raises:
        IncompatibleTranslatorError: The two caches differ in shape.
        ValueError: There are no samples.
    """
    samples = bundled(target) if samples is None else samples
    if not samples:
        raise ValueError(
            f"no dialogue to profile fits {target.name}'s context of {target.context_length} "
            "tokens; give droidspeak:J, the number of layers"
        )
    return Profile(tuple(profile(source, target, samples)), len(samples))


def bundled(target: LanguageModel) -> list[Sample]:
    """Generated dialogues for the profiler."""
    talks = ({"messages": t.conversation()} for t in dialogues.for_fitting(PROFILED, seed=1))
    return list(to_samples(talks, target.tokenizer, target.context_length))


def profile(source: LanguageModel, target: LanguageModel, samples: Sequence[Sample]) -> list[float]:
    """The mean KL(native || reuse above j) over the samples, for j from 0 to all layers.

    Each model reads a sample's prefix once; only its continuation is read for every j.
    """
    reuse = Reuse(source, target)
    makers = [reuse.maker(j) for j in range(reuse.layers + 1)]
    sums = np.zeros(len(makers))
    for sample in samples:
        # With all layers it is the target's own cache.
        reference = list(predicted(target, makers[-1], sample))
        for j, make in enumerate(makers[:-1]):
            logs = predicted(target, make, sample)
            sums[j] += per_token(reference, logs, sample.continuation).kl.mean()
    return (sums / len(samples)).tolist()
