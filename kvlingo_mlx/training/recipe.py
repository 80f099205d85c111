"""The options of making a translator, and the recipe of a stage that is trained by gradient."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from kvlingo_mlx.format.kinds import NAMES
from kvlingo_mlx.options import COUNT, FROM_0, SHARE, OptionGroup, number, one_of, option, whole

MATCHING = "attention"  # the objective that matches what the target's attention gathers
STEPS = whole("a whole number, 0 or more", 0)


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """What is read, and where; the mixture of samples is the paper's."""

    plain_text: bool = option(False, "Windows of 256 + 256 tokens, for base models.")
    packed_share: float = option(0.5, "Share of samples concatenated to full length.", kind=SHARE)
    max_prefix: int | None = option(
        None, "Longest prefix in tokens, default: 16384.", kind=whole("1 to 16384 tokens", 1, 16384)
    )
    max_continuation: int | None = option(
        None,
        "Tokens to which answers are cut, default: 2048. Fewer of either need less memory.",
        kind=whole("1 to 2048 tokens", 1, 2048),
    )
    later_turns: bool = option(
        False, "Let an answer go on through the later turns of its conversation, as pair does."
    )
    seed: int = option(
        0,
        "Seed of the data and of an MLP's start.",
        kind=whole("a whole number from 0 to 2^63 - 1", 0, 2**63 - 1),
    )
    dtype: str | None = option(
        None, "The frozen models': bfloat16 or float32; default: as stored, with PyTorch bfloat16."
    )
    device: str | None = option(
        None, "mlx, or PyTorch's cuda, cuda:N or cpu; default: cuda where it is, else mlx."
    )


@dataclass(frozen=True, kw_only=True)
class MapOptions(OptionGroup):
    """What maps a new translator has, and how they are solved in closed form."""

    capture: str | None = option(
        None, "pre_norm (default), post_norm or post_rope; latent for MLA models.",
        kind=one_of("pre_norm", "post_norm", "post_rope", "latent"),
    )  # fmt: skip
    nu: int = option(1, "Source layers per target layer.", kind=COUNT)
    assignment: str = option(
        "relative_depth", "Source layers are chosen by relative_depth, r2 or greedy.",
        kind=one_of("relative_depth", "r2", "greedy"),
    )  # fmt: skip
    head_mixing: bool = option(True, "Off: block-diagonal maps, head by head.")
    state_maps: bool = option(
        False, "Map recurrent states, not what goes into them: much cheaper.", "--state-maps"
    )
    norm: str = option(
        "frobenius", "Norm of the closed form: frobenius, attention, sink_2 ... sink_32."
    )
    ridge: float | None = option(
        None,
        "Ridge, as a share of the inputs' mean square; default: chosen for each map; 0: none.",
        kind=FROM_0,
    )


@dataclass(frozen=True, kw_only=True)
class BoundOptions(OptionGroup):
    """The quality for which the fewest native layers are chosen."""

    max_kl: float | None = option(
        None, "Choose the fewest native layers with at most this KL.", kind=FROM_0
    )
    min_recall: float | None = option(
        None, "Choose the fewest that recall this share of answers.", kind=SHARE
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(MapOptions):
    """What to train; the defaults are the paper's, but for the ridge."""

    kind: str = option("linear", f"What the maps are: {', '.join(NAMES)}.")
    joint: bool = option(False, "One map over keys and values together.")
    fit_samples: int = option(400, "Conversations for the closed form.", kind=COUNT)
    hidden: int = option(2048, "Hidden width of an MLP.", kind=COUNT)
    gated: bool = option(True, "With --kind mlp: output gates or none.")
    # In stage 2 and whenever the translator is used; the maps above them learn to work with them.
    native_layers: int = option(
        0, "How many first cache layers the target reads itself.", kind=STEPS
    )
    held_out: int = option(64, "Conversations that choose the learning rate.", kind=COUNT)
    matching: float = option(  # the paper does without (``runtime.Pair.match``)
        0.0,
        "Share of the steps or minutes that learn what the target's attention gathers, before the "
        "KL.",
        kind=number("a share from 0 to below 1", lambda value: 0 <= value < 1),
    )


@dataclass(frozen=True)
class Recipe:
    """The recipe of stage 2; the defaults are the paper's."""

    steps: int = 5000  # of the optimizer
    batch: int = 8  # conversations per step
    learning_rates: tuple[float, ...] = (1e-4,)  # one translator is trained for each
    # kl, ce, mixed, attention (before the KL), or reconstruction (an MLP's stage 1)
    objective: str = "kl"
    ce_weight: float = 1.0  # the weight of the cross-entropy in mixed
    warmup: float = 0.05  # the share of steps over which the rate rises
    clip: float = 1.0  # the largest norm of a step's gradient
    validate_every: int = 250  # steps between two validations
    # The time of steps and validations together; None is any. The rate falls with the steps or with
    # the time, whichever is further on, so a run that has too little time for its steps ends with
    # the rates of a whole one.
    seconds: float | None = None
    reads: int | None = None  # conversations that all steps learn from in turn; None: ever new ones
    # Maps learn in the coordinates of ``training.coordinates``; the paper's in their weights.
    whitened: bool = False
    # The translator of the last step is kept, not the best one on the way: the laboratory's sweep
    # compares rates by it, and tries further ones.
    sweep: bool = False

    def part(self, share: float, **changes: Any) -> Self:
        """The recipe of a share of the steps and of the time."""
        seconds = None if self.seconds is None else share * self.seconds
        return replace(self, steps=round(share * self.steps), seconds=seconds, **changes)

    def place(self, step: int, spent: float) -> float:
        """How far a run is, in steps, after ``step`` steps and ``spent`` seconds."""
        share = spent / self.seconds if self.seconds else 0.0
        return max(step, min(share, 1.0) * self.steps)

    def rate_factor(self, step: float) -> float:
        """The share of the peak rate at a place (from 0): linear warm-up, then cosine to 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return min(1.0, (step + 1) / rise)
        done = (step - rise) / max(1, self.steps - rise)
        return 0.5 * (1.0 + math.cos(math.pi * done))
