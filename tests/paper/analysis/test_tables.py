"""Rows of the paper's tables, from reports with planted numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper.analysis import tables
from benchmarks.paper.analysis.linearity import LayerFit, summarise
from benchmarks.paper.analysis.report import Grid, Rank, Report
from benchmarks.paper.analysis.statistics import HeadAlignment, correspondence, sign_test
from tests.support import paper_tables

DATA = paper_tables.FILE
PAPER = {table["label"]: table for table in map(json.loads, DATA.read_text().splitlines())}


def fits(*layers: tuple[float, float]) -> list[LayerFit]:
    """Layers of the given linear R2, and R2 of the MLP; the affine one is 0.001 above."""
    return [LayerFit(linear, linear + 0.001, mlp, mlp, 1) for linear, mlp in layers]


def report(keys: list[LayerFit], values: list[LayerFit], capture: str = "pre_norm") -> Report:
    layers = {"keys": keys, "values": values}
    ranks = [Rank(59.4, 0.31), Rank(30, 0.2), Rank(14.8, 0.2), Rank(20, 0.1), Rank(177, 0.099)]
    return Report(
        capture, 512, 100, 20, [0, 1], layers, {s: summarise(f) for s, f in layers.items()},
        {"source": {"keys": ranks, "values": []}}, {}, {}, [],
    )  # fmt: skip


PLANTED = report(
    fits((0.866, 0.8675), (0.764, 0.7825)), fits((0.793, 0.798), (0.593, 0.618))
)  # means 0.815 and 0.825, 0.693 and 0.708


def cells(label: str, row: int) -> list:
    """A row of the paper's table without the name of its part."""
    return PAPER[label]["rows"][row][1:]


def test_rows_have_the_papers_columns() -> None:
    """Numbers planted as the paper's give its rows, in its order and to its digits."""
    made = tables.linearity("Qwen3 8B/4B", PLANTED)
    for found, row in zip(made, (0, 1), strict=True):
        expected = cells("tab:linearity", row)
        assert found[:2] == expected[:2] and len(found) == len(expected)
        assert found[2:5] == pytest.approx(expected[2:5])
    shifted = tables.affine("Qwen3 8B/4B", "L → S", PLANTED)
    assert [row[:3] for row in shifted] == [cells("tab:affine", row)[:3] for row in (0, 1)]
    assert shifted[0][3:] == pytest.approx([0.815, 0.816])
    assert tables.rank("Qwen3-1.7B, trained", PLANTED) == [cells("tab:erank", 0)]
    test = sign_test([-0.05] * 14 + [0.13, 0.138])
    found = tables.differences("RULER, reasoning-off (4–32k)", test)
    assert found[0][:3] == cells("app:tab:knorm", 0)[:3]
    assert found[0][3] == pytest.approx(cells("app:tab:knorm", 0)[3][0], abs=5e-4)


def test_rho_is_the_mean_of_the_layers_quotients() -> None:
    """Only so can the paper's 0.651, 0.724 and 0.903 stand in one row: 0.651 / 0.724 is 0.899."""
    mean = PLANTED.summary["values"]
    assert mean.rho == pytest.approx((0.793 / 0.798 + 0.593 / 0.618) / 2)
    assert mean.irreducible == pytest.approx(1 - 0.708) and mean.extra == pytest.approx(0.015)
    low, high = 0.6505 / 0.7245, 0.6515 / 0.7235  # all that rounds to the paper's columns
    assert not low <= cells("tab:linearity", 5)[5] - 0.0005 <= high
    assert math.isnan(summarise(fits((0.5, 0.6), (-1.0, -0.5))).rho)
    without = summarise([LayerFit(0.5, 0.6), LayerFit(0.7, 0.6)])
    assert (without.mlp, without.extra, without.rho, without.irreducible) == (None,) * 4
    assert (without.linear, without.affine) == pytest.approx((0.6, 0.6))


def test_figures_numbers() -> None:
    grid = np.array([[0.8, 0.2], [0.6, 0.4]])
    full = replace(PLANTED, cka={"keys": Grid(grid, correspondence(grid))})
    assert tables.contrast("pair", full) == [["pair", pytest.approx(0.6 - 0.4), 0.5]]
    assert tables.layer_grid(full) == grid.tolist()
    with pytest.raises(ValueError, match="no head alignment: not run"):
        tables.heads("x", PLANTED)
    aligned = {
        side: HeadAlignment(grid, diagonal, (0.125, 0.01), 0.0)
        for side, diagonal in (("keys", 0.196), ("values", 0.249))
    }
    full = replace(PLANTED, heads=aligned)
    assert tables.heads("8B → 4B", full) == [["8B → 4B", 0.196, 0.249]]
