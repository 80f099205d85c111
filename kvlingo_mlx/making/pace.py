"""How fast this machine trains a pair, and which lengths it has time for."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.closed_form import ENOUGH, unknowns
from kvlingo_mlx.tokenization.samples import MAX_PREFIX, Sample
from kvlingo_mlx.training.initial import drawn
from kvlingo_mlx.training.mixture import Mixture
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.runtime import Pair

BATCH, ANSWERS = 4, 512  # conversations a step; tokens to which answers are cut
STEPS = 300  # that there should be time for; most of the KL falls in the first hundred
SHORTEST = 512  # tokens: no training reads less at most
PROBE = 1024  # tokens of the longest prefix that the pace is measured with
DISTILLING = 0.7  # the share of the time that stage 2 is given
MEAN = 0.6  # the mean prefix of the mixture, as a share of its longest


def cost(prefix: float, continuation: float) -> float:
    """What a conversation costs, in tokens read once by one model.

    Both models read the prefix. The target reads the continuation from its own cache and from the
    translated one, and the backward pass costs two such readings.
    """
    return 2 * prefix + 4 * continuation


def seconds_per_token(pair: Pair, config: TranslatorConfig, samples: list[Sample]) -> float:
    """The seconds per unit of :func:`cost`, over all samples but the first, which warms up."""
    made, seconds, tokens = pair.trainable(config, drawn(config)), 0.0, 0.0
    for number, sample in enumerate(samples):
        started = time.perf_counter()
        pair.loss(made, pair.read(sample, config), objective_named("kl"), 1.0)
        if number:
            seconds += time.perf_counter() - started
            tokens += cost(len(sample.prefix), len(sample.continuation))
    return seconds / tokens


@dataclass(frozen=True)
class Lengths:
    """What there is time for.

    Attributes:
        max_prefix: The longest prefix, in tokens, before it is scaled to the models' context.
        max_continuation: The tokens to which answers are cut.
        fit_samples: The conversations for a closed form.
        steps: About how many steps there is time for.
        pace: The seconds per token that this rests on.
    """

    max_prefix: int
    max_continuation: int
    fit_samples: int
    steps: int
    pace: float

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))


def lengths(pace: float, seconds: float, context: int, widest: TranslatorConfig) -> Lengths:
    """The longest prefixes that leave time for :data:`STEPS` steps, or else the shortest ones.

    Args:
        pace: The seconds per token, as :func:`seconds_per_token` measures them.
        seconds: The time for everything.
        context: The tokens of the shorter context.
        widest: The config of the translator with the most unknowns that may be fitted.
    """
    longest = MAX_PREFIX
    while True:
        mixture = Mixture().limited(longest, ANSWERS).scaled(context)
        prefix, answer = mixture.max_prefix, mixture.max_continuation
        step = BATCH * cost(MEAN * prefix, answer) * pace
        steps = int(DISTILLING * seconds / step)
        if steps >= STEPS or longest // 2 < SHORTEST:
            break
        longest //= 2
    wanted = 2 * ENOUGH * unknowns(widest) / (MEAN * prefix)
    return Lengths(longest, ANSWERS, min(400, max(64, math.ceil(wanted))), max(1, steps), pace)
