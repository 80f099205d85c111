"""DroidSpeak's offline profiler, which chooses how many layers the target recomputes.

The group of recomputed layers starts at the first layer, since the two models' hidden states differ
in width (appendix "Comparison with DroidSpeak").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation.conditions import native, reused
from kvlingo_mlx.evaluation.teacher_forcing import per_token, predicted
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample, to_samples

SHARE = 0.05  # the share of verbatim reuse's KL that may remain
PROFILED = 8


def choose(
    source: LanguageModel, target: LanguageModel, samples: Sequence[Sample] | None = None
) -> int:
    """The fewest recomputed layers that leave at most ``SHARE`` of verbatim reuse's KL.

    The KL is measured at every number of layers, on ``samples`` (default: a few generated dialogues
    that no evaluation uses).

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
    kls = profile(source, target, samples)
    return next(j for j, kl in enumerate(kls) if kl <= SHARE * kls[0])


def bundled(target: LanguageModel) -> list[Sample]:
    """Generated dialogues for the profiler."""
    talks = ({"messages": t.conversation()} for t in dialogues.for_fitting(PROFILED, seed=1))
    return list(to_samples(talks, target.tokenizer, target.context_length))


def profile(source: LanguageModel, target: LanguageModel, samples: Sequence[Sample]) -> list[float]:
    """The mean KL(native || reuse above j) over the samples, for j from 0 to all layers."""
    layers = len(target.attentions)
    sums = np.zeros(layers + 1)
    for sample in samples:
        reference = list(predicted(target, native(target), sample))
        for j in range(layers):  # with all layers it is the target's own cache
            logs = predicted(target, reused(source, target, j), sample)
            sums[j] += per_token(reference, logs, sample.continuation).kl.mean()
    return (sums / len(samples)).tolist()
