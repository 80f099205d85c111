"""kvlingo-mlx analyze: what two models' caches have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import Options, Source, Target, option, verb
from kvlingo_mlx.cli.output import keep, progress_bar, say, table, warn
from kvlingo_mlx.format.kinds import SIDES

if TYPE_CHECKING:
    from kvlingo_mlx.analysis.report import Report


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(Options):
    source: Source
    target: Target
    data: str | None = option(
        None, 'JSONL of {"messages": [...]} or {"text": ...}; default: bundled dialogues.'
    )
    translator: str | None = option(
        None, "A folder or Hub id: its own maps are scored and aligned as well."
    )
    capture: str | None = option(
        None,
        "pre_norm, post_norm, post_rope or latent (MLA); default: the translator's, else pre_norm "
        "or latent.",
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
    mlp: bool = option(True, "Fit a two-layer MLP beside each linear map.")
    heads: bool = option(True, "Align the heads of the closed-form joint map.")
    hidden: int | None = option(None, "The MLP's hidden width; default: twice its input's.")
    epochs: int = option(10, "Most epochs an MLP is trained for.")
    seed: int = option(0, "Of the split, the MLPs, the permutations, random weights.")
    plot: str | None = option(None, "Draw figures into this folder (the [plot] extra).")


@verb(AnalyzeOptions)
def command(options: AnalyzeOptions) -> None:
    """Measure what two models' caches have in common: CKA, R2, effective rank, heads."""
    from kvlingo_mlx.analysis import figures
    from kvlingo_mlx.analysis.corpus import bundled
    from kvlingo_mlx.analysis.report import Settings, analyze
    from kvlingo_mlx.loading.models import load
    from kvlingo_mlx.loading.translators import load_translator
    from kvlingo_mlx.reporting import measure, pictures
    from kvlingo_mlx.tokenization.samples import read_jsonl

    settings = Settings(
        **options.some("capture documents tokens seed random_init cka mlp heads hidden epochs")
    )
    if options.plot:
        pictures.check_folder(options.plot)
    records = read_jsonl(options.data) if options.data else bundled(options.documents)
    given = load_translator(options.translator) if options.translator else None
    models = load(options.source, lazy=True), load(options.target, lazy=True)
    with progress_bar("analyzing", None) as step:

        def done(text: str) -> None:
            step(text=text)
            step()

        report = analyze(*models, records, settings, translator=given, progress=done)
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
    if options.plot:
        title = pictures.pair(models[0].name, models[1].name)
        title += ", random weights" if options.random_init else ""
        written = figures.write(report, options.plot, title)
        say(f"drew {', '.join(path.name for path in written)} into {options.plot}")
    say(measure.machine_line())
    ends = {"source": models[0].name, "target": models[1].name, "data": text}
    config = {**ends, "translator": options.translator, **vars(settings)}
    keep(options.json_file, "analyze", config, report.to_json())


# ---- tables -----------------------------------------------------------------------------


def _print(report: Report) -> None:
    for side in SIDES:
        _print_layers(report, side)
    _print_rank(report)
    if report.heads:
        _print_heads(report)
    _print_positions(report)


def _print_layers(report: Report, side: str) -> None:
    """Print a row per target layer: the layer most like it, and how well it can be predicted."""
    columns = ["layer", "reads", *(["CKA", "most alike"] if report.cka else [])]
    scores = {
        kind: [getattr(fit, kind) for fit in report.linearity[side]]
        for kind in ("linear", "affine", "mlp")
    }
    if scores["mlp"][0] is None:
        del scores["mlp"]
    if report.translator:
        scores["translator"] = report.translator[side]
    rows = []
    for layer, reads in enumerate(report.source_layers):
        row = [str(layer), str(reads)]
        if report.cka:
            line = report.cka[side].cka[layer]
            row += [f"{line[reads]:.2f}", str(int(line.argmax()))]
        rows.append(row + [f"{values[layer]:.3f}" for values in scores.values()])
    means = [f"{sum(values) / len(values):.3f}" for values in scores.values()]
    title = f"{side.capitalize()}: target layers from source layers, held-out R2"
    table(
        title,
        columns + ["MLP" if kind == "mlp" else kind for kind in scores],
        [*rows, ["mean", *[""] * (len(columns) - 1), *means]],
    )
    if report.cka:
        found = report.cka[side].summary
        say(
            f"CKA of {side} is higher by {found.contrast:.3f} on the diagonal than off it; a row's "
            f"largest is {found.offset:.1f} layers from it\n"
        )


def _print_rank(report: Report) -> None:
    rows = []
    for model, sides in report.rank.items():
        for side in SIDES:
            layers = sides[side]
            shown = (layers[0], layers[len(layers) // 2], layers[-1])
            rows.append(
                [
                    f"{model} {side}",
                    *(f"{layer.effective:.1f}" for layer in shown),
                    *(f"{layer.top_share:.2f}" for layer in (shown[0], shown[-1])),
                ]
            )
    columns = ["", "first", "middle", "last", "top, first", "top, last"]
    table("Effective rank, and the top direction's share of variance", columns, rows)


def _print_heads(report: Report) -> None:
    rows = [
        [f"{name}, {side}", f"{a.diagonal:.3f}", f"{a.null[0]:.3f} ± {a.null[1]:.3f}", f"{a.p:.3f}"]
        for name, sides in report.heads.items()
        for side, a in sides.items()
    ]
    table(
        "Share of a source head's map in its own target head",
        ["map", "share", "permuted", "p"],
        rows,
    )


def _print_positions(report: Report) -> None:
    rows = [
        [
            f"{b.start} to {b.stop - 1}",
            str(b.fitted),
            str(b.scored),
            *(f"{sum(b.r2[side]) / len(b.r2[side]):.3f}" for side in SIDES),
        ]
        for b in report.positions
        if b.r2 is not None
    ]
    if rows:
        columns = ["positions", "tokens fitted", "held out", "R2 keys", "R2 values"]
        table("Linear map by position, mean over layers", columns, rows)
