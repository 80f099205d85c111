"""python -m benchmarks.paper analyze: what two models' caches have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import keep, say, table, warn
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.options import Need, is_set, option

if TYPE_CHECKING:
    from benchmarks.paper.analysis.report import Report


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(VerbOptions):
    NEEDS: ClassVar[tuple[Need, ...]] = (Need("hidden epochs", "mlp", is_set, True),)
    source: str
    target: str
    data: str | None = option(
        None, 'JSONL of {"messages": [...]} or {"text": ...}; default: bundled dialogues.'
    )
    capture: str | None = option(
        None, "pre_norm, post_norm, post_rope or latent (MLA); default: pre_norm, or latent."
    )
    documents: int = option(64, "Read the first N records; a fifth is held out.")
    tokens: int = option(
        16384, "Tokens in all; each document is cut at this over the number of documents."
    )
    random_init: bool = option(
        False,
        "Give both models random weights, to see what is so without training.",
        "--random-init",
    )
    cka: bool = option(True, "Compare every pair of layers.")
    mlp: bool = option(True, "Fit a two-layer MLP that starts as the linear map, everywhere.")
    heads: bool = option(True, "Align the heads of the closed-form joint map.")
    hidden: int | None = option(
        None, "The MLP's hidden units beside those of the linear map; default: twice its input's."
    )
    epochs: int = option(10, "Most epochs an MLP is trained for.")
    seed: int = option(0, "Of the split, the MLPs, the permutations, random weights.")


@verb(AnalyzeOptions, long=True)
def command(options: AnalyzeOptions) -> None:
    """Measure what two models' caches have in common: CKA, R2, effective rank, heads."""
    from benchmarks.paper.analysis.corpus import bundled
    from benchmarks.paper.analysis.report import Settings, analyze
    from kvlingo_mlx.loading.models import load
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.tokenization.samples import read_jsonl

    settings = Settings(
        **options.some("capture documents tokens seed random_init cka mlp heads hidden epochs")
    )
    records = read_jsonl(options.data) if options.data else bundled(options.documents)
    models = load(options.source, lazy=True), load(options.target, lazy=True)
    report = analyze(*models, records, settings)
    text = options.data or "bundled dialogues (no --data was given)"
    say(
        f"{models[0].name} to {models[1].name}"
        + (", both with random weights" if options.random_init else "")
        + f": keys {report.capture}, {report.documents} documents of {text}, "
        f"{report.fitted} tokens to fit on and {report.scored} held out"
    )
    _print(report)
    for note in report.notes:
        warn(note)
    say(measure.machine_line())
    ends = {"source": models[0].name, "target": models[1].name, "data": text}
    keep(options.json_file, "analyze", {**ends, **vars(settings)}, report.to_json())


def _print(report: Report) -> None:
    """A table a side, then ranks and heads."""
    for side in SIDES:
        _print_layers(report, side)
    rows = [
        [f"{model} {side}", *(f"{layer.effective:.1f} ({layer.top_share:.2f})" for layer in shown)]
        for model, sides in report.rank.items()
        for side, layers in sides.items()
        for shown in [(layers[0], layers[len(layers) // 2], layers[-1])]
    ]
    title = "Effective rank, and in brackets the top direction's share of variance"
    table(title, ["", "first", "middle", "last"], rows)
    if report.heads:
        heads = [
            [side, f"{a.diagonal:.3f}", f"{a.null[0]:.3f} ± {a.null[1]:.3f}", f"{a.p:.3f}"]
            for side, a in report.heads.items()
        ]
        title = "Share of a source head's map in its own target head, by the closed form"
        table(title, ["", "share", "permuted", "p"], heads)


def _print_layers(report: Report, side: str) -> None:
    """Print a row per target layer: the layer most like it, and how well it can be predicted."""
    fits, mean = report.linearity[side], report.summary[side]
    kinds = [kind for kind in ("linear", "affine", "mlp") if getattr(mean, kind) is not None]
    rows = []
    for layer, reads in enumerate(report.source_layers):
        row = [str(layer), str(reads)]
        if report.cka:
            line = report.cka[side].cka[layer]
            row += [f"{line[reads]:.2f}", str(int(line.argmax()))]
        rows.append(row + [f"{getattr(fits[layer], kind):.3f}" for kind in kinds])
    columns = ["layer", "reads", *(["CKA", "most alike"] if report.cka else [])]
    means = [f"{getattr(mean, kind):.3f}" for kind in kinds]
    table(
        f"{side.capitalize()}: target layers from source layers, held-out R2",
        columns + ["MLP" if kind == "mlp" else kind for kind in kinds],
        [*rows, ["mean", *[""] * (len(columns) - 1), *means]],
    )
    if mean.mlp is not None:
        say(f"an MLP explains {mean.extra:.3f} more of {side} (rho {mean.rho:.3f})")
    if report.cka:
        found = report.cka[side].summary
        say(
            f"CKA of {side} is higher by {found.contrast:.3f} on the diagonal than off it; a row's "
            f"largest is {found.offset:.1f} layers from it\n"
        )
