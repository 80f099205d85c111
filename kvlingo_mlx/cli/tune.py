"""kvlingo-mlx tune: choose how many layers the target reads itself at a switch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlingo_mlx.cli.command import (
    AllowMismatch,
    Both,
    MaybeSource,
    MaybeTarget,
    Options,
    Translator,
    option,
    two_models,
    verb,
)
from kvlingo_mlx.cli.output import draw, keep, ms, progress_bar, say, table, tell_of_machine
from kvlingo_mlx.cli.sampling import check_ranges

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.evaluation.tuning import Point


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options):
    pair: Both = None
    source: MaybeSource = None
    target: MaybeTarget = None
    translator: Translator = None
    data: str | None = option(
        None, 'JSONL conversations, perhaps with "answers"; default: dialogues.'
    )
    max_kl: float | None = option(None, "Choose the fewest layers with at most this KL.")
    min_recall: float | None = option(None, "Choose the fewest that recall this share of answers.")
    limit: int = option(32, "Most conversations.")
    seed: int = option(0, "Seed of the generated dialogues.")
    native_layers: str | None = option(None, "Try only these numbers of layers: 0,1,2.")
    droidspeak: bool = option(
        True, "Also try DroidSpeak, which reuses the source's cache as it is."
    )
    trials: int = option(5, "How often each way's first token is timed.")
    out: str = option("kvlingo-tune.jsonl", "Items' scores; the same command resumes.")
    plot: str | None = option(None, "Draw quality against time to the first token.")
    allow_mismatch: AllowMismatch = False


@verb(TuneOptions)
def command(options: TuneOptions) -> None:
    """Choose how many layers the target reads itself: quality and time for each number.

    With --max-kl or --min-recall the chosen number is kept in the translator's folder.
    """
    names = two_models("tune", options.pair, options.source, options.target)
    _check_bounds(options)

    from kvlingo_mlx.evaluation import tuning
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.reporting import measure, pictures

    if options.plot:
        pictures.check(options.plot)
    models = load_pair(*names)
    place, found = tuning.translator_of(options.translator, *models, options.allow_mismatch)
    bounds = options.some("max_kl min_recall")
    keeps = bounds != {"max_kl": None, "min_recall": None}
    folder = tuning.own_folder(place) if keeps else None
    layers = tuning.numbers(options.native_layers, len(models[1].attentions))
    task = tuning.task_of(*models, options.data, options.limit, options.seed)
    tuning.check_bounds(task, options.min_recall)
    line = tuning.line_up(*models, found, layers, **options.some("droidspeak allow_mismatch"))
    with progress_bar("tuning", len(task.items)) as step:
        points = tuning.measure(
            models[1],
            task,
            line,
            Journal(options.out),
            trials=options.trials,
            progress=lambda: step(),
        )
    points = tuning.with_healing(points, *models, found, task, options.trials)
    _print(task, points)
    results: dict[str, object] = {"points": [point.as_json() for point in points]}
    if folder is not None:
        chosen = results["native_layers"] = tuning.smallest(points, **bounds)
        tuning.keep(folder, chosen, {**bounds, "items": len(task.items)}, points)
        say(f"{folder} keeps native_layers = {chosen} of {len(models[1].attentions)}")
        _say_what_next(folder)
    else:
        say("nothing is kept; --max-kl or --min-recall keeps the fewest layers that will do")
    say(measure.machine_line())
    config = {"source": models[0].name, "target": models[1].name, "native_layers": layers}
    config |= bounds | options.some("data limit seed trials")
    keep(options.json_file, "tune", config, results)
    if options.plot:
        from kvlingo_mlx.evaluation.figures import quality_by_layers

        draw(quality_by_layers(points), options.plot, *(model.name for model in models))


def _say_what_next(folder: Path) -> None:
    """Where the tuned translator is used from."""
    from kvlingo_mlx.loading.translators import store

    if folder.resolve().parent == store().resolve():
        say("it is in the local store: generate and chat use it with these layers from now on")
    else:
        say(f"to use it from the store: kvlingo-mlx import {shlex.quote(str(folder))} --force")


def _check_bounds(options: TuneOptions) -> None:
    kl, recall = options.max_kl, options.min_recall
    check_ranges(
        ("--limit", options.limit, options.limit >= 1, "1 or more"),
        ("--trials", options.trials, options.trials >= 1, "1 or more"),
        ("--max-kl", kl, kl is None or kl >= 0, "0 or more"),
        ("--min-recall", recall, recall is None or 0 <= recall <= 1, "0 to 1, a share"),
    )


def _print(task: Task, points: list[Point]) -> None:
    from kvlingo_mlx.reporting.measure import median

    whole = next(point.time for point in points if point.way == "native")
    columns = ["cache", "native layers", "KL", "recall", "first token, ms", "of native"]
    rows = [
        [
            point.way,
            "" if point.layers is None else str(point.layers),
            str(point.kl),
            "" if point.recall is None else str(point.recall),
            "" if point.time is None else ms(point.time),
            "" if point.time is None or not whole else f"{point.time / whole:.2f}",
        ]
        for point in points
    ]
    if any(point.until_native for point in points):
        columns.append("then until native, ms")
        for row, point in zip(rows, points, strict=True):
            row.append(ms(median(point.until_native)) if point.until_native else "")
    table(f"{task.name}, {len(task.items)} conversations", columns, rows)
    tell_of_machine()
