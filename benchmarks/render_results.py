"""Render benchmarks/RESULTS.md, which is not committed, from the records under benchmarks/results.

    python benchmarks/render_results.py [KIND ...]

Every record becomes a table beside the command and the machine that made it: a row for each thing
that was measured, a column for each number of it. Of several samples the median, the least and the
most stand there; long tables are cut.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
HEAD = """# Results

Rendered by `python benchmarks/render_results.py` from the records under results/. The models are
the tiny embedded ones (`kvlingo_mlx/embedded`), so this page says how methods compare, not how well
they do on models that people use. Nothing here was measured on Apple hardware.
"""
ROWS, COLUMNS = 40, 12  # of a table at most; one of more columns lists names and numbers instead
Place = tuple[str, ...]


def records() -> Iterator[dict[str, Any]]:
    """All records with a kind, oldest first in each file."""
    for file in sorted((HERE / "results").glob("*.jsonl")):
        lines = (json.loads(line) for line in file.read_text().splitlines() if line)
        yield from (record for record in lines if "kind" in record)


def leaves(found: Any, path: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every number, text or list of samples in some results, with where it stands."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            yield from leaves(value, (*path, str(name)))
    elif isinstance(found, list) and found and all(isinstance(n, int | float) for n in found):
        yield path, f"{median(found):.4g} ({min(found):.3g} to {max(found):.3g}, n={len(found)})"
    elif isinstance(found, list):
        for index, value in enumerate(found):
            yield from leaves(value, (*path, str(index)))
    elif found is not None:
        yield path, f"{found:.4g}" if isinstance(found, float) else str(found)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[*columns], ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables(found: Any) -> str:
    """Results as a table of what was measured by what of it."""
    by_row: dict[str, dict[str, str]] = {}
    for path, value in leaves(found):
        by_row.setdefault(" / ".join(path[:-1]), {})[path[-1] if path else ""] = value
    columns = list(dict.fromkeys(name for row in by_row.values() for name in row))
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in by_row.items()]
    if len(columns) > COLUMNS:
        pairs = ((name, *item) for name, row in by_row.items() for item in row.items())
        columns, rows = ["what", "value"], [list(each) for each in pairs]
    cut = f"\n{len(rows) - ROWS} more rows are in the record.\n" if len(rows) > ROWS else ""
    return table(["", *columns], rows[:ROWS]) + cut


def source(record: Mapping[str, Any]) -> str:
    """Where numbers come from: command, machine, versions."""
    machine, command = record["environment"], record["command"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    listed = [machine.get("cuda"), machine["chip"], f"{machine['cores']} cores", machine["system"],
              machine.get("fast_blas")]  # fmt: skip
    program = "" if command.startswith(("kvlingo-mlx ", "python ")) else "python benchmarks/"
    whole = f"{program}{command}".replace("benchmarks/__main__.py", "-m benchmarks.paper")
    return f"`{whole}`, {record['date']}; {', '.join(filter(None, listed))}; {versions}.\n"


def main(kinds: Sequence[str]) -> None:
    sections, last = [HEAD], None
    for record in records():
        if kinds and record["kind"] not in kinds:
            continue
        if record["kind"] != last:
            last = record["kind"]
            sections.append(f"## {last.replace('_', ' ')}\n")
        sections += [source(record), tables(record["results"])]
    PAGE.write_text("\n".join(sections))


if __name__ == "__main__":
    main(sys.argv[1:])
