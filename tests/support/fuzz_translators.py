"""Mutate translator folders by the hundred thousand and load each; no test, a command.

    nice python -m tests.support.fuzz_translators --examples 100000 \\
        --json benchmarks/results/fuzz.jsonl

Every example is one to three mutations of a sound folder (``damaged_folders``): config,
headers, tensors, raw bytes. It must be read soundly, or refused with one line, within LIMIT
seconds of the processor (on a busy machine others' time counts too, up to WAIT). What is read is
also loaded as ``load_translator`` does, into MLX arrays that are worked out. Each batch runs in a
process of its own, so a crash is counted, named by its seed, and the next batch goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support import ROOT

NAME = "tests.support.fuzz_translators"
BATCH, LIMIT, WAIT = 5000, 2.0, 30.0


def run_batch(batch: int, examples: int) -> dict[str, float]:
    """One batch in this process; what it finds wrong it raises."""
    from kvlingo_mlx.backend import mx

    from hypothesis import HealthCheck, Phase, given, seed, settings

    import kvlingo_mlx as kv
    from tests.support.damaged_folders import Files, damaged, try_folder

    found = {"read": 0, "refused": 0, "examples": 0, "slowest_ms": 0.0}
    room = Path(tempfile.mkdtemp())

    @seed(batch)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(files=damaged())
    def each(files: Files) -> None:
        started, begun = time.perf_counter(), time.process_time()
        sound = try_folder(room, files)
        if sound:
            try:
                translator = kv.load_translator(room / "fuzzed")
                mx.eval([a for groups in translator.groups.values() for a in arrays_of(groups)])
            except (kv.MalformedTranslatorError, kv.IncompatibleTranslatorError) as error:
                assert str(error).isprintable()
        seconds, waited = time.process_time() - begun, time.perf_counter() - started
        assert seconds < LIMIT and waited < WAIT, f"took {seconds:.1f} s of {waited:.1f} s"
        found["read" if sound else "refused"] += 1
        found["examples"] += 1
        found["slowest_ms"] = max(found["slowest_ms"], 1e3 * seconds)

    each()
    return found


def arrays_of(groups) -> list:
    """Every MLX array that a translator's groups hold."""
    from kvlingo_mlx.backend import mx

    found, todo = [], list(groups)
    while todo:
        item = todo.pop()
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
        elif hasattr(item, "__dict__"):
            todo += vars(item).values()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--json", help="append the record to this file")
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.batch is not None:
        sys.stdout.write(json.dumps(run_batch(args.batch, args.examples)) + "\n")
        return
    total: Counter[str] = Counter()
    slowest, findings, started = 0.0, [], time.perf_counter()
    batch = args.seed
    while total["examples"] < args.examples:
        count = min(BATCH, args.examples - total["examples"])
        command = [sys.executable, "-m", NAME, "--batch", str(batch), "--examples", str(count)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=300 + count * LIMIT
            )
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
            problem = f"exit {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            found, problem = None, "hung"
        if found is None:
            findings.append({"seed": batch, "problem": problem})
            sys.stderr.write(f"\nseed {batch}: {problem}\n")
            total["lost"] += count
            found = {"examples": count}
        slowest = max(slowest, found.pop("slowest_ms", 0.0))
        total.update(found)
        batch += 1
        sys.stderr.write(f"\r{dict(total)}, slowest {slowest:.0f} ms, {len(findings)} findings ")
    seconds = time.perf_counter() - started
    results = {**total, "slowest_ms": slowest, "seconds": seconds, "findings": findings}
    print(json.dumps(results))
    if args.json:
        from kvlingo_mlx.reporting import measure

        entry = measure.record("fuzz_translators", {"seed": args.seed, "batch": BATCH}, results)
        measure.append_json(args.json, entry)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
