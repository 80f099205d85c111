"""Reports as the rows of the paper's tables and figures, one function for each label.

Every function returns rows of cells in the paper's column order: names first, then numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paper.analysis.report import Grid, Report
from benchmarks.paper.analysis.statistics import SignTest
from kvlingo_mlx.format.kinds import SIDES

Cell = str | float | None
Row = list[Cell]

LETTERS = {"keys": "K", "values": "V"}


def layer_grid(report: Report, side: str = "keys") -> list[Row]:
    """Figure "cka": CKA of each target layer (rows) with each source layer (columns)."""
    return _grid(report, side).cka.tolist()


def contrast(pair: str, report: Report, side: str = "keys") -> list[Row]:
    """Figure "app:cka": a pair, its diagonal contrast, the offset of its rows' largest entries."""
    summary = _grid(report, side).summary
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


def rank(name: str, report: Report, model: str = "source", side: str = "keys") -> list[Row]:
    """Table "erank": a model, its effective ranks, and its top directions' shares of variance.

    The ranks are those of the first, the middle and the last layer, the shares those of the first
    and the last, each as one text, as in the paper. ``model`` is "source" or "target". The paper
    does not say whether it means keys or values; each is 1024 wide there.
    """
    layers = report.rank[model][side]
    first, middle, last = layers[0], layers[len(layers) // 2], layers[-1]
    ranks = " → ".join(f"{layer.effective:.0f}" for layer in (first, middle, last))
    shares = " → ".join(f"{layer.top_share:.2f}" for layer in (first, last))
    return [[name, ranks, shares]]


def heads(pair: str, report: Report, of: str = "closed form") -> list[Row]:
    """Figure "head_alignment": a pair and the mean diagonals of its keys' and its values' grid."""
    if of not in report.heads:
        raise ValueError(
            f"the report has no head alignment of the {of}: {'; '.join(report.notes) or 'not run'}"
        )
    return [[pair, *(report.heads[of][side].diagonal for side in SIDES)]]


def distance(pair: str, before: Report, after: Report) -> list[Row]:
    """Table "app:cachedist": a pair, and R2 before and after the key norm, each with two scores.

    R2 is that of keys at the report's own capture point, averaged over layers: of the report's
    translator, or of its linear maps if it has none. Values are the same at both points, and the
    paper does not say whether it counts them. The scores of decoding are None; another verb
    measures them.

    Raises:
        ValueError: The reports are of other capture points.
    """
    points = before.capture, after.capture
    if points != ("pre_norm", "post_norm"):
        raise ValueError(
            f"the reports are of {points[0]} and {points[1]} keys; they must be of pre_norm and "
            "post_norm keys, in this order"
        )
    return [[pair, _keys_r2(before), None, None, _keys_r2(after), None, None]]


def differences(evaluation: str, test: SignTest) -> list[Row]:
    """Table "app:knorm": an evaluation, its number of cells, how many are worse, mean difference.

    ``test`` is of the second translator's scores minus the first's, cell by cell.
    """
    cells = test.above + test.below + test.ties
    return [[evaluation, cells, test.below, test.mean]]


# What fills each of the paper's labels that this room measures. Figure "prefixhist" is
# training.data.prefix_histogram.
LABELS: dict[str, Callable[..., list[Row]]] = {
    "fig:cka": layer_grid,
    "app:fig:cka": contrast,
    "tab:linearity": linearity,
    "tab:affine": affine,
    "tab:erank": rank,
    "fig:head_alignment": heads,
    "app:tab:cachedist": distance,
    "app:tab:knorm": differences,
}


def _grid(report: Report, side: str) -> Grid:
    if side not in report.cka:
        raise ValueError("the report has no CKA; measure it with cka=True")
    return report.cka[side]


def _keys_r2(report: Report) -> float:
    scores = report.translator.get("keys")
    return sum(scores) / len(scores) if scores else report.summary["keys"].linear
