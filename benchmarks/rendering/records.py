"""Records, tables, and where a number comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parents[1]


def records(name: str) -> list[dict]:
    """The records of one file, oldest first; none where it is absent."""
    path = HERE / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def source(record: dict) -> str:
    """Where numbers come from: command, machine, versions."""
    machine, versions = record["environment"], record["environment"]["versions"]
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    gpu = f"{machine['cuda']}, " if machine.get("cuda") else ""
    blas = f", {machine['fast_blas']}" if machine.get("fast_blas") else ""
    command = record["command"]
    if not command.startswith("kvlingo-mlx "):
        command = f"python benchmarks/{command}"
    return (
        f"`{command}`, {record['date']}; {gpu}{machine['chip']}, "
        f"{machine['cores']} cores, {machine['system']}{blas}; {listed}.\n"
    )


def sources(found: Sequence[dict]) -> str:
    """Where the numbers of several records come from: each command once, with its newest record."""
    newest = {record["command"]: record for record in found}
    return "\n".join(source(record) for record in newest.values())
