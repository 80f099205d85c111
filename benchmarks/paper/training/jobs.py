"""A training with the paper's rates, source layers and norm for its pair, and its sweep.

torchrun starts it as ``python -m benchmarks.paper.training.jobs FILE`` on several GPUs.
"""

import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paper import converted_mla
from benchmarks.paper.training.paper_pairs import filled, rate_of
from benchmarks.paper.training.sweep import SweepTrainer, window
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.command_line import Done, Listeners, Options
from kvlingo_mlx.training.distill import Report
from kvlingo_mlx.training.plan import TrainingPlan, reconstruction
from kvlingo_mlx.training.recipe import Recipe

MODULE = "benchmarks.paper.training.jobs"
MARK = "told: "  # before what processes tell, among what libraries print
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


def start(
    options: Options, plan: TrainingPlan, out: str, listeners: Listeners, processes: int | None
) -> None:
    """Train in this process, or by torchrun in ``processes``; None: in one for each GPU of "cuda".

    A closed form, which each process would make anew, is made in this one.

    Raises:
        KVLingoError: A process of torchrun's failed; the message is its own.
        Exception: Whatever :func:`train` raises.
    """
    count = _gpus(options.place) if processes is None else processes
    if count == 1 or not plan.recipe.steps:
        train(options, plan, out, listeners)
        return
    gc.collect()
    if options.place == "cuda":
        import torch

        torch.cuda.empty_cache()  # what was evaluated here leaves its memory to the processes
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((options, plan, out)))
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
        _listen([sys.executable, "-m", *torchrun, MODULE, str(job)], listeners)


def _gpus(place: str) -> int:
    """How many processes train on a device: one on each GPU of "cuda", else one."""
    if place != "cuda":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _listen(command: list[str], listeners: Listeners) -> None:
    """Run a command whose lines are what :func:`_tell` wrote; raises KVLingoError if it fails."""
    failed = ""
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                if not line.startswith(MARK):
                    continue
                kind, *told = json.loads(line.removeprefix(MARK))
                if kind == "progress":
                    listeners.progress(told[0], Report(**told[1]))
                elif kind == "failed":
                    failed = failed or told[0]
                else:
                    getattr(listeners, kind)(told[0])
        errors.seek(0)
        last = [line for line in errors.read().splitlines() if line.strip()][-20:]
    if running.returncode:
        raise KVLingoError(failed or "torchrun failed:\n" + "\n".join(last))


def _tell(*told: Any) -> None:
    print(MARK + json.dumps(told), flush=True)


def _as_torchrun_has_it(job: str) -> None:
    """The training of a file, in one of torchrun's processes; the first tells how it goes."""
    options, plan, out = pickle.loads(Path(job).read_bytes())
    converted_mla.register()
    tell = _tell if os.environ["RANK"] == "0" else lambda *told: None
    listeners = Listeners(
        lambda stage, report: tell("progress", stage, asdict(report)),
        lambda text: tell("warn", text),
        lambda text: tell("say", text),
    )
    try:
        train(options, plan, out, listeners)
    except (KVLingoError, ValueError, OSError) as error:
        _tell("failed", str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    _as_torchrun_has_it(sys.argv[1])
