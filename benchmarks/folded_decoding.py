"""How fast a target decodes from a narrower source's cache, and what it holds in memory.

    python benchmarks/folded_decoding.py --layers 6 --precision float32 --json FILE

What ``kvlingo-mlx bench --table memory-budget`` measures, as ratios: Gemma-3-12B's widths with
random weights decodes from its own cache, from one of half the KV heads, and from that one through
a head-wise translator folded into its queries and pooled values. All ways alternate within one
run; ratios are of medians. Beside them the translator's products alone, as a part of a step, and
what came alive in decoding beyond the weights, as a multiple of the source's cache.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import measure
from kvlingo_mlx.timing import memory_budget
from kvlingo_mlx.timing.memory_budget import Cell, Setup
from kvlingo_mlx.timing.tables import Clock


def summary(cell: Cell, models: Setup, weights: int) -> dict[str, Any]:
    """A cell's ratios beside its raw samples."""
    times = {way: measure.median(cell.samples[way]) for way in memory_budget.WAYS}
    used = weights - models.foreign_bytes("folded")
    return {
        **cell.as_json(),
        "speed_beside_full": times["full"] / times["folded"],
        "speed_beside_narrowed": times["narrowed"] / times["folded"],
        "translator_share": measure.median(cell.maps) / times["folded"],
        "alive_beside_source_cache": (cell.peak["folded"] - used) / cell.cache["folded"],
        "alive_beside_full_cache": (cell.peak["folded"] - used) / cell.cache["full"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of the 48; default: all")
    parser.add_argument("--precision", default="4bit")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(memory_budget.CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(memory_budget.BATCHES))
    parser.add_argument("--decoded", type=int, default=memory_budget.default_decoded())
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    models = memory_budget.setup(args.layers, args.precision)
    mx.synchronize()
    mx.clear_cache()
    weights, found = mx.get_active_memory(), []
    sizes = {"trials": args.trials, "decoded": args.decoded, "clock": Clock(None)}
    for cell in memory_budget.run(models, args.contexts, args.batches, **sizes):
        found.append(summary(cell, models, weights))
        print(
            f"{cell.context} tokens, batch {cell.batch}: folded at "
            f"{found[-1]['speed_beside_full']:.2f} of the full cache's speed, "
            f"{found[-1]['speed_beside_narrowed']:.2f} of the narrowed one's; translator "
            f"{found[-1]['translator_share']:.2%} of a step; alive beyond weights "
            f"{found[-1]['alive_beside_source_cache']:.3f} of the source's cache, "
            f"{found[-1]['alive_beside_full_cache']:.3f} of the full one",
            flush=True,
        )
    print(measure.machine_line())
    if args.json:
        config = {k: v for k, v in vars(args).items() if k != "json"}
        measure.append_json(args.json, measure.record("folded_decoding", config, found))


if __name__ == "__main__":
    main()
