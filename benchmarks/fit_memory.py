"""Peak memory of stage 1 at full width: 36 layers of width 1024 a side, on both sides.

    python benchmarks/fit_memory.py [--assignments relative_depth r2 greedy] [--nu 1] [--json FILE]

Both models have caches of that shape and a tiny hidden width, random weights and random tokens,
so what is measured are the sums and what is solved from them; a real pair's own weights come on
top. Each assignment runs in a process of its own, whose largest resident size is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time

from kvlingo_mlx.backend import mx

import numpy as np
from translation_cost import model_of_shape

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.fitting import MEMORY, fit
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample

GIB = 2**30


def peak() -> float:
    """The largest resident size of this process so far, GiB."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (GIB if sys.platform == "darwin" else 2**20)


def measured(args: argparse.Namespace, assignment: str) -> dict[str, float]:
    """One fit; its peak, what the process took before, and its time."""
    tokenizer = load(zoo("tiny-qwen3-s")).tokenizer
    models = []
    for seed in (0, 1):
        mx.random.seed(seed)
        model = model_of_shape("qwen3", args.layers, args.heads, args.head_dim)
        models.append(dataclasses.replace(model, tokenizer=tokenizer))
    rng = np.random.default_rng(0)
    samples = [Sample(tuple(rng.integers(0, 1000, 512).tolist()), ()) for _ in range(args.samples)]
    before, started = peak(), time.perf_counter()
    fit(*models, samples, nu=args.nu, assignment=assignment, memory=args.memory)
    return {"before": before, "peak": peak(), "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["relative_depth", "r2", "greedy"]
    parser.add_argument("--assignments", nargs="+", default=names, choices=names)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--nu", type=int, default=1)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--memory", type=int, default=MEMORY, help="bytes of sums alive at once")
    parser.add_argument("--alone", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="append a record each to this file")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measured(args, args.alone)))
        return
    config = {k: getattr(args, k) for k in ("layers", "heads", "head_dim", "nu", "samples")}
    for name in args.assignments:
        command = [sys.executable, *sys.argv, "--alone", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:15s} peak {found['peak']:.2f} GiB, {found['before']:.2f} before the fit; "
              f"{found['seconds']:.0f} s", flush=True)  # fmt: skip
        if args.json:
            measure.append_json(args.json, measure.record("fit_memory", config, {name: found}))
    print(measure.machine_line())


if __name__ == "__main__":
    main()
