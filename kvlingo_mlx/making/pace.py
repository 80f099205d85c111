"""How fast this machine trains a pair, and which lengths it has time for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
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
FEWEST_STEPS = 20  # fewer hardly change a closed form
SHORTEST = 512  # tokens: no training reads less at most
PROBE, PROBES = 256, 3  # tokens of the longest prefix that the pace is measured with; conversations
PROBING = 0.05  # the share of the time that this may take
STARTING, DISTILLING = 0.2, 0.7  # the shares of closed forms and of stage 2
MEAN = 0.6  # the mean prefix of the mixture, as a share of its longest


def cost(prefix: float, continuation: float) -> float:
    """What a conversation costs, in tokens read once by one model.

    Both models read the prefix. The target reads the continuation from its own cache and from the
    translated one, and the backward pass costs two such readings.
    """
    return 2 * prefix + 4 * continuation


def seconds_per_token(
    pair: Pair, config: TranslatorConfig, samples: list[Sample], seconds: float
) -> float:
    """The seconds per unit of :func:`cost`.

    The first sample warms up, and does not count unless it took a good part of ``seconds``.
    """
    made, spent, tokens = pair.trainable(config, drawn(config)), 0.0, 0.0
    for number, sample in enumerate(samples):
        started = time.perf_counter()
        pair.loss(made, pair.read(sample, config), objective_named("kl"), 1.0)
        took = time.perf_counter() - started
        if number or took > PROBING * seconds:
            spent += took
            tokens += cost(len(sample.prefix), len(sample.continuation))
        if took > PROBING * seconds:
            break
    return spent / tokens


@dataclass(frozen=True)
class Lengths:
    """What there is time for.

    Attributes:
        max_prefix: The longest prefix, in tokens, before it is scaled to the models' context.
        max_continuation: The tokens to which answers are cut.
        fit_samples: The conversations for a closed form.
        most: The most source layers that there is time to fit.
        steps: About how many steps there is time for.
        pace: The seconds per token that this rests on.
    """

    max_prefix: int
    max_continuation: int
    fit_samples: int
    most: int
    steps: int
    pace: float

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))


def lengths(
    pace: float, seconds: float, context: int, configs: Mapping[int, TranslatorConfig]
) -> Lengths:
    """The longest prefixes that leave time for :data:`STEPS` steps, or else the shortest ones.

    Args:
        pace: The seconds per token, as :func:`seconds_per_token` measures them.
        seconds: The time for everything.
        context: The tokens of the shorter context.
        configs: The configs of the translators that may be fitted, by their source layers.

    Raises:
        ValueError: There is no time for a closed form, or for steps that would change it.
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
    # A closed form reads with both models; there is time for so many tokens of each.
    there = STARTING / 2 * seconds / (2 * pace)
    least = ENOUGH * unknowns(configs[min(configs)])
    if steps < FEWEST_STEPS or there < least:
        needed = max(STEPS * step / DISTILLING, 4 * pace * least / STARTING)
        raise ValueError(
            f"{seconds / 60:g} minutes are too few here: there is time for {steps} steps and to "
            f"fit on {int(there):,} tokens of {least:,}; give --minutes {math.ceil(needed / 60)} "
            "or more, take smaller models, or use `fit`, which reads the data once"
        )
    most = max(nu for nu, config in configs.items() if ENOUGH * unknowns(config) <= there)
    wanted = min(there, 2 * ENOUGH * unknowns(configs[most])) / (MEAN * prefix)
    return Lengths(longest, ANSWERS, min(400, max(1, math.ceil(wanted))), most, steps, pace)
