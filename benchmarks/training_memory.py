"""A training step's memory on MLX beside what ``train`` says before it starts.

    python benchmarks/training_memory.py [--geometries qwen3-0.6b qwen3-1.7b] [--layers 4]
        [--lengths 1024 2048 4096 8192] [--continuations 128 512] [--json FILE]

Random models of released geometries (vocabulary and widths are real, the layers few), a
conversation of each length, two translators in training as with two learning rates. Measured is
MLX's own peak over reading, loss, gradient and update; beside it what the formula says.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.timing.geometries import make, unmade_model
from kvlingo_mlx.group import Group
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.random_maps import random_maps
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.on_mlx import gradients
from kvlingo_mlx.training.on_mlx.memory import needs
from kvlingo_mlx.training.on_mlx.pair import MLXPair
from kvlingo_mlx.training.plan import TrainingPlan, make_config

RATES = 2


def peak(action: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that arrays take while something is done, and what it gives."""
    mx.clear_cache()
    mx.reset_peak_memory()
    found = action()
    return mx.get_peak_memory(), found


def step(pair: MLXPair, prefix: int, continuation: int) -> dict[str, int]:
    """The peaks of a step's parts, in bytes."""
    config = make_config(pair.source, pair.target, TrainingPlan())
    tokens = np.random.default_rng(0).integers(0, 1000, prefix + continuation).tolist()
    sample = Sample(tuple(tokens[:prefix]), tuple(tokens[prefix:]))
    made = [pair.trainable(config, random_maps(config)) for _ in range(RATES)]
    goal = objective_named("kl")
    for each in made:  # the optimizer's state is there from the first step on
        each.gather(Group())
        each.update(1e-6, 1.0)
    found = {"at rest": mx.get_active_memory()}
    found["reading"], reading = peak(lambda: pair.read(sample, config))
    found["loss"] = 0
    learn = functools.partial(gradients.conversation_loss, scale=1.0)
    losses = [functools.partial(learn, pair.target, each, reading, goal) for each in made]
    found["loss"] = max(peak(loss)[0] for loss in losses)
    del losses, reading
    updates = [functools.partial(each.update, 1e-6, 1.0) for each in made]
    found["update"] = max(peak(update)[0] for update in updates)
    said = needs(pair.source, pair.target, config, prefix, continuation, RATES)
    return found | {"said": sum(said.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs=2, default=["qwen3-0.6b", "qwen3-1.7b"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--continuations", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    unmade = [
        unmade_model(name, args.layers, args.precision, seed)
        for seed, name in enumerate(args.geometries)
    ]
    ends = make(unmade)
    pair, results = MLXPair(*ends), []
    for prefix in args.lengths:
        for continuation in args.continuations:
            found = step(pair, prefix, continuation)
            row = {"prefix": prefix, "continuation": continuation}
            ratio = found["said"] / max(size for name, size in found.items() if name != "said")
            beyond = [found[name] - found["at rest"] for name in ("said", "reading", "loss")]
            row["ratio"], row["ratio beyond rest"] = ratio, beyond[0] / max(beyond[1:])
            results.append(row | found)
            told = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in found.items())
            print(row, "MiB:", told, flush=True)
    print(measure.machine_line())
    if args.json:
        config = {name: value for name, value in vars(args).items() if name != "json"}
        measure.append_json(args.json, measure.record("training_memory", config, results))


if __name__ == "__main__":
    main()
