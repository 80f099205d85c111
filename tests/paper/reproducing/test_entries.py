"""The list of tables and figures against the paper's labels, and what each cell is a score of."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from benchmarks.paper.analysis.linearity import LayerFit, summarise
from benchmarks.paper.analysis.report import Grid, Rank, Report
from benchmarks.paper.analysis.statistics import HeadAlignment, correspondence
from benchmarks.paper.evaluation.suites import BASE, PAPER
from benchmarks.paper.reproducing import statistics
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.entries import BY_LABEL, ENTRIES, LARGE, MIXTURE, SMALL
from benchmarks.paper.reproducing.forms import OWN, form, is_translator
from benchmarks.paper.reproducing.listing import listed, pairs_of
from benchmarks.paper.reproducing.results import Result
from benchmarks.paper.reproducing.running import MAKERS
from benchmarks.paper.reproducing.tables import tables
from benchmarks.paper.reproducing.trained import Wanted, settings
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.training.paper_pairs import filled

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Written by a script that read every figure and table of the paper's source.
LABELS = [line.split() for line in (HERE / "labels.txt").read_text().splitlines()]
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
    assert stage1 == {"steps": 5000, "rates": ()}
    assert settings(work, Wanted(*SMALL, "closed", 42))[1]["steps"] == 0
    assert form("wide_mlp").plan == {"kind": "mlp", "hidden": 4096, "gated": False}
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
    assert "a judge" in suite.takes and suite.state == "not done"
    assert rows["tab:cost"].machine == "an NVIDIA GPU"
    state = rows["tab:mla"].state
    assert state.startswith("needs Qwen3-4B and 8B converted")
    assert "convert_mla.py --rank 1024 --rotary 64" in state and "--steps 120000" in state
    assert "as they are" in rows["app:tab:mla"].state and "60000" in rows["app:tab:mla"].state
    assert rows["tab:base"].models[0] == "Qwen3-0.6B-Base"
    assert pairs_of(BY_LABEL["tab:linearity"]) == [LARGE, SMALL]


# ---- entries of statistics -----------------------------------------------------------------------


def fits(*layers: tuple[float, float]) -> list[LayerFit]:
    """Layers of the given linear R2, and R2 of the MLP; the affine one is 0.001 above."""
    return [LayerFit(linear, linear + 0.001, mlp, mlp, 1) for linear, mlp in layers]


LAYERS = {  # means 0.815 and 0.825, 0.693 and 0.708: those of the paper's first two rows
    "keys": fits((0.866, 0.8675), (0.764, 0.7825)),
    "values": fits((0.793, 0.798), (0.593, 0.618)),
}
RANKS = [Rank(59.4, 0.31), Rank(30, 0.2), Rank(14.8, 0.2), Rank(20, 0.1), Rank(177, 0.099)]
GRID = np.array([[0.8, 0.2], [0.6, 0.4]])
PLANTED = Report(
    "pre_norm", 512, 100, 20, [0, 1], LAYERS, {s: summarise(f) for s, f in LAYERS.items()},
    {end: {"keys": RANKS, "values": []} for end in ("source", "target")},
    {"keys": Grid(GRID, correspondence(GRID))},
    {side: HeadAlignment(GRID, diagonal, (0.125, 0.01), 0.0)
     for side, diagonal in (("keys", 0.196), ("values", 0.249))},
    [],
)  # fmt: skip


def made(label: str, monkeypatch: pytest.MonkeyPatch, report: Report = PLANTED) -> Result:
    """An entry whose every report is a planted one."""
    monkeypatch.setattr(statistics, "report_of", lambda *given, **asked: report)
    return statistics.make(BY_LABEL[label], Work(Path("nowhere")))


def test_rows_have_the_papers_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made("tab:linearity", monkeypatch)
    assert (*found.titles, *found.columns) == tables()["tab:linearity"].columns
    for line in found.lines[:2]:
        assert line.values[:3] == pytest.approx(line.paper[:3]) and len(line.paper) == 4
    assert [line.names[-1] for line in found.lines] == ["K", "V"] * 2  # none of the scratch pair
    shifted = made("tab:affine", monkeypatch)
    assert shifted.lines[0].names[:2] == ("Qwen3 8B/4B", "L → S")
    assert shifted.lines[0].values == pytest.approx((0.815, 0.816))
    ranks = {line.names[0]: line for line in made("tab:erank", monkeypatch).lines}
    assert ranks["Qwen3-1.7B, trained"].values == ranks["Qwen3-1.7B, trained"].paper


def test_rho_is_the_mean_of_the_layers_quotients() -> None:
    """Only so can the paper's 0.651, 0.724 and 0.903 stand in one row: 0.651 / 0.724 is 0.899."""
    mean = PLANTED.summary["values"]
    assert mean.rho == pytest.approx((0.793 / 0.798 + 0.593 / 0.618) / 2)
    assert mean.irreducible == pytest.approx(1 - 0.708) and mean.extra == pytest.approx(0.015)
    low, high = 0.6505 / 0.7245, 0.6515 / 0.7235  # all that rounds to the paper's columns
    assert not low <= tables()["tab:linearity"].values(5)[3] - 0.0005 <= high
    assert math.isnan(summarise(fits((0.5, 0.6), (-1.0, -0.5))).rho)
    without = summarise([LayerFit(0.5, 0.6), LayerFit(0.7, 0.6)])
    assert (without.mlp, without.extra, without.rho, without.irreducible) == (None,) * 4
    assert (without.linear, without.affine) == pytest.approx((0.6, 0.6))


def test_figures_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    contrast = made("app:fig:cka", monkeypatch).lines
    assert len(contrast) == 8 and contrast[0].values == pytest.approx((0.6 - 0.4, 0.5))
    grids: Any = made("fig:cka", monkeypatch).lines
    assert [line.values for line in grids[:2]] == [(0.8, 0.2), (0.6, 0.4)]
    assert made("fig:head_alignment", monkeypatch).lines[0].values == (0.196, 0.249)
    with pytest.raises(ValueError, match="no head alignment: not run"):
        made("fig:head_alignment", monkeypatch, replace(PLANTED, heads={}))
