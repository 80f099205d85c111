"""How fast this machine trains a pair on given data, and which lengths it has time for."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.closed_form import ENOUGH, solving_seconds, unknowns
from kvlingo_mlx.timing.random_maps import random_maps
from kvlingo_mlx.tokenization.samples import MAX_PREFIX, Sample
from kvlingo_mlx.training.distill import VALIDATING
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.runtime import Pair

BATCH, ANSWERS = 4, 512  # conversations a step; tokens to which answers are cut
STEPS = 300  # that a message asks time for; most of the KL falls in the first hundred
MANY_STEPS = 2000  # from which longer prefixes bring more than further steps of shorter ones
FEWEST_STEPS = 20  # fewer hardly change a closed form
SHORTEST = 512  # tokens: no training reads less at most
PROBES = 8  # conversations of each length that the pace is measured with
PROBING = 0.02  # the share of the time that one length may take, but for its last conversation
SOME = 4  # tokens per unknown from which a closed form begins, since its ridge is chosen
MORE = 1.1  # times as long as was measured: a machine is not always as quick
FITTING, TRAINING = 0.1, 0.8  # the shares of the closed form and of the training
READING = 0.5  # the share of it in which both models read; a third turn over it brings little
FEWEST_READS = 40  # conversations: fewer are learned by heart


@dataclass(frozen=True)
class ConversationCost:
    """What a conversation costs on average."""

    prefix: float  # the tokens of its prefix
    reading: float  # the seconds in which both models read it, with its continuation
    learning: float  # the seconds of its loss and gradient

    def steps(self, seconds: float) -> float:
        """The steps of stage 2 that ``seconds`` allow; those that match attention cost less."""
        return (1 - VALIDATING) * seconds / (BATCH * (self.reading + self.learning))


def measured(
    pair: Pair, config: TranslatorConfig, samples: Iterable[Sample], most: float
) -> ConversationCost:
    """The pace of ``samples``, or of the first of them that take ``most`` seconds.

    The first one warms up. It counts only where there is no time for others.
    """
    made, kl, found = pair.trainable(config, random_maps(config)), objective_named("kl"), []
    began = time.perf_counter()
    for sample in samples:
        started = time.perf_counter()
        reading = pair.read(sample, config)
        read = time.perf_counter()
        pair.loss(made, reading, kl, 1.0)
        ended = time.perf_counter()
        found.append((sample.num_read, read - started, ended - read))
        if ended - began > most:
            break
    counted = found[1:] or found
    return ConversationCost(*(sum(column) / len(counted) for column in zip(*counted, strict=True)))


@dataclass(frozen=True)
class Lengths:
    """What there is time for."""

    max_prefix: int  # tokens, before it is scaled to the models' context
    max_continuation: int  # tokens to which answers are cut
    fit_samples: int  # conversations for a closed form
    most: int  # source layers that there is time to fit
    steps: int  # about
    seconds_per_token: float  # in which both models read a token of a prefix
    prefix: float  # tokens of a prefix, on average

    @property
    def reading(self) -> float:
        """The seconds in which both models read a conversation."""
        return self.seconds_per_token * self.prefix

    def reads(self, seconds: float, most: float) -> int | None:
        """Conversations that all steps of so many ``seconds`` take in turn; None: new ones each.

        There is memory for at most ``most`` of them.
        """
        count = min(max(FEWEST_READS, READING * seconds / self.reading), most)
        return int(count) if FEWEST_READS <= count < BATCH * self.steps else None


def lengths(
    pace_of: Callable[[int], ConversationCost | None],
    seconds: float,
    context: int,
    configs: Mapping[int, TranslatorConfig],
    besides: Callable[[ConversationCost], float] = lambda pace: 0.0,
) -> Lengths:
    """The longest prefixes that leave time for :data:`MANY_STEPS` steps, or else the shortest ones.

    ``pace_of`` measures conversations of a longest prefix; it is None where the data hold none so
    short, or memory none so long. ``configs`` may be fitted, by their source layers. ``besides``
    are the seconds of all but the closed form and training, at a pace.

    Raises:
        ValueError: There is no time for a closed form, or for steps that would change it; or the
            data hold no conversation that the models can read.
    """
    chosen, longest, steps = None, SHORTEST, math.inf
    while longest == SHORTEST or (longest <= MAX_PREFIX and longest // 2 + ANSWERS < context):
        if (pace := pace_of(longest)) is not None:
            room = max(0.0, seconds - besides(pace))
            steps = pace.steps(TRAINING * room)
            if chosen is None or steps >= MANY_STEPS:
                chosen = longest, pace, steps, room
        if steps < MANY_STEPS:
            break
        longest *= 2
    if chosen is None:
        raise ValueError(
            f"no conversation of the data fits into a context of {context:,} tokens and into the "
            "memory there is; add shorter ones"
        )
    longest, pace, steps, room = chosen
    per_token = pace.reading / pace.prefix
    # There is time for so many tokens of a closed form.
    there, smallest = FITTING * room / per_token, unknowns(configs[min(configs)])
    if steps < FEWEST_STEPS or there < SOME * smallest:
        fitting = SOME * smallest * per_token / FITTING
        training = 1 / pace.steps(TRAINING)
        few, some = (
            math.ceil(MORE * (besides(pace) + max(fitting, training * count)) / 60)
            for count in (FEWEST_STEPS, STEPS)
        )
        raise ValueError(
            f"{seconds / 60:g} minutes are too few here: there is time for {int(steps)} steps and "
            f"to fit on {int(there):,} tokens of {SOME * smallest:,}; give --minutes {few} at "
            f"least, {some} for {STEPS} steps, which bring most, or use `fit`, which reads the "
            "data once"
        )
    most = min(configs)
    for nu, config in configs.items():
        if SOME * unknowns(config) <= there and solving_seconds(config) <= FITTING * room:
            most = max(most, nu)
    # As many as the fewest source layers want: with a ridge they do for more, whose sums cost most.
    fits = min(400, max(1, math.ceil(min(there, 2 * ENOUGH * smallest) / pace.prefix)))
    return Lengths(longest, ANSWERS, fits, most, int(steps), per_token, pace.prefix)
