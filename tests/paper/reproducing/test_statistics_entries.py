"""Entries of statistics, from reports with planted numbers: the paper's rows, to their digits."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.analysis.linearity import LayerFit, summarise
from benchmarks.paper.analysis.report import Grid, Rank, Report
from benchmarks.paper.analysis.statistics import HeadAlignment, correspondence
from benchmarks.paper.reproducing import statistics
from benchmarks.paper.reproducing.entries import BY_LABEL
from benchmarks.paper.reproducing.models import Models
from benchmarks.paper.reproducing.results import Result
from benchmarks.paper.reproducing.tables import tables
from benchmarks.paper.reproducing.work import Work
from tests.support.fixtures import Patch


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


def made(label: str, monkeypatch: Patch, report: Report = PLANTED, tiny: bool = False) -> Result:
    """An entry whose every report is a planted one; a tiny run has all pairs."""
    monkeypatch.setattr(statistics, "report_of", lambda *given, **asked: report)
    return statistics.make(BY_LABEL[label], Work(Path("nowhere"), Models(tiny=tiny)))


def test_rows_have_the_papers_columns(monkeypatch: Patch) -> None:
    found = made("tab:linearity", monkeypatch)
    assert (*found.titles, *found.columns) == tables()["tab:linearity"].columns
    for line in found.lines[:2]:
        assert line.values[:3] == pytest.approx(line.paper[:3]) and len(line.paper) == 4
    assert [line.names[-1] for line in found.lines] == ["K", "V"] * 2  # none of the scratch pair
    scratch = made("tab:linearity", monkeypatch, tiny=True).lines[4:]
    assert [line.paper[0] for line in scratch] == [0.752, 0.651]
    assert len(made("tab:affine", monkeypatch, tiny=True).lines) == 12
    shifted = made("tab:affine", monkeypatch)
    assert shifted.lines[0].names[:2] == ("Qwen3 8B/4B", "L → S")
    assert shifted.lines[0].values == pytest.approx((0.815, 0.816))
    ranks = {line.names[0]: line for line in made("tab:erank", monkeypatch).lines}
    assert ranks["Qwen3-1.7B, trained"].values == ranks["Qwen3-1.7B, trained"].paper
    every = {line.names[0]: line for line in made("tab:erank", monkeypatch, tiny=True).lines}
    assert set(every) - set(ranks) == {f"from-scratch {size}, trained" for size in ("0.6B", "1.7B")}
    assert every["from-scratch 1.7B, trained"].paper[0] == "13 → 113 → 157"


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


def test_figures_numbers(monkeypatch: Patch) -> None:
    contrast = made("app:fig:cka", monkeypatch).lines
    assert len(contrast) == 2 * (6 + 2) and contrast[0].values == pytest.approx((0.6 - 0.4, 0.5))
    grids: Any = made("fig:cka", monkeypatch).lines
    assert [line.values for line in grids[:2]] == [(0.8, 0.2), (0.6, 0.4)]
    heads = made("fig:head_alignment", monkeypatch, tiny=True).lines
    assert heads[0].values == (0.196, 0.249) and len(heads) == 2 * (2 + 2)
    assert heads[-1].names[0] == "Qwen3-0.6B-scratch-sliced and Qwen3-1.7B-scratch"
    with pytest.raises(ValueError, match="no head alignment: not run"):
        made("fig:head_alignment", monkeypatch, replace(PLANTED, heads={}))
