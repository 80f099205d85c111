"""The report's figures, as PNG (matplotlib, the [plot] extra)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.analysis.report import Report
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.reporting import pictures

PANEL = 3.4  # inches


def write(report: Report, folder: str, title: str = "") -> list[Path]:
    """Draw the report's figures under a title; returns the files, each written atomically."""
    figures = {name: figure for name, draw in FIGURES.items() if (figure := draw(report))}
    root = Path(folder)
    pictures.save_all({root / name: figure for name, figure in figures.items()}, title)
    return [root / name for name in figures]


def cka(report: Report) -> Any:
    """Heatmaps of CKA for keys and values on one scale; dashed at equal relative depth."""
    if not report.cka:
        return None
    figure, panels = _panels(1, len(SIDES))
    for axes, side in zip(panels[0], SIDES, strict=True):
        grid, summary = report.cka[side].cka, report.cka[side].summary
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis")
        rows, columns = grid.shape
        axes.plot([0, columns - 1], [0, rows - 1], "--", color="white", linewidth=1)
        axes.set(
            title=f"{side}: contrast {summary.contrast:.2f}, offset {summary.offset:.1f}",
            xlabel="source layer",
            ylabel="target layer",
        )
        pictures.whole_numbers(axes.xaxis, axes.yaxis)
    figure.colorbar(image, ax=list(panels[0]), label="linear CKA", shrink=0.8)
    return figure


def linearity(report: Report) -> Any:
    """Held-out R2 of every target layer: linear, affine, MLP and the given translator."""
    figure, panels = _panels(1, len(SIDES), sharey=True)
    for axes, side in zip(panels[0], SIDES, strict=True):
        fits = report.linearity[side]
        axes.plot([fit.linear for fit in fits], "o-", label="linear")
        axes.plot([fit.affine for fit in fits], "x--", label="affine")
        if fits[0].mlp is not None:
            axes.plot([fit.mlp for fit in fits], "s-", label="MLP")
        if report.translator:
            axes.plot(report.translator[side], "^:", label="translator")
        axes.set(title=side, xlabel="target layer")
        pictures.whole_numbers(axes.xaxis)
    panels[0][0].set_ylabel("held-out R²")
    panels[0][-1].legend()
    return figure


def rank(report: Report) -> Any:
    """The effective rank of every layer over relative depth, for both models."""
    figure, panels = _panels(1, len(SIDES), sharey=True)
    for axes, side in zip(panels[0], SIDES, strict=True):
        for model, style in (("source", "o-"), ("target", "s-")):
            ranks = [layer.effective for layer in report.rank[model][side]]
            axes.plot(np.linspace(0, 1, len(ranks)), ranks, style, label=model)
        axes.set(title=side, xlabel="relative depth", ylim=(0, None))
    panels[0][0].set_ylabel("effective rank")
    panels[0][-1].legend()
    return figure


def heads(report: Report) -> Any:
    """The shares of each source head's map that go to each target head, on a scale from 0 to 1.

    Columns are source heads, as columns are source layers in :func:`cka`. The line on the scale
    marks chance.
    """
    if not report.heads:
        return None
    figure, panels = _panels(len(report.heads), len(SIDES))
    for row, (name, sides) in zip(panels, report.heads.items(), strict=True):
        for axes, side in zip(row, SIDES, strict=True):
            found = sides[side]
            image = axes.imshow(found.grid.T, vmin=0, vmax=1, cmap="viridis")
            axes.set(
                title=f"{name}, {side}\ndiag. {found.diagonal:.3f}, p = {found.p:.3f}",
                xlabel="source head",
                ylabel="target head",
            )
            pictures.whole_numbers(axes.xaxis, axes.yaxis)
    bar = figure.colorbar(
        image,
        ax=list(panels.flat),
        shrink=0.8,
        label="share of the source head's map (white line: chance)",
    )
    bar.ax.axhline(1 / found.grid.shape[1], color="white", linewidth=2)
    return figure


def positions(report: Report) -> Any:
    """The linear R2 of every target layer, one curve for each range of positions."""
    curves = {f"{b.start} to {b.stop - 1}": b.linearity for b in report.positions if b.linearity}
    if not curves:
        return None
    figure, panels = _panels(1, len(SIDES), sharey=True)
    for axes, side in zip(panels[0], SIDES, strict=True):
        for label, fits in curves.items():
            axes.plot([fit.linear for fit in fits[side]], "o-", label=label)
        axes.set(title=side, xlabel="target layer")
        pictures.whole_numbers(axes.xaxis)
    panels[0][0].set_ylabel("held-out R², linear")
    panels[0][-1].legend(title="positions")
    return figure


FIGURES: dict[str, Callable[[Report], Any]] = {
    "cka.png": cka,
    "r2.png": linearity,
    "rank.png": rank,
    "heads.png": heads,
    "positions.png": positions,
}


def _panels(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    figure = pictures.figure(PANEL * columns + 1, PANEL * rows)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)
