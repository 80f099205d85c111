"""What a step of self-distillation costs beside the bare passes that it cannot do without.

    python benchmarks/training_throughput.py --layers 4 --prefix 4096 --continuation 512    # a CPU
    python benchmarks/training_throughput.py --runtimes torch --device cuda --dtype bfloat16 \
        --prefix 16384 --continuation 2048                                  # a GPU, full depth

Random weights at true widths; ``--layers`` cuts both depths. Bare passes: the source over the
prefix, the target over the prefix, the target over the continuation on its own cache (the teacher),
and the target over the continuation forward and backward down to the cache's entries (the student),
logits of the whole vocabulary included. Passes and steps of all runtimes take turns; medians.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Protocol

import numpy as np

from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.distill import Distillation, start_runs
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Model, Pair, pair_of

SOURCE, PREFIX, TEACHER = "source prefix", "target prefix", "continuation"
STUDENT, STEP = "continuation and backward", "step"
NEEDED = (SOURCE, PREFIX, TEACHER, STUDENT)


class Side(Protocol):
    """A runtime's models and bare passes (`throughput_on_mlx`, `throughput_on_torch`)."""

    ends: tuple[Model, Model]

    def __init__(self, args: argparse.Namespace, sample: Sample) -> None: ...

    def read(self, model: Model) -> None:
        """The model over the prefix, no logits."""

    def continue_(self, *, backward: bool) -> None:
        """The target over the continuation on a cache of random entries."""

    def timed(self, action: Any) -> float:
        """The seconds until an action is done."""

    def counted(self, action: Any) -> int | None:
        """An action's floating-point operations, if the runtime counts them."""

    def facts(self) -> dict[str, Any]:
        """What else is told of a run, such as a GPU's name and its memory's peak."""


class OneSample:
    def __init__(self, sample: Sample) -> None:
        self.only = sample

    def sample(self, index: int) -> Sample:
        return self.only


def random_sample(args: argparse.Namespace) -> Sample:
    ids = np.random.default_rng(1).integers(150_000, size=args.prefix + args.continuation)
    return Sample(tuple(ids[: args.prefix].tolist()), tuple(ids[args.prefix :].tolist()))


def start(pair: Pair, sample: Sample, nu: int) -> Distillation:
    """A training of one translator, its maps random."""
    ends = pair.source.spec(), pair.target.spec()
    config = TranslatorConfig(*ends, relative_depth(*(len(end.layers) for end in ends), nu))
    rng = np.random.default_rng(0)
    arrays = {}
    for m in maps_of(config):
        shape = (m.outputs, m.inputs)
        arrays[f"{m.name}.weight"] = rng.normal(size=shape).astype(np.float32) / m.inputs**0.5
        arrays[f"{m.name}.bias"] = np.zeros(m.outputs, np.float32)
    runs = start_runs(pair, config, arrays, (1e-4,))
    return Distillation(pair, runs, OneSample(sample), [], Recipe(batch=1))


def side_of(runtime: str, args: argparse.Namespace, sample: Sample) -> tuple[Side, dict[str, Any]]:
    """A runtime, and what is timed on it by name."""
    side: Side = importlib.import_module(f"throughput_on_{runtime}").Side(args, sample)
    source, target = side.ends
    return side, {
        SOURCE: lambda: side.read(source),
        PREFIX: lambda: side.read(target),
        TEACHER: lambda: side.continue_(backward=False),
        STUDENT: lambda: side.continue_(backward=True),
        STEP: start(pair_of(source, target), sample, args.nu).advance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtimes", nargs="+", default=["torch", "mlx"])
    parser.add_argument("--source", default="qwen3-0.6b")
    parser.add_argument("--target", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, help="at most so many layers of each model")
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--continuation", type=int, default=512)
    parser.add_argument("--device", default="cpu", help="PyTorch's; MLX takes its own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--threads", type=int, help="PyTorch's")
    parser.add_argument("--json", help="append a record for each runtime to this file")
    args = parser.parse_args()
    sample = random_sample(args)
    sides = {name: side_of(name, args, sample) for name in args.runtimes}
    flops = {  # also the warm-up
        name: {what: side.counted(action) for what, action in actions.items()}
        for name, (side, actions) in sides.items()
    }
    times: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for _ in range(args.trials):
        for name, (side, actions) in sides.items():
            for what, action in actions.items():
                times[name].setdefault(what, []).append(side.timed(action))
    for name, (side, _) in sides.items():
        facts = side.facts()
        told(name, times[name], flops[name])
        print(f"{name}: {facts}")
        if args.json:
            config = {k: v for k, v in vars(args).items() if k not in ("json", "runtimes")}
            results = {"times": times[name], "flops": flops[name], **facts}
            record = measure.record("training_throughput", {**config, "runtime": name}, results)
            measure.append_json(args.json, record)
    print(measure.machine_line())


def told(name: str, times: dict[str, list[float]], flops: dict[str, int | None]) -> None:
    """Print a runtime's medians."""
    medians = {what: float(np.median(each)) for what, each in times.items()}
    for what, value in medians.items():
        count = flops[what]
        rate = "" if count is None else f"{count / value / 1e12:8.2f} TFLOP/s"
        print(f"{name:6s}{what:28s} {value:9.3f} s   {rate}")
    each = [t / sum(times[what][i] for what in NEEDED) for i, t in enumerate(times[STEP])]
    print(f"{name:6s}step / bare passes           {np.median(each):.2f} "
          f"({min(each):.2f} to {max(each):.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
