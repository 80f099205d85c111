"""python -m benchmarks.paper analyze: what two models' caches have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import Options, Source, Target, option, verb
from kvlingo_mlx.cli.output import keep, say, table, warn
from kvlingo_mlx.format.kinds import SIDES

if TYPE_CHECKING:
    from benchmarks.paper.analysis.report import Report


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
    mlp: bool = option(True, "Fit a two-layer MLP that starts as the linear map, everywhere.")
    heads: bool = option(True, "Align the heads of the closed-form joint map.")
    hidden: int | None = option(
        None, "The MLP's hidden units beside those of the linear map; default: twice its input's."
    )
    epochs: int = option(10, "Most epochs an MLP is trained for.")
    seed: int = option(0, "Of the split, the MLPs, the permutations, random weights.")
    plot: str | None = option(None, "Draw figures into this folder (the [plot] extra).")


@verb(AnalyzeOptions, long=True)
def command(options: AnalyzeOptions) -> None:
    """Measure what two models' caches have in common: CKA, R2, effective rank, heads."""
    from benchmarks.paper.analysis import figures
    from benchmarks.paper.analysis.corpus import bundled
    from benchmarks.paper.analysis.report import Settings, analyze
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
    report = analyze(*models, records, settings, translator=given)
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
    _print_means(report)
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


def _print_means(report: Report) -> None:
    """Print table "linearity" and the trend over depth, a row a side."""
    rows = [
        [
            side,
            *(_shown(n) for n in (m.linear, m.mlp, m.extra, m.rho, m.irreducible)),
            _shown(m.depth.rho, "+.2f"),
            _shown(m.depth.p, ".2g"),
        ]
        for side, m in report.summary.items()
    ]
    columns = ["", "linear", "MLP", "extra", "rho", "irreducible", "with depth", "p"]
    title = "R2: means over layers, and linear R2's rank correlation with depth"
    table(title, *_filled(columns, rows))


def _print_positions(report: Report) -> None:
    """Print the same within ranges of positions; each is compared with the first, by layer."""
    rows = []
    for bucket in report.positions:
        for side, mean in (bucket.summary or {}).items():
            test = bucket.change[side].test if bucket.change else None
            numbers = [_shown(mean.linear), _shown(mean.mlp), _shown(mean.depth.rho, "+.2f")]
            numbers += [_shown(test.mean, "+.3f"), _shown(test.p, ".2g")] if test else ["", ""]
            place = f"{side} {bucket.start}-{bucket.stop - 1}"
            rows.append([place, str(bucket.fitted), str(bucket.scored), *numbers])
    if rows:
        columns = ["positions", "fitted", "scored", "linear", "MLP", "depth", "change", "p"]
        title = "R2 by position: means over layers, rank correlation with depth, and the change\n"
        title += "from the first positions with its sign test, paired by layer"
        table(title, *_filled(columns, rows))


def _filled(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns in which something stands."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _shown(number: float | None, how: str = ".3f") -> str:
    """A number as text; nothing for one that there is not."""
    return "" if number is None or number != number else format(number, how)
