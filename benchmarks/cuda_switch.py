"""What a switch costs on a GPU: the components of the paper's table, beside a re-prefill.

    python benchmarks/cuda_switch.py --json benchmarks/results/cuda_switch.jsonl        # a GPU
    python benchmarks/cuda_switch.py --label tab:gemma3 --vllm --json ...               # and vLLM
    python benchmarks/cuda_switch.py --device cpu --dtype float32 --pairs tiny-s:tiny-l \
        --tokens 40 --gemm 64                                                           # a trial

What is measured, and how, says benchmarks/paper/gpu/switch.py; with ``--vllm`` also what
benchmarks/paper/timing/vllm_serving.py does, for the targets. Random weights at true widths
(``--layers`` cuts depths).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.gpu.switch import ERRORS
from benchmarks.paper.timing import gpu, vllm_serving
from benchmarks.paper.timing.widths import PAIRS, TOKENS, ends_of
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.reporting import measure


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pairs", nargs="+", metavar="SOURCE:TARGET")
    which.add_argument("--label", choices=PAIRS, default="tab:cost", help="the pairs of the "
                       "paper's table or figure")  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, help="at most so many layers of each model")
    parser.add_argument("--nu", type=int, help="source layers a target layer reads; default: the "
                        "paper's for the pair")  # fmt: skip
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=ERRORS)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--prefill-chunk", type=int, help="tokens of a re-prefill's chunks")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--gemm", type=int, default=8192, help="width of the large product")
    parser.add_argument("--vllm", action="store_true", help="also the targets served by vLLM")
    parser.add_argument("--json", help="append the records to this file")
    args = parser.parse_args(argv)
    args.pairs = args.pairs or list(PAIRS[args.label])
    try:
        settings = settings_of(args)
        for pair in args.pairs:
            gpu.plan(pair, settings)
        gpu.check_gpu(settings)
        if args.vllm:
            serving_of(args).check(targets_of(args))
            vllm_serving.vllm()
    except (ValueError, KVLingoError) as error:
        parser.error(str(error))
    return args


def settings_of(args: argparse.Namespace) -> gpu.PairSettings:
    return gpu.PairSettings(
        device=args.device, dtype=args.dtype, tokens=tuple(args.tokens), layers=args.layers,
        nu=args.nu, trials=args.trials, prefill_chunk=args.prefill_chunk,
        graphs=not args.no_graphs, gemm=args.gemm,
    )  # fmt: skip


def serving_of(args: argparse.Namespace) -> vllm_serving.Serving:
    return vllm_serving.Serving(tokens=tuple(args.tokens), dtype=args.dtype)


def targets_of(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(ends_of(pair)[1] for pair in args.pairs))


def keep(args: argparse.Namespace, kind: str, config: dict[str, Any], results: Any) -> None:
    if args.json:
        measure.append_json(args.json, measure.record(kind, config, results))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    settings, told = settings_of(args), dict[str, list[Any]]()

    def listen(pair: str, found: dict[str, Any]) -> None:
        told.setdefault(pair, []).append(found)
        print("", *gpu.in_lines(pair, found), sep="\n")

    config = gpu.config_of_record(args.pairs, settings)
    try:
        results = gpu.time_pairs(args.pairs, settings, listen)
        rate = results["rates"]
        print(f"\nproduct of {args.gemm}: {rate['gemm_flops'] / 1e12:.3g} TFLOP/s in {args.dtype}; "
              f"copy: {rate['copy_bytes'] / 1e9:.3g} GB/s")  # fmt: skip
    except BaseException:  # a pair that fails takes nothing with it of those before
        plans = {pair: gpu.plan(pair, settings) for pair in told}
        if told:
            keep(args, "cuda_switch", config | {"failed": True}, {"plans": plans, "pairs": told})
        raise
    finally:
        print(measure.machine_line())
    keep(args, "cuda_switch", config, results)
    if args.vllm:
        serving, names = serving_of(args), targets_of(args)
        served = vllm_serving.time_models(
            names, serving, lambda name, found: print(*vllm_serving.in_lines(name, found), sep="\n")
        )
        keep(args, "cuda_vllm", vllm_serving.config_of_record(names, serving), served)


if __name__ == "__main__":
    main()
