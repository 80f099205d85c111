"""What a switch costs on a GPU: the components of the paper's table, beside a re-prefill.

    python benchmarks/cuda_switch.py --json benchmarks/results/cuda_switch.jsonl        # a GPU
    python benchmarks/cuda_switch.py --label tab:gemma3 --vllm --json ...               # and vLLM
    python benchmarks/cuda_switch.py --device cpu --dtype float32 --pairs tiny-s:tiny-l \
        --tokens 40 --gemm 64                                                           # a trial

What is measured, and how, says kvlingo_mlx/cuda/switch.py; with ``--vllm`` also what
benchmarks/paper/timing/vllm_serving.py does, for the targets. Random weights at true widths
(``--layers`` cuts depths).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.timing import vllm_serving
from kvlingo_mlx.cuda import switch
from kvlingo_mlx.cuda.scene import ERRORS
from kvlingo_mlx.cuda.shapes import PAIRS, TOKENS, ends_of
from kvlingo_mlx.cuda.translation import METHODS
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
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=(),
                        help="default: the fused kernel, where it runs")  # fmt: skip
    parser.add_argument("--prefill-chunk", type=int, help="tokens of a re-prefill's chunks")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--gemm", type=int, default=8192, help="width of the large product")
    parser.add_argument("--vllm", action="store_true", help="also the targets served by vLLM")
    parser.add_argument("--json", help="append the records to this file")
    args = parser.parse_args(argv)
    args.pairs = args.pairs or list(PAIRS[args.label])
    try:
        settings_of(args).check(args.pairs)
        if args.vllm:
            serving_of(args).check(targets_of(args))
            vllm_serving.vllm()
    except (ValueError, KVLingoError) as error:
        parser.error(str(error))
    return args


def settings_of(args: argparse.Namespace) -> switch.SwitchSettings:
    return switch.SwitchSettings(
        device=args.device, dtype=args.dtype, tokens=tuple(args.tokens), layers=args.layers,
        nu=args.nu, trials=args.trials, methods=tuple(args.methods),
        prefill_chunk=args.prefill_chunk, graphs=not args.no_graphs, gemm=args.gemm,
    )  # fmt: skip


def serving_of(args: argparse.Namespace) -> vllm_serving.Serving:
    return vllm_serving.Serving(tokens=tuple(args.tokens), dtype=args.dtype)


def targets_of(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(ends_of(pair)[1] for pair in args.pairs))


def keep(args: argparse.Namespace, kind: str, config: dict[str, Any], results: Any) -> None:
    if args.json:
        measure.append_json(args.json, measure.record(kind, config, results))


def in_lines(pair: str, found: Mapping[str, Any]) -> list[str]:
    """One length's findings as lines of text."""
    lines = [f"{pair.replace(':', ' to ')}, {found['tokens']} tokens"]
    for name, row in found["rows"].items():
        line = (
            f"  {name:44s} {1e3 * row['median_s']:10.3f} ms  (min {1e3 * row['min_s']:.3f}, "
            f"IQR {1e3 * row['iqr_s']:.3f})"
        )
        if "flops" in row:
            line += (
                f"  {row['flops'] / row['median_s'] / 1e12:.3g} TFLOP/s, "
                f"{100 * row['of_gemm_rate']:.0f} % of the product's rate"
            )
        if "bytes" in row:
            line += f", {100 * row['of_copy_rate']:.0f} % of the copy's"
        lines.append(line)
    for name, each in found["ratios"].items():
        lines.append(f"  {name}: {np.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
    if found["prefill_chunk"] < found["tokens"]:
        lines.append(f"  re-prefill in chunks of {found['prefill_chunk']}")
    if found["peak_bytes"]:
        listed = (f"{name} {n / 1e9:.2f} GB" for name, n in found["peak_bytes"].items())
        lines.append(f"  most memory: {', '.join(listed)}")
    lines += [f"  {name} is no CUDA graph: {why}" for name, why in found["not_captured"].items()]
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    settings, told = settings_of(args), dict[str, list[Any]]()

    def listen(pair: str, found: dict[str, Any]) -> None:
        told.setdefault(pair, []).append(found)
        print("", *in_lines(pair, found), sep="\n")

    config = switch.config_of_record(args.pairs, settings)
    try:
        results = switch.time_pairs(args.pairs, settings, listen)
        rate = results["rates"]
        print(f"\nproduct of {args.gemm}: {rate['gemm_flops'] / 1e12:.3g} TFLOP/s in {args.dtype}; "
              f"copy: {rate['copy_bytes'] / 1e9:.3g} GB/s")  # fmt: skip
    except BaseException:  # a pair that fails takes nothing with it of those before
        plans = {pair: switch.plan(pair, settings) for pair in told}
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
