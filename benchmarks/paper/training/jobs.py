"""A training with the paper's rates, source layers and norm for its pair, and its sweep."""

from collections.abc import Mapping
from typing import Any

from benchmarks.paper.training.paper_pairs import filled, rate_of
from benchmarks.paper.training.sweep import SweepTrainer, window
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.command_line import Done, Listeners, Options
from kvlingo_mlx.training.plan import TrainingPlan, reconstruction
from kvlingo_mlx.training.recipe import Recipe

MLP_STAGE1_SWEEP = (1e-3, 3e-3, 1e-2, 3e-2)


def plan_of(
    options: Options,
    plan: Mapping[str, Any],
    recipe: Mapping[str, Any],
    stage1: Mapping[str, Any] | None = None,
) -> TrainingPlan:
    """A plan with what the paper has for its pair, where nothing is said (None, or no rates).

    Of a sweep one rate is the centre of the first window; an MLP's stage 1 (its ``steps`` and
    ``rates``) then has the paper's four. Appendix "Training protocol".
    """
    ends = options.source, options.target
    whole, sweep = filled(plan, *ends), recipe.get("sweep", False)
    rates = recipe["learning_rates"] or (rate_of(*ends, whole),)
    rates = window(rates[0]) if sweep and len(rates) == 1 else rates
    stage2 = Recipe(**{**recipe, "learning_rates": rates})
    if stage1 is not None:
        own = stage1["rates"] or (MLP_STAGE1_SWEEP if sweep else ())
        whole["stage1_recipe"] = reconstruction(stage2, own, stage1["steps"])
    return TrainingPlan(**whole, seed=options.seed, recipe=stage2)


def train(options: Options, plan: TrainingPlan, out: str, listeners: Listeners) -> Done | None:
    """As ``command_line.train``, with sweeps."""
    return command_line.train(options, plan, out, listeners, trainer=SweepTrainer)
