"""How fast a target decodes from a narrower source's cache, and what it holds in memory.

    python benchmarks/folded_decoding.py --layers 6 --precision float32 --json FILE
    python benchmarks/folded_decoding.py --attention --json FILE    # one global layer's, no weights

What the paper's table of a memory budget measures, as ratios: Gemma-3-12B's widths with random
weights decodes from its own cache, from one of half the KV heads, and from that one through a
head-wise translator folded into its queries and pooled values. All ways alternate within one
run; ratios are of medians. Beside them the translator's products alone, as a part of a step, and
what came alive in decoding beyond the weights, as a multiple of the source's cache. ``--attention``
times the attention of one layer by itself, in seconds of the processor, which other processes on
the machine do not lengthen as they do the clock's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from kvlingo_mlx.backend import mx

from benchmarks.paper.timing import memory_budget
from benchmarks.paper.timing.memory_budget import Cell, Setup
from kvlingo_mlx.folding.attention import Fold, FoldedPrefix, QueryRows, Side, attend
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.switching import Stopwatch


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


def attention_alone(context: int, batch: int, trials: int) -> dict[str, list[float]]:
    """Processor seconds of one decoding step's attention in a global layer, by way."""
    heads, dim, rows = {"full": 8, "narrowed": 4}, 256, 16
    held = {
        way: [mx.random.normal((batch, count, context, dim)) for _ in range(2)]
        for way, count in heads.items()
    }
    maps = [mx.random.normal((8, dim, dim)) * dim**-0.5 for _ in range(2)]
    parts = [FoldedPrefix((array,)) for array in held["narrowed"]]
    sides = [Side((m,), ((part,),), None) for m, part in zip(maps, parts, strict=True)]
    fold = Fold(*sides, QueryRows.of([head // 2 for head in range(8)], 4))
    queries = mx.random.normal((batch, rows, 1, dim))
    own = [mx.random.normal((batch, 8, 1, dim)) for _ in range(2)]
    mx.eval(held, maps, queries, own)
    stock = mx.fast.scaled_dot_product_attention
    ways = {way: functools.partial(stock, queries, *arrays, scale=dim**-0.5)
            for way, arrays in held.items()}  # fmt: skip
    ways["folded"] = functools.partial(attend, queries, fold, *own, dim**-0.5, None)
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(trials + 1):
        for way, run in ways.items():
            started = time.process_time()
            mx.eval(run())
            samples[way].append(time.process_time() - started)
    return {way: times[1:] for way, times in samples.items()}  # the first warms up


def attentions(contexts: list[int], batches: list[int], trials: int) -> list[dict[str, Any]]:
    """:func:`attention_alone` for every context and batch, printed."""
    found = []
    for context, batch in itertools.product(contexts, batches):
        samples = attention_alone(context, batch, trials)
        took = {way: measure.median(times) for way, times in samples.items()}
        found.append({"context": context, "batch": batch, "processor_s": samples})
        print(
            f"{context} tokens, batch {batch}, attention alone: full {1e3 * took['full']:.1f} ms, "
            f"narrowed {1e3 * took['narrowed']:.1f} ms, folded {1e3 * took['folded']:.1f} ms",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of the 48; default: all")
    parser.add_argument("--precision", default="4bit")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(memory_budget.CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(memory_budget.BATCHES))
    parser.add_argument("--decoded", type=int, default=memory_budget.default_decoded())
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", help="append the record to this file")
    parser.add_argument("--attention", action="store_true", help="one layer's attention alone")
    args = parser.parse_args()
    config = {k: v for k, v in vars(args).items() if k != "json"}
    if args.attention:
        found = attentions(args.contexts, args.batches, args.trials)
    else:
        found = decoding(args)
    print(measure.machine_line())
    if args.json:
        measure.append_json(args.json, measure.record("folded_decoding", config, found))


def decoding(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cell of the table, printed."""
    models = memory_budget.setup(args.layers, args.precision)
    mx.synchronize()
    mx.clear_cache()
    weights, found = mx.get_active_memory(), []
    sizes = {"trials": args.trials, "decoded": args.decoded, "clock": Stopwatch(None)}
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
    return found


if __name__ == "__main__":
    main()
