"""The list of tables and figures against the paper's labels, and what each cell is a score of."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from benchmarks.paper.evaluation.suites import BASE, PAPER
from benchmarks.paper.reproducing import labels
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.entries import BY_LABEL, ENTRIES, LARGE, MIXTURE, SMALL
from benchmarks.paper.reproducing.forms import OWN, form, is_translator
from benchmarks.paper.reproducing.listing import listed, overview, pairs_of
from benchmarks.paper.reproducing.running import MAKERS
from benchmarks.paper.reproducing.tables import tables
from benchmarks.paper.reproducing.trained import Wanted, settings
from benchmarks.paper.reproducing.work import Work
from benchmarks.paper.training.paper_pairs import filled

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Written by a script that read every figure and table of the paper's source.
LABELS = [
    [told["kind"], told["label"]]
    for told in map(json.loads, (HERE / "captions.jsonl").read_text().splitlines())
]
L2S, S2L = "large to small", "small to large"
SCORES = [entry for entry in ENTRIES if entry.maker == "scores"]


def test_every_label_of_the_paper_has_an_entry() -> None:
    assert len(LABELS) == 75
    assert {(e.kind, e.label) for e in ENTRIES} == {(kind, label) for kind, label in LABELS}
    assert len(ENTRIES) == len(LABELS)


def test_every_entry_is_made_or_has_a_reason() -> None:
    for entry in ENTRIES:
        assert entry.maker in MAKERS or entry.why, entry.label
        if entry.maker == "protocol":
            assert (ROOT / entry.why).exists(), f"{entry.label} names {entry.why}"
    assert sum(entry.maker == "missing" for entry in ENTRIES) == 6


def test_every_table_of_numbers_is_data() -> None:
    have = set(tables())
    assert have == {label for kind, label in LABELS if kind == "table"}


@pytest.mark.parametrize("entry", SCORES, ids=lambda entry: entry.label)
def test_every_number_of_a_table_has_a_cell(entry: Any) -> None:
    grid = entry.grid()
    known = {row.name for row in (*PAPER, *BASE)} | {"mean", "compute"}
    assert {cell.benchmark for cell in grid.cells()} <= known
    for row in grid.rows:
        for at, (cell, value) in enumerate(zip(row.cells, row.paper or row.cells, strict=True)):
            if entry.label == "app:tab:cachedist" and at in (0, 3):
                assert cell is None  # R2, which no benchmark scores
            elif not isinstance(value, str):
                assert cell is not None or value is None, (row.names, at)
    for cell in grid.cells():
        if is_translator(cell.who):
            form(cell.who)


def of(label: str, *words: str) -> dict[int, tuple[Cell | None, Any]]:
    """The cells and values of the row that these words name."""
    row, *_ = (r for r in BY_LABEL[label].grid().rows if r.names == words)
    return dict(enumerate(zip(row.cells, row.paper, strict=True)))


def test_numbers_stand_where_the_paper_has_them() -> None:
    """Read off the paper's pages."""
    row = of("tab:qwen3ls", "Qwen3-4B/8B", "RULER")
    assert row[2] == (Cell(LARGE, L2S, "ruler", "closed"), [0.96, 0.004])
    row = of("tab:qwen3sl", "Qwen3-0.6B/1.7B", "MMLU-Pro")
    assert row[3] == (Cell(SMALL, S2L, "mmlu_pro", "mixing", seeds=(42, 43, 44)), [0.246, 0.009])
    assert row[1] == (Cell(SMALL, S2L, "mmlu_pro", "large"), [0.379, 0.013])
    row = of("app:tab:moe", "LongMemEval 16k")
    cell = Cell(MIXTURE, S2L, "longmemeval 16k", "mixing+nu3", seeds=(42,))
    assert row[2] == (cell, 0.576)
    row = of("tab:cothandoff", "GSM8K")
    assert row[4][0] == Cell(SMALL, L2S, "gsm8k", "closed", True, "trace")
    row = of("tab:droidspeak", "DroidSpeak, profiler")
    assert row[0] == (Cell(SMALL, S2L, "arc_challenge", "droidspeak"), [0.77, 0.012])
    row = of("tab:droidspeak_sweep", "20")
    assert row[2] == (Cell(SMALL, L2S, "arc_challenge", "droidspeak:20"), [0.5, 0.025])


def agreement(shift: int) -> float:
    """How often two tables that have the same cell have nearly the same value in it.

    ``shift`` moves the columns of every second table.
    """
    values: dict[Cell, list[float]] = defaultdict(list)
    for number, entry in enumerate(e for e in SCORES if e.columns):
        for row in entry.grid().rows:
            paper = row.paper[shift * (number % 2) :] + row.paper[: shift * (number % 2)]
            for cell, value in zip(row.cells, paper, strict=True):
                if isinstance(value, list) and cell is not None and cell.who in OWN:
                    values[cell].append(value[0])
    shared = [found for found in values.values() if len(found) > 1]
    assert len(shared) > 30
    return sum(max(found) - min(found) < 0.05 for found in shared) / len(shared)


def test_tables_agree_on_the_cells_that_they_share() -> None:
    """A model's own score is in several tables; it is the same one there, unless misread."""
    assert agreement(0) > 0.95
    assert agreement(1) < 0.7


def test_forms_are_the_papers() -> None:
    work = Work(Path("room"))
    plan, recipe, stage1 = settings(work, Wanted("Qwen3-4B", "Qwen3-30B-A3B", "mixing+nu3", 42))
    assert recipe == {"learning_rates": ()} and stage1 is None
    assert filled(plan, "Qwen3-4B", "Qwen3-30B-A3B")["norm"] == "attention_mass"
    plan, recipe, stage1 = settings(work, Wanted(*SMALL, "head_wise_mlp", 42))
    assert (plan["kind"], plan["head_mixing"]) == ("mlp", False)
    assert stage1 == {"steps": 5000, "rates": ()} and recipe["sweep"]
    assert settings(work, Wanted(*SMALL, "closed", 42))[1]["steps"] == 0
    assert form("wide_mlp").plan == {"kind": "mlp", "hidden": 4096, "gated": False}
    plan, recipe, stage1 = settings(work, Wanted(*LARGE, "wide_mlp", 42))
    assert recipe == {"learning_rates": (3e-6, 1e-5, 3e-5)} and stage1["rates"] == (1e-3,)
    assert form("mixing+post_rope+cap8k").stream == {"max_prefix": 8192}
    assert form("mixing+r2+nu4").plan == {"assignment": "r2", "nu": 4}
    for wrong in ("mixin", "mixing+nu", "mixing+r3"):
        with pytest.raises(ValueError, match="there is no translator|changes nothing"):
            form(wrong)


def test_the_list_tells_what_is_needed(tmp_path: Path) -> None:
    rows = {row.label: row for row in listed(tmp_path)}
    suite = rows["tab:qwen3sl"]
    # Two pairs, one way: a closed form, and four trained translators of three seeds each.
    assert suite.trainings == 2 * (1 + 4 * 3) and suite.judge
    assert suite.models == ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
    assert suite.command.endswith("tab:qwen3sl --judge MODEL") and suite.state == "not done"
    assert suite.hours is None and rows["tab:gemma3"].gated == ("gemma-3-4b-it", "gemma-3-12b-it")
    lines = overview(list(rows.values()))
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert all(any(label in line for line in lines) for _, label in LABELS)
    assert rows["tab:cost"].machine == "an NVIDIA GPU"
    state = rows["tab:mla"].state
    assert state.startswith("needs Qwen3-4B and 8B converted")
    assert "convert_mla.py --rank 1024 --rotary 64" in state and "--steps 120000" in state
    assert "as they are" in rows["app:tab:mla"].state and "60000" in rows["app:tab:mla"].state
    assert rows["tab:base"].models[0] == "Qwen3-0.6B-Base"
    assert pairs_of(BY_LABEL["tab:linearity"]) == [LARGE, SMALL]


def test_the_page_of_labels_is_todays() -> None:
    """Else: python -m benchmarks.paper.reproducing.labels."""
    assert labels.PAGE.read_text(encoding="utf-8") == labels.page()
    verdicts = [labels.AUDIT.get(label) for _, label in LABELS]
    assert (verdicts.count(labels.OTHER), verdicts.count(labels.MISSING)) == (19, 6)
    assert set(labels.AUDIT) <= {label for _, label in LABELS}
