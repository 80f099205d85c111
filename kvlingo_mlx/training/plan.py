"""What to train and how: a plan, the paper's defaults, a new translator's config and tensors."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlingo_mlx.format.fingerprints import facts_of_models
from kvlingo_mlx.format.kinds import TENSORS, kind_named
from kvlingo_mlx.format.maps import maps_of, shapes_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.stage1.closed_form import METHODS
from kvlingo_mlx.stage1.config import config_of_pair
from kvlingo_mlx.stage1.norms import norm_named
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.coordinates import RATE
from kvlingo_mlx.training.distill import Best
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.recipe import MATCHING, PlanOptions, Recipe
from kvlingo_mlx.training.runtime import Model, Pair
from kvlingo_mlx.training.watch import complaints
from kvlingo_mlx.version import __version__

MLP_STAGE1_RATE = 3e-3
STAGE1 = Recipe(objective="reconstruction", learning_rates=(MLP_STAGE1_RATE,))
STAGE2 = Recipe()


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(PlanOptions):
    """What to train and how."""

    recipe: Recipe = STAGE2  # of stage 2; with 0 steps stage 1 is kept
    # The recipe of stage 1 for an MLP without a linear map.
    stage1_recipe: Recipe = STAGE1
    seed: int = 0  # of an MLP's initial tensors

    def __post_init__(self) -> None:
        """Refuse (ValueError) what cannot go together, or would train nothing."""
        super().__post_init__()
        spec = kind_named(self.kind, self.joint, self.head_mixing)
        norm_named(self.norm)
        objective_named(self.recipe.objective, self.recipe.ce_weight)
        if self.matching and self.state_maps:
            raise ValueError(
                "matching is of attention, and state_maps of what has none; leave it out"
            )
        if self.state_maps and not spec.solved:
            raise ValueError(
                "maps of states (state_maps) begin with a closed form, and a translator of kind "
                f"{self.kind} has none; use linear or linear_mlp"
            )
        if self.joint and self.assignment in METHODS:
            raise ValueError(
                f"{self.assignment} chooses for keys and values apart, a joint map reads both; use "
                "relative_depth"
            )
        if spec.learnt and not self.recipe.steps and spec.solved:
            raise ValueError(
                "stage 2's steps (--steps) are 0, and stage 1 does not train the MLP of a "
                f"{self.kind}, which starts as nothing; give steps, or --kind linear"
            )
        if spec.learnt and not self.recipe.steps and not self.stage1_recipe.steps:
            raise ValueError(
                "neither stage has steps (stage1_steps, --steps), and an MLP starts at random: "
                "give one of them some"
            )

    @property
    def matched(self) -> Recipe | None:
        """The recipe by which attention is matched, at the first rate; None if it is not."""
        rates = (RATE,) if self.recipe.whitened else self.recipe.learning_rates[:1]
        own = {"learning_rates": rates, "objective": MATCHING, "sweep": False}
        found = self.recipe.part(self.matching, **own)
        return found if found.steps else None

    @property
    def stage2(self) -> Recipe:
        """The recipe of the steps through the target's predictions."""
        before = self.matched
        if before is None:
            return self.recipe
        return replace(self.recipe.part(1 - self.matching), steps=self.recipe.steps - before.steps)


def reconstruction(recipe: Recipe, rates: tuple[float, ...], steps: int) -> Recipe:
    """The recipe of an MLP's stage 1: that of stage 2 with other steps and rates.

    Appendix "Training protocol", MLP translators.
    """
    return replace(
        recipe,
        objective="reconstruction",
        ce_weight=1.0,
        steps=steps,
        learning_rates=rates or (MLP_STAGE1_RATE,),
        sweep=recipe.sweep and len(rates) > 1,
    )


def provenance_of(
    plan: TrainingPlan,
    pair: Pair,
    fitted: Mapping[str, Any],
    best: Best | None,
    held_out: Sequence[Sample],
    curve: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A translator's provenance; ``fitted`` are the facts of stage 1.

    ``best`` is the translator chosen in stage 2 on the ``held_out`` conversations, and ``curve``
    the log of that stage.
    """
    found: dict[str, Any] = {"stage": 1 if best is None else 2}
    if plan.native_layers:
        found["native_layers"] = plan.native_layers
    found |= fitted
    if best is not None:
        found |= {
            "objective": plan.recipe.objective,
            "steps": curve[-1]["step"],  # fewer than planned where the time was limited
            "batch": plan.recipe.batch,
            "reads": plan.recipe.reads,
            "whitened": plan.recipe.whitened,
            "learning_rate": best.rate,
            "best_step": best.step,
            "held_out": len(held_out),
            "held_out_kl": best.held_out,
            "held_out_kl_at_first": min(curve[0]["held_out"]),
        }
    if worries := complaints(curve):
        found["complaints"] = list(worries.values())
    # The prefixes of stage 1 and the held-out ones; stage 2 has the same mixture.
    prefixes = [fitted.get("longest_prefix", 0), *(len(s.prefix) for s in held_out)]
    return {
        **found,
        "longest_prefix": max(prefixes),
        **facts_of_models({"source": pair.source, "target": pair.target}),
        "assignment": plan.assignment,
        "seed": plan.seed,
        "kvlingo_mlx": __version__,
        **pair.versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def make_config(source: Model, target: Model, plan: TrainingPlan) -> TranslatorConfig:
    """The config of the translator to train.

    Raises:
        ValueError, KVLingoError: As :func:`.config_of_pair` does; or no layer is left to translate.
    """
    names, own = "kind head_mixing joint capture nu state_maps", plan.native_layers
    config = config_of_pair(source, target, **{n: getattr(plan, n) for n in names.split()})
    if own and config.alignment is not None:
        raise ValueError(
            f"native_layers is {own}, but between two tokenizers every layer is translated; leave "
            "it out"
        )
    most = len(config.target.layers) - 1
    if own > most:
        raise ValueError(
            f"native_layers is {own}; give 0 to {most}, so that a layer of {target.name} is left "
            "to translate"
        )
    return replace(config, provenance={"native_layers": own}) if own else config


def initial(
    config: TranslatorConfig, hidden: int, seed: int, *, gated: bool
) -> dict[str, np.ndarray]:
    """The initial tensors that no closed form gives (appendix "Training protocol").

    An MLP starts as PyTorch starts a linear layer, with gates (``gated``) at sigmoid(4). An MLP
    beside a linear map starts with an output of zero.
    """
    generator, spec = np.random.default_rng(seed), config.spec
    gates = ("gate",) if gated and "gate" in spec.optional else ()
    arrays: dict[str, np.ndarray] = {}
    for m in maps_of(config):
        shapes = shapes_of(config, m, (*spec.learnt, *gates), hidden)
        for name, shape in shapes.items():
            start = TENSORS[name].start
            if isinstance(start, str):
                many = {"inputs": m.inputs, "hidden": hidden}[start]
                bound = 0.0 if name in spec.silent else 1 / math.sqrt(many)
                values = generator.uniform(-bound, bound, shape)
                arrays[f"{m.name}.{name}"] = values.astype(np.float32)
            else:
                arrays[f"{m.name}.{name}"] = np.full(shape, start, np.float32)
    return arrays
