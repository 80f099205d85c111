"""A training with the paper's rates, source layers and norm for its pair, and its sweep."""

from dataclasses import replace

from benchmarks.paper.training.paper_pairs import filled, rate_of
from benchmarks.paper.training.sweep import SweepTrainer, window
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.command_line import Done, Job, Listeners

MLP_STAGE1_SWEEP = (1e-3, 3e-3, 1e-2, 3e-2)


def of_paper(job: Job) -> Job:
    """A job with what the paper has for its pair, where the job says nothing.

    Of a sweep one rate is the centre of the first window; an MLP's stage 1 then has the paper's
    four. Appendix "Training protocol".
    """
    ends = job.options.source, job.options.target
    plan, sweep = filled(job.plan, *ends), job.recipe.get("sweep", False)
    rates = job.recipe["learning_rates"] or (rate_of(*ends, plan),)
    rates = window(rates[0]) if sweep and len(rates) == 1 else rates
    stage1 = job.stage1
    if sweep and stage1 is not None and not stage1["rates"]:
        stage1 = {**stage1, "rates": MLP_STAGE1_SWEEP}
    return replace(job, plan=plan, recipe={**job.recipe, "learning_rates": rates}, stage1=stage1)


def train(job: Job, listeners: Listeners) -> Done | None:
    """Train as the paper did; as ``command_line.train`` otherwise."""
    return command_line.train(of_paper(job), listeners, SweepTrainer)
