"""What one machine with a GPU can settle within a time: steps in the order of their worth.

    tools/on_a_gpu.sh MINUTES [OUT] [--real SOURCE TARGET DATA] [--tiny]      # and on_a_mac.sh

A step gets its share of the time that is left and is stopped at its end; what it does not use,
later ones get. OUT keeps each step's output (.log), records (records.jsonl), and a table with each
step's last lines (table.txt), written anew after every step. ``--real`` adds a training of two real
models on conversations; ``--tiny`` tries everything on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SWITCH = """
gpu 2 switch-LABEL
    benchmarks/cuda_switch.py --trials 3 --json {records} [--label LABEL --tokens 2048 8192 32768 |
    --device cpu --dtype float32 --pairs tiny-s:tiny-l --tokens 40 --gemm 64]
"""
LABELS = "tab:cost tab:xdepth fig:nsrc_ttft app:tab:moe tab:gemma3".split()
# Machines; worth, a share beside those of later steps; name. Then a command of Python, in which
# [a | b] is a, or b where everything is tried on a CPU.
STEPS = f"""
gpu mac 1 counts
    benchmarks/translation_counts.py --timed 3 --json {{records}}
    [--tokens 512 2048 8192 | --tokens 64 --layers 2]
gpu mac 1 counts-8-bits
    benchmarks/translation_counts.py --timed 3 --json {{records}} --bits 8
    [--tokens 2048 | --tokens 8 --layers 1]
gpu mac 8 tests
    tools/suite_in_pieces.py {{minutes}} {{out}}/tests [ | tests/translators/test_counts.py]
gpu 3 bench
    -m benchmarks.paper bench --table switch -n 3 --time-limit {{seconds}} --json {{records}}
    [--geometry qwen3-4b:qwen3-8b --precision bfloat16 -p 2048,8192,32768 |
    tiny-qwen3-s tiny-qwen3-l -p 64]
mac 8 bench
    -m benchmarks.paper bench -n 3 --time-limit {{seconds}} --json {{records}}
    [--geometry qwen3-4b:qwen3-30b-a3b --precision 4bit | tiny-qwen3-s tiny-qwen3-l -p 64]
{"".join(SWITCH.replace("LABEL", label) for label in LABELS)}
gpu 2 training-torch
    benchmarks/training_throughput.py --runtimes torch --trials 3 --json {{records}}
    [--device cuda --dtype bfloat16 --prefix 8192 --continuation 2048 |
    --source tiny-s --target tiny-l --prefix 40 --continuation 8]
gpu mac 2 training-mlx
    benchmarks/training_throughput.py --runtimes mlx --trials 3 --json {{records}}
    [--dtype bfloat16 --prefix 8192 --continuation 2048 |
    --layers 1 --prefix 40 --continuation 8]
gpu mac 8 real-pair
    -m kvlingo_mlx.cli train {{real[0]}} {{real[1]}} --data {{real[2]}} --out {{out}}/pair
    --minutes {{minutes}} --json {{records}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("machine", choices=("gpu", "mac"))
    parser.add_argument("minutes", type=float)
    parser.add_argument("out", type=Path, nargs="?", default=Path("machine-results"))
    parser.add_argument("--real", nargs=3, metavar=("SOURCE", "TARGET", "DATA"))
    parser.add_argument("--tiny", action="store_true")
    with contextlib.suppress(KeyboardInterrupt):
        run_all(parser.parse_args())


def steps_of(args: argparse.Namespace) -> list[tuple[float, str, list[str]]]:
    """Worth, name and the words of the command, of each step that this machine can do."""
    found = []
    for head, command in re.findall(r"^(\w.*)\n((?: .*\n?)+)", STEPS, re.MULTILINE):
        *machines, worth, name = head.split()
        chosen = re.sub(r"\[([^]]*)\|([^]]*)\]", r"\2" if args.tiny else r"\1", command)
        if args.machine in machines and (args.real or "{real" not in chosen):
            found.append((float(worth), name, chosen.split()))
    return found


def filled(words: list[str], args: argparse.Namespace, limit: float) -> list[str]:
    """A command that is to take most of ``limit`` seconds, where it is told how many."""
    names = {"out": args.out, "records": args.out / "records.jsonl", "real": args.real}
    times = {"minutes": limit * 0.8 / 60, "seconds": limit * 0.8}
    return [sys.executable, *(word.format(**names, **times) for word in words)]


def run(words: list[str], log: Path, limit: float) -> str:
    """Run a step for so many seconds at most; returns how it ended."""
    paths = str(ROOT), os.environ.get("PYTHONPATH")
    with log.open("w") as file:
        step = subprocess.Popen(
            words, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
    try:
        code = step.wait(limit)
        return f"ended with code {code}" if code else "done"
    except subprocess.TimeoutExpired:
        return "stopped at its share"
    finally:
        for each in (signal.SIGINT, signal.SIGKILL):  # the first lets it keep what it has
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(step.pid, each)
                step.wait(15)


def run_all(args: argparse.Namespace) -> None:
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps = steps_of(args)
    end, rows, said = time.monotonic() + 60 * args.minutes, list[str](), list[str]()
    for place, (worth, name, command) in enumerate(steps):
        left, began = end - time.monotonic(), time.monotonic()
        limit, state = left * worth / sum(each[0] for each in steps[place:]), "stopped"
        log = args.out / f"{name.replace(':', '-')}.log"
        log.write_text("")
        print(name, flush=True)
        try:
            state = run(filled(command, args, limit), log, limit) if limit > 1 else "no time left"
        finally:
            rows.append(f"{name:24s} {time.monotonic() - began:5.0f} of {limit:5.0f} s  {state}")
            said += [f"\n---- {name}", *log.read_text(errors="replace").splitlines()[-40:]]
            (args.out / "table.txt").write_text("\n".join([*rows, *said]) + "\n")
            if state == "stopped" or place == len(steps) - 1:
                print("", *rows, *said, f"\nkept in {args.out}", sep="\n")


if __name__ == "__main__":
    main()
