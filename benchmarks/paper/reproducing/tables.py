"""The paper's tables as data: what is printed in them, and what each cell is a score of.

``tables.jsonl`` holds a table a line: its label, its columns, and its rows, each the part of the
table that it stands in, then its cells. A cell is a number, a number with its error, a text, or
None.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL_TO_LARGE, LARGE_TO_SMALL = "small to large", "large to small"
WAYS = (LARGE_TO_SMALL, SMALL_TO_LARGE)
Pair = tuple[str, str]  # the small and the large model

# As the tables spell them, with our names; longer spellings first.
BENCHMARKS = {
    "MMLU-Pro": "mmlu_pro",
    "ARC-C": "arc_challenge",
    "ARC-E": "arc_easy",
    "GSM8K": "gsm8k",
    "IFEval": "ifeval",
    "CoQA": "coqa",
    "RepLiQA": "repliqa",
    "XQuAD": "xquad",
    "MT-Bench-101": "mt_bench_101",
    "RULER": "ruler",
    "LongMemEval": "longmemeval",
    "LongBench-v2": "longbench_v2",
    "SQuAD-v1": "squad",
    "BoolQ": "boolq",
    "WinoGrande": "winogrande",
    "HellaSwag": "hellaswag",
    "PIQA": "piqa",
    "mean": "mean",
}
RUNGS = ("oracle", "4k", "8k", "16k", "32k")
_MODEL = r"(?:Qwen3-|Gemma-3-|Gemma-4-)?E?\d+(?:\.\d+)?B(?:-A3B)?"


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        label: Its label.
        columns: The titles of all columns, those of row labels first.
        rows: Its rows; the first element of each is the part of the table that it stands in.
        labels: How many of the columns name the row.
    """

    label: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    labels: int

    def names(self, row: int) -> list[str]:
        """The words that name a row; where one is empty, that of the row above it."""
        found = []
        for place in range(self.labels + 1):
            above = (self.rows[i][place] for i in range(row, -1, -1))
            word = next((word for word in above if word is not None), "")
            found.append(f"{word:g}" if isinstance(word, float) else str(word))
        return found

    def values(self, row: int) -> tuple[Any, ...]:
        """A row's cells."""
        return self.rows[row][self.labels + 1 :]


@functools.cache
def tables() -> Mapping[str, Table]:
    """The paper's tables by label."""
    text = (Path(__file__).parent / "tables.jsonl").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines():
        told = json.loads(line)
        rows = tuple(tuple(row) for row in told["rows"])
        table = Table(told["label"], tuple(told["columns"]), rows, told["labels"])
        found[table.label] = table
    return found


def meaning(names: Sequence[str]) -> dict[str, Any]:
    """What the words that name a row say of its cells: ``pair``, ``way``, ``what``.

    What they do not say is left out.
    """
    text = "; ".join(names)
    said: dict[str, Any] = {}
    if "L → S" in text or "S → L" in text:
        said["way"] = LARGE_TO_SMALL if "L → S" in text else SMALL_TO_LARGE
    if found := re.search(rf"({_MODEL}) → ({_MODEL})", text):
        pair, way = _ordered(*_full(found[1], found[2]))
        said |= {"pair": pair, "way": way}
    elif found := re.search(rf"({_MODEL})/({_MODEL})", text):
        small, large = _ordered(*_full(found[1], found[2]))[0]
        ending = "-scratch" * ("scratch" in text)
        said["pair"] = small + ending, large + ending
    for spelled, name in BENCHMARKS.items():
        if re.search(rf"\b{spelled}\b", text):
            rung = next((r for r in RUNGS if re.search(rf"\b{r}\b", names[-1])), "")
            said["what"] = f"{name} {rung}".strip()
    return said


def _full(first: str, second: str) -> tuple[str, str]:
    """Both models' released names, without their owners; the second may lack its family."""
    family = next((f for f in ("Qwen3-", "Gemma-3-", "Gemma-4-") if first.startswith(f)), "Qwen3-")
    sizes = (first.removeprefix(family), second.removeprefix(family))
    if family == "Qwen3-":
        return f"{family}{sizes[0]}", f"{family}{sizes[1]}"
    ends = (s if family == "Gemma-4-" else s.lower() for s in sizes)
    small, large = (f"{family.lower()}{end}-it" for end in ends)
    return small, large


def _ordered(source: str, target: str) -> tuple[Pair, str]:
    """The pair, small before large, and the way from ``source`` to ``target``."""
    sizes = [float(re.search(r"(\d+(?:\.\d+)?)B", name, re.I)[1]) for name in (source, target)]  # type: ignore[index]
    if sizes[0] < sizes[1]:
        return (source, target), SMALL_TO_LARGE
    return (target, source), LARGE_TO_SMALL
