"""Which closed form `kvlingo-mlx pair` begins with, and what another choice would have brought.

    python benchmarks/starts.py [--pairs A:B ...] [--share 16] [--steps 100] --json FILE

For every pair of the zoo: each number of source layers and each norm that `pair` can choose from is
fitted on the same dialogues, judged on held-out ones as `pair` does, and distilled for a number of
steps; nu = 1 also without a ridge. The choice is held against the best in hindsight, on dialogues
that nothing has seen, before and after these steps.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import quality as tables
from dialogue_stream import DialogueStream

from kvlingo_mlx.loading.models import load
from kvlingo_mlx.making import starts
from kvlingo_mlx.making.run import HELD_OUT
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.stage1.closed_form import unknowns
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.distill import Distillation, start_runs
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Pair, pair_of

PAIRS = (
    *tables.PAIRS,
    "tiny-gemma3-s:tiny-gemma3-l", "tiny-gemma3-l:tiny-gemma3-s", "tiny-gemma4-s:tiny-gemma4-l",
    "tiny-gemma4-l:tiny-gemma4-s", "tiny-mistral:tiny-qwen3-s", "tiny-qwen3-s:tiny-mistral",
    "tiny-qwen3-narrow:tiny-qwen3-l",
)  # fmt: skip
# The facts that these models' dialogues hold, where they are fewer than the others'.
FACTS = {"gemma": (4, 16), "mistral": (4, 16)}
RATES = (3e-3,)
TEST = 32  # dialogues that judge the choice


class Talks:
    """Dialogues by number; those of stage 1 are others than those of stage 2."""

    def __init__(self, stream: DialogueStream) -> None:
        self.sample = stream.sample


def tried(
    models: Pair, stream: DialogueStream, nu: int, norm: str, ridge: float | None, args: Any
) -> dict[str, Any]:
    """One closed form: its KL on the dialogues that choose, on others, and after some steps."""
    width = unknowns(starts.configs(models)[1])
    samples: list[Sample] = []
    while sum(len(each.prefix) for each in samples) < args.share * width:
        samples.append(stream.sample(10**6 + len(samples)))
    held_out = list(stream.held_out(HELD_OUT + TEST))
    fit = starts.fit_of(models, nu, norm, samples)
    fit.ridge = ridge
    with tempfile.TemporaryDirectory() as room:
        start = starts.judged(models, fit, nu, held_out[:HELD_OUT], Path(room) / "fit")
    recipe = Recipe(
        steps=args.steps, batch=4, validate_every=args.steps, learning_rates=RATES, seconds=None
    )
    arrays = {name: np.asarray(array, np.float32) for name, array in fit.weights.items()}
    runs = start_runs(models, fit.config, arrays, RATES)
    made = Distillation(models, runs, Talks(stream), held_out[HELD_OUT:], recipe)
    made.run()
    kls = [[kl for kl in look["held_out"] if kl is not None] for look in made.curve]
    return {"nu": nu, "norm": norm, "ridge": float(np.median(fit.ridges)), "judged": start.kl,
            "before": kls[0][0], "after": min(kls[-1])}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--share", type=float, default=16.0, help="tokens per unknown at nu = 1")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--zoo", type=Path, default=Path("tests/zoo"))
    parser.add_argument("--json", help="append a record for each pair to this file")
    args = parser.parse_args()
    for pair in args.pairs:
        source, target = (load(tables.model_folder(name, args.zoo)) for name in pair.split(":"))
        facts = next((few for family, few in FACTS.items() if family in pair), None)
        stream = DialogueStream(target, facts=facts, source=source)
        models = pair_of(source, target)
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for nu in starts.configs(models):
            for norm in (starts.NORM, starts.OTHER_NORM):
                found[nu, norm] = tried(models, stream, nu, norm, None, args)
                print(pair, found[nu, norm], flush=True)
        plain = tried(models, stream, 1, starts.NORM, 0.0, args)

        def judge(nu: int, norm: str, found: dict = found) -> starts.Start:
            return starts.Start(nu, norm, found[nu, norm]["judged"])

        chosen, looked = starts.choose(sorted({nu for nu, _ in found}), judge)
        results = {
            "tried": list(found.values()), "without a ridge": plain,
            "chosen": found[chosen.nu, chosen.norm], "looked at": len(looked),
            "best before": min(found.values(), key=lambda each: each["before"]),
            "best after": min(found.values(), key=lambda each: each["after"]),
        }  # fmt: skip
        cost = [results["chosen"][when] / results[f"best {when}"][when] for when in
                ("before", "after")]  # fmt: skip
        print(f"{pair}: {chosen}; KL over the best in hindsight: {cost[0]:.3f} before, "
              f"{cost[1]:.3f} after {args.steps} steps", flush=True)  # fmt: skip
        if args.json:
            config = {"pair": pair, "share": args.share, "steps": args.steps}
            measure.append_json(args.json, measure.record("starts", config, results))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
