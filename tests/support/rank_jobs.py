"""Work that ranks of ``mlx.launch`` share, as a test asks for it; one process does it alone.

``python -m tests.support.rank_jobs JOB.json`` does the job's cases and writes what each rank found.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

if __name__ == "__main__":  # transformers would load PyTorch, which takes each rank seconds
    sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np

import kvlingo_mlx as kv
from kvlingo_mlx import fitting, group
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.machines import ranks
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.checkpoints import log_of
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.trainer import Trainer
from tests.support.random_samples import Random, samples

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
    """A training's log and maps; each rank has a folder of its own."""
    here, recipe, out = ranks.here(), Recipe(**case["recipe"]), Path(case["out"])
    if here.rank:
        out = out.parent / f"rank-{here.rank}" / out.name
    plan = TrainingPlan(fit_samples=11, held_out=3, recipe=recipe)
    stream = Random(60, different=1000)  # whose lengths differ much
    made = Trainer(kv.load(case["source"]), kv.load(case["target"]), stream, plan, out, here)
    made.run()
    if here.rank:
        return {"wrote": np.array(out.parent.exists())}
    lines = [json.loads(line) for line in log_of(out).read_text().splitlines()]
    _, weights = translator_folder.read(out)
    return {
        "held_out": np.array([line["held_out"] for line in lines], float),
        "loss": np.array([line["loss"] for line in lines[1:]], float),
        **{f"weights/{name}": weights.as_float32(name) for name in weights.arrays},
    }


WORK: dict[str, Callable[[Case], Found]] = {"talk": talk, "fit": fit, "training": training}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for case in job["cases"]:
        np.savez(Path(job["folder"]) / f"{case['name']}-{RANK}.npz", **WORK[case["work"]](case))


if __name__ == "__main__":
    main()
