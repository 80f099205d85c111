"""Work that ranks of ``mlx.launch`` share, as a test asks for it; one process does it alone.

``python -m tests.support.rank_jobs JOB.json`` does the job's cases and writes what each rank found.
"""

import itertools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np

import kvlingo_mlx as kv
from benchmarks.paper.training.sweep import SweepTrainer
from kvlingo_mlx import fitting, group
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.machines import ranks
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator
from kvlingo_mlx.training.plan import TrainingPlan, reconstruction
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.trainer import Trainer
from tests.support.random_samples import Numbered, samples

RANK = int(os.environ.get("MLX_RANK", 0))
Case = dict[str, Any]
Found = dict[str, np.ndarray]


def talk(case: Case) -> Found:
    """Sums and values of all ranks; what rank r gives can be written down without any of them."""
    here = ranks.here()
    with mock.patch.object(group, "PACK", 100):  # bytes: 12 numbers
        packs = list(here.totals(given(here.rank, n) for n in (5, 30, 1, 8)))
    values = here.gathered({"text": "x" * (here.rank * 70_000), "array": given(here.rank, 3)})
    first = here.firsts(lambda: {"rank": here.rank, "array": given(here.rank, 4)})
    return {
        "rank": np.array([here.rank, here.size]),
        "packs": np.concatenate([array.ravel() for array in packs]),
        "lengths": np.array([len(value["text"]) for value in values]),
        "arrays": np.stack([value["array"] for value in values]),
        "first": np.array([first["rank"], *first["array"]]),
    }


def given(rank: int, count: int) -> np.ndarray:
    """Numbers that float32 would round."""
    return np.random.default_rng([rank, count]).normal(size=count)


class Kept(ClosedForm):
    """A closed form that keeps the sums of every pass, as they are solved from."""

    sums: ClassVar[Found] = {}

    def _total(self, sums: Any) -> None:
        super()._total(sums)
        for key, array in sums._sums.items():
            kind = ("xx", key) if isinstance(key[0], int) else (key[1], key[0])
            Kept.sums[f"{next(iter(sums.maps))}/{kind[0]}/{kind[1]}"] = np.array(array)


def fit(case: Case) -> Found:
    """The maps, and the sums that they are made of."""
    Kept.sums = {}
    data = case.get("records") or [*samples(case["samples"], 60, 3), Sample((), (7,))]
    told: list[int] = []
    sent, total = [0], ranks.Ranks.total

    def counted(self: ranks.Ranks, numbers: np.ndarray) -> np.ndarray:
        sent[0] += numbers.nbytes if numbers.dtype == np.float64 and numbers.size > 99 else 0
        return total(self, numbers)

    with (
        mock.patch.object(ranks.Ranks, "total", counted),
        mock.patch.object(fitting, "ClosedForm", Kept),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", kv.KVLingoWarning)
        made = kv.fit(
            case["source"], case["target"], data, **case["options"],
            progress=lambda done, total: told.append(done),
        )  # fmt: skip
    facts = made.config.provenance
    counts = [facts[name] for name in ("samples", "prefix_tokens", "longest_prefix", "lowest_rank")]
    reads = np.array(json.dumps(made.config.assignment.to_json()))
    maps = made.to_weights()
    weights = {f"weights/{name}": maps.as_float32(name) for name in maps.arrays}
    facts = {"counts": np.array(counts), "reads": reads, "ridge": np.array(facts["ridge"])}
    return {**weights, **Kept.sums, **facts, "told": np.array([told[-1], *sent])}


def training(case: Case) -> Found:
    """A training's log and maps.

    ``stop`` is a rank, and the number of reports after which it gets a signal. A rank that
    ``parts`` takes other steps than the others. With ``apart``, each has a folder of its own.
    """
    here, reports = ranks.here(), itertools.count(1)
    recipe = Recipe(**case["recipe"])
    plan: dict[str, Any] = {"fit_samples": 11, "held_out": 3, **case.get("plan", {})}
    if plan.get("kind") == "mlp":
        plan["stage1_recipe"] = reconstruction(recipe, steps=3, rates=(1e-2,))

    def progress(stage: str, report: Any) -> None:
        if case.get("stop") == [here.rank, next(reports)]:
            os.kill(os.getpid(), signal.SIGINT)

    out = Path(case["out"])
    if here.rank and case.get("apart"):
        out = out.parent / f"rank-{here.rank}" / out.name
    source, target = kv.load(case["source"]), kv.load(case["target"])
    data = {"data": case.get("data", "the same")}
    every = case.get("keep_every", 240.0)
    trainer = SweepTrainer if recipe.sweep else Trainer
    made = trainer(
        source, target, Numbered(), TrainingPlan(**plan, recipe=recipe), out, here, progress, data,
        keep_every=every,
    )  # fmt: skip
    steps = drifting if case.get("parts") else MLXTranslator.update
    with mock.patch.object(MLXTranslator, "update", steps):
        try:
            made.run()
        except KeyboardInterrupt:
            return {"stopped": np.array(next(reports) - 1)}
    if here.rank:
        return {"wrote": np.array(out.parent.exists() and case.get("apart", False))}
    lines = [json.loads(line) for line in made.log.read_text().splitlines()]
    _, weights = translator_folder.read(out)
    return {
        "held_out": np.array([line["held_out"] for line in lines], float),
        "loss": np.array([line["loss"] for line in lines[1:]], float),
        **{f"weights/{name}": weights.as_float32(name) for name in weights.arrays},
    }


_update = MLXTranslator.update


def drifting(self: MLXTranslator, rate: float, clip: float) -> None:
    """A step a little longer than the others'."""
    _update(self, 1.01 * rate, clip)


WORK: dict[str, Callable[[Case], Found]] = {
    "talk": talk, "fit": fit, "training": training,
}  # fmt: skip


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for case in job["cases"]:
        own = replace_own(case)
        np.savez(Path(job["folder"]) / f"{case['name']}-{RANK}.npz", **WORK[case["work"]](own))


def replace_own(case: Case) -> Case:
    """The case with what only this rank is given."""
    return {**case, **case.get("on", {}).get(str(RANK), {})}


if __name__ == "__main__":
    main()
