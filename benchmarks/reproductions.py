"""Every table and figure of the paper that `python -m benchmarks.paper` makes, on tiny models.

    python benchmarks/reproductions.py --zoo tests/zoo/models --room DIR --json FILE

Each label is run through the verb in a process of its own. What is kept of it is how many of its
numbers were made, how long that took, and where models answer: the means of native and translated
caches over its cells. The same room goes on where an earlier run stopped. No GPU is needed, so what
needs one or vLLM is not made here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

import numpy as np

from benchmarks.paper.reproducing.entries import ENTRIES
from benchmarks.paper.reproducing.forms import OWN
from benchmarks.paper.reproducing.listing import USED, cells_of
from kvlingo_mlx.reporting import measure

ELSEWHERE = ("app:tab:vllm",)  # vLLM has no CPU path that this tries


def labels() -> list[str]:
    """What can be made without a GPU."""
    made = (entry for entry in ENTRIES if entry.maker not in ("protocol", "missing"))
    return [entry.label for entry in made if entry.label not in ELSEWHERE]


def run(label: str, args: argparse.Namespace) -> dict[str, Any]:
    """One label's run: its exit status, its seconds and what it told last."""
    (entry,) = (entry for entry in ENTRIES if entry.label == label)
    words = [label, "--tiny", "--room", str(args.room)]
    if "models" in USED.get(entry.maker, ()):
        words += ["--models", str(args.zoo)]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.paper", *words], capture_output=True, text=True
    )
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return {
        "label": label,
        "maker": entry.maker,
        "status": done.returncode,
        "seconds": round(time.perf_counter() - began, 1),
        "last": lines[-1].replace(str(args.room), "ROOM") if lines else "",
        **(made(label, args.room) if not done.returncode else {}),
    }


def made(label: str, room: Path) -> dict[str, Any]:
    """How many numbers a label has, how many were made, and the means of scores by reader."""
    found = json.loads((room / "tiny/results" / f"{label.replace(':', '-')}.json").read_text())
    values = [value for row in found["rows"] for value in row["values"]]
    (entry,) = (entry for entry in ENTRIES if entry.label == label)
    scores: dict[str, list[float]] = {}
    if cells_of(entry):
        for row, kept in zip(entry.grid().rows, found["rows"], strict=False):
            for cell, value in zip(row.cells, kept["values"], strict=True):
                if cell is not None and isinstance(value, dict) and value["value"] is not None:
                    scores.setdefault(reader(cell.who), []).append(rescaled(cell, value))
    return {
        "numbers": len(values),
        "made": sum(value is not None for value in values),
        "means": {name: round(float(np.mean(each)), 3) for name, each in scores.items()},
    }


def reader(who: str) -> str:
    """Models alone, closed forms, trained translators, and all else."""
    if who in OWN or who == "text":
        return "native"
    if who.startswith("closed"):
        return "closed form"
    return who.partition(":")[0] if who.startswith(("droidspeak", "reuse")) else "trained"


def rescaled(cell: Any, value: dict[str, float]) -> float:
    """A score from 0 to 1."""
    return (value["value"] - 1) / 9 if cell.benchmark == "mt_bench_101" else value["value"]


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for label in args.labels:
        found = run(label, args)
        print(f"{label}: status {found['status']}, {found['seconds']} s, {found['last'][:100]}")
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", nargs="+", default=labels())
    parser.add_argument("--zoo", type=Path, required=True, help="a folder with the zoo's models")
    parser.add_argument("--room", type=Path, required=True)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    found = list(results(args))
    measure.append_json(args.json, measure.record("reproductions", {}, {"entries": found}))


if __name__ == "__main__":
    main()
