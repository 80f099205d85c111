"""The paper's tables as data: a JSON line a table, with label, columns and rows."""

from pathlib import Path

from benchmarks.paper import reproducing

FILE = Path(reproducing.__file__).parent / "tables.jsonl"
