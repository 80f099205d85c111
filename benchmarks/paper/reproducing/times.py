"""Entries of times: each runs what ``bench`` and ``cuda_switch`` run, and lays out its records."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.results import Line, Result
from benchmarks.paper.reproducing.tables import Table, tables
from benchmarks.paper.reproducing.work import Work
from benchmarks.paper.timing.laid_out import FIGURE, laid_out
from benchmarks.paper.timing.widths import PAIRS
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.reporting import measure

RECORDS = "times.jsonl"
Record = dict[str, Any]
# The words of `bench` for a label; in a tiny run, those of the second list.
BENCH = {
    "app:tab:moespeed": (
        "--geometry qwen3-4b:qwen3-30b-a3b --precision bfloat16 -p 64,128,256,512,1024 "
        "--time-limit 3600",
        "-p 64,128 -n 1 --decode-tokens 4 --quantize none",
    ),
    "app:tab:budget": (
        "--table memory-budget -p 8192,32768 -n 3 --time-limit 3600",
        "--table memory-budget --layers 6 -p 16 -n 1 --batch-sizes 1 --decode-tokens 1",
    ),
}


def make(entry: Entry, work: Work) -> Result:
    """The result of an entry of times."""
    records: list[Record] = []
    notes = []
    for label in FIGURE if entry.label == "fig:cost" else (entry.label,):
        try:
            records += _records(label, work)
        except KVLingoError as error:
            if label == entry.label:
                raise
            notes.append(f"without {label}: {error}")
    if work.tiny:
        return _as_they_are(records, notes)
    found = laid_out(entry.label, records)
    table = tables().get(entry.label)
    count = 1 if table is None else table.labels
    lines = []
    for index, row in enumerate(found.rows):
        names = tuple(_word(cell) for cell in row[: count + 1] if cell is not None)
        paper = () if table is None else _paper(table, index)
        lines.append(Line(names, tuple(row[count + 1 :]), paper))
    columns = tuple(found.columns)
    return Result(columns[:count], columns[count:], tuple(lines), (*notes, *found.differs))


def _paper(table: Table, row: int) -> tuple[Any, ...]:
    return table.values(row) if row < len(table.rows) else ()


def _word(cell: Any) -> str:
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


def _as_they_are(records: list[Record], notes: list[str]) -> Result:
    """The seconds of a tiny run, which has none of the paper's models and lengths."""
    lines = [
        Line((record["kind"], "/".join(map(str, path))), (float(value),))
        for record in records
        for path, value in _numbers(record["results"])
    ]
    return Result(("record", "number"), ("value",), tuple(lines), tuple(notes))


def _numbers(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], float]]:
    """Every number in a record, with where it stands."""
    if isinstance(found, bool) or found is None:
        return []
    if isinstance(found, int | float):
        return [(path, found)]
    if isinstance(found, str):
        return []
    inside = found.items() if isinstance(found, Mapping) else enumerate(found)
    return [pair for key, value in inside for pair in _numbers(value, (*path, key))]


# ---- records ----------------------------------------------------------------------------------


def _records(label: str, work: Work) -> list[Record]:
    """The records of a label: those that are kept, or new ones."""
    path = work.room / label.replace(":", "-") / RECORDS
    if not path.exists():
        work.heard.progress(f"timing {label}")
        records = MAKERS[label](label, work)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        work.write(str(path.relative_to(work.room)), lines)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _bench(label: str, work: Work) -> list[Record]:
    """The records of our ``bench``, which has a process of its own and so all memory."""
    path = work.room / label.replace(":", "-") / "bench.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    words = BENCH[label][work.tiny].split()
    command = [sys.executable, "-m", "benchmarks.paper", "bench", *words, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        told = done.stderr.strip().splitlines() or ["it ended without a word"]
        raise KVLingoError(f"bench {' '.join(words)}: {told[-1]}")
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _switch(label: str, work: Work) -> list[Record]:
    """A record of ``cuda_switch``."""
    from benchmarks.paper.timing import gpu

    pairs, settings = PAIRS[label], gpu.PairSettings()
    if work.tiny:
        pairs = ("tiny-s:tiny-l",)
        settings = gpu.PairSettings(device="cpu", dtype="float32", tokens=(40,), gemm=64, trials=2)
    results = gpu.time_pairs(pairs, settings, lambda pair, _: work.heard.progress(pair))
    return [_record("cuda_switch", gpu.config_of_record(pairs, settings), results)]


def _served(label: str, work: Work) -> list[Record]:
    """A record of vLLM."""
    from benchmarks.paper.timing import vllm_serving

    serving = vllm_serving.Serving()
    results = vllm_serving.time_models(serving=serving)
    return [_record("cuda_vllm", vars(serving), results)]


def _record(kind: str, config: Mapping[str, Any], results: Mapping[str, Any]) -> Record:
    return {
        "kind": kind,
        "config": dict(config),
        "environment": measure.environment(),
        "results": results,
    }


MAKERS: dict[str, Callable[[str, Work], list[Record]]] = {
    "tab:cost": _switch,
    "app:tab:vllm": _served,
    "app:tab:moespeed": _bench,
    "app:tab:budget": _bench,
}
