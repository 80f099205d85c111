"""What a step of self-distillation costs beside the bare passes that it cannot do without.

    python benchmarks/training_throughput.py --layers 4 --prefix 4096 --continuation 512    # a CPU
    python benchmarks/training_throughput.py --runtimes torch --device cuda --dtype bfloat16 \
        --prefix 16384 --continuation 2048                                  # a GPU, full depth

Random weights at true widths; ``--layers`` cuts both depths. Bare passes: the source over the
prefix, the target over the prefix, the target over the continuation on its own cache (the teacher),
and the target over the continuation forward and backward down to the cache's entries (the student),
logits of the whole vocabulary included. Passes and steps of all runtimes take turns; medians.
Operations are counted from shapes; MFU is a step's rate of them by the GPU's peak, if it is known.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

import training_flops as work

from benchmarks.paper.timing.widths import SHAPES, shape_of
from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.distill import Distillation, Run
from kvlingo_mlx.training.recipe import Recipe
from kvlingo_mlx.training.runtime import Model, Pair, pair_of


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

    def facts(self) -> dict[str, Any]:
        """What else is told of a run: ``gpu``, its name, and its memory's peak."""


class OneSample:
    def __init__(self, sample: Sample) -> None:
        self.only = sample

    def sample(self, index: int) -> Sample:
        return self.only


def random_sample(args: argparse.Namespace) -> Sample:
    most = min(SHAPES[name]["vocab_size"] for name in (args.source, args.target))
    ids = np.random.default_rng(1).integers(most, size=args.prefix + args.continuation)
    return Sample(tuple(ids[: args.prefix].tolist()), tuple(ids[args.prefix :].tolist()))


def config_of(source: Model, target: Model, nu: int) -> TranslatorConfig:
    ends = source.spec(), target.spec()
    return TranslatorConfig(*ends, relative_depth(*(len(end.layers) for end in ends), nu))


def start(pair: Pair, sample: Sample, nu: int) -> Distillation:
    """A training of one translator, its maps random."""
    config = config_of(pair.source, pair.target, nu)
    rng = np.random.default_rng(0)
    arrays = {}
    for m in maps_of(config):
        shape = (m.outputs, m.inputs)
        arrays[f"{m.name}.weight"] = rng.normal(size=shape).astype(np.float32) / m.inputs**0.5
        arrays[f"{m.name}.bias"] = np.zeros(m.outputs, np.float32)
    runs = [Run(1e-4, pair.trainable(config, arrays))]
    return Distillation(pair, runs, OneSample(sample), [], Recipe(batch=1))


def side_of(runtime: str, args: argparse.Namespace, sample: Sample) -> tuple[Side, dict[str, Any]]:
    """A runtime, and what is timed on it by name."""
    side: Side = importlib.import_module(f"throughput_on_{runtime}").Side(args, sample)
    source, target = side.ends
    return side, {
        work.SOURCE: lambda: side.read(source),
        work.PREFIX: lambda: side.read(target),
        work.TEACHER: lambda: side.continue_(backward=False),
        work.STUDENT: lambda: side.continue_(backward=True),
        work.STEP: start(pair_of(source, target), sample, args.nu).advance,
    }


def counted(side: Side, args: argparse.Namespace) -> dict[str, int]:
    """The operations of each pass and of a step."""
    ends = (work.ModelFlops(shape_of(name, args.layers)) for name in (args.source, args.target))
    maps = maps_of(config_of(*side.ends, args.nu))
    return work.flops_of(*ends, maps, args.prefix, args.continuation)


def parsed() -> argparse.Namespace:
    assert __doc__ is not None
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
    return parser.parse_args()


def main() -> None:
    args = parsed()
    sample = random_sample(args)
    sides = {name: side_of(name, args, sample) for name in args.runtimes}
    for side, actions in sides.values():  # the warm-up
        for action in actions.values():
            side.timed(action)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for _ in range(args.trials):
        for name, (side, actions) in sides.items():
            for what, action in actions.items():
                times[name].setdefault(what, []).append(side.timed(action))
    for name, (side, _) in sides.items():
        results = {"times": times[name], "flops": counted(side, args), **side.facts()}
        if peak := work.peak_of(results.get("gpu"), args.dtype):
            results["peak_flops"] = peak
            results["mfu"] = results["flops"][work.STEP] / np.median(times[name][work.STEP]) / peak
        told(name, results)
        if args.json:
            config = {k: v for k, v in vars(args).items() if k not in ("json", "runtimes")}
            record = measure.record("training_throughput", {**config, "runtime": name}, results)
            measure.append_json(args.json, record)
    print(measure.machine_line())


def told(name: str, results: Mapping[str, Any]) -> None:
    """Print a runtime's medians."""
    times = results["times"]
    for what, each in times.items():
        value, count = float(np.median(each)), results["flops"][what]
        print(f"{name:6s}{what:28s} {value:9.3f} s   {count / value / 1e12:8.2f} TFLOP/s")
    shares = [
        t / sum(times[what][i] for what in work.NEEDED) for i, t in enumerate(times[work.STEP])
    ]
    print(f"{name:6s}step / bare passes           {np.median(shares):.2f} "
          f"({min(shares):.2f} to {max(shares):.2f})")  # fmt: skip
    if "mfu" in results:
        print(f"{name:6s}MFU                          {results['mfu']:.3f} of "
              f"{results['peak_flops'] / 1e12:.0f} TFLOP/s")  # fmt: skip
    print(f"{name}: { {k: results[k] for k in ('gpu', 'peak_bytes') if k in results} }")


if __name__ == "__main__":
    main()
