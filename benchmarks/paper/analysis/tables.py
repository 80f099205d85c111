"""Reports as the rows of the paper's tables and figures: names first, then numbers."""

from __future__ import annotations

from benchmarks.paper.analysis.report import Report
from benchmarks.paper.analysis.statistics import SignTest
from kvlingo_mlx.format.kinds import SIDES

Row = list[str | float | None]
LETTERS = {"keys": "K", "values": "V"}


def layer_grid(report: Report) -> list[Row]:
    """Figure "cka": CKA of each target layer's keys (rows) with each source layer's (columns)."""
    return report.cka["keys"].cka.tolist()


def contrast(pair: str, report: Report) -> list[Row]:
    """Figure "app:cka": a pair, its diagonal contrast, the offset of its rows' largest entries."""
    summary = report.cka["keys"].summary
    return [[pair, summary.contrast, summary.offset]]


def linearity(pair: str, report: Report) -> list[Row]:
    """Table "linearity": pair, side, R2 linear, R2 of the MLP, what it adds, rho; a row a side.

    The last three are None where the report has no MLPs.
    """
    means = ((LETTERS[side], report.summary[side]) for side in SIDES)
    return [[pair, letter, m.linear, m.mlp, m.extra, m.rho] for letter, m in means]


def affine(pair: str, direction: str, report: Report) -> list[Row]:
    """Table "affine": pair, direction, side, R2 without and with an intercept; a row a side."""
    means = ((LETTERS[side], report.summary[side]) for side in SIDES)
    return [[pair, direction, letter, m.linear, m.affine] for letter, m in means]


def rank(name: str, report: Report, model: str = "source") -> list[Row]:
    """Table "erank": a model, its effective ranks, and its top directions' shares of variance.

    The ranks are those of the first, the middle and the last layer, the shares those of the first
    and the last, each as one text, as in the paper. ``model`` is "source" or "target". The paper
    does not say whether it means keys, as here, or values; each is 1024 wide there.
    """
    layers = report.rank[model]["keys"]
    first, middle, last = layers[0], layers[len(layers) // 2], layers[-1]
    ranks = " → ".join(f"{layer.effective:.0f}" for layer in (first, middle, last))
    shares = " → ".join(f"{layer.top_share:.2f}" for layer in (first, last))
    return [[name, ranks, shares]]


def heads(pair: str, report: Report) -> list[Row]:
    """Figure "head_alignment": a pair and the mean diagonals of its keys' and its values' grid.

    Raises:
        ValueError: Heads were not aligned; the report's notes say why.
    """
    if not report.heads:
        why = "; ".join(report.notes) or "not run"
        raise ValueError(f"the report has no head alignment: {why}")
    return [[pair, *(report.heads[side].diagonal for side in SIDES)]]


def differences(evaluation: str, test: SignTest) -> list[Row]:
    """Table "app:knorm": an evaluation, its number of cells, how many are worse, mean difference.

    ``test`` is of the second translator's scores minus the first's, cell by cell.
    """
    cells = test.above + test.below + test.ties
    return [[evaluation, cells, test.below, test.mean]]
