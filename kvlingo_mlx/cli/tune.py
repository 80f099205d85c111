"""kvlingo-mlx tune: choose how many layers the target reads itself at a switch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvlingo_mlx.cli.command import Configured, TwoModels, verb
from kvlingo_mlx.cli.output import keep, ms, phase, say, table, tell_of_machine
from kvlingo_mlx.options import COUNT, Need, off, option
from kvlingo_mlx.training.recipe import BoundOptions

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.evaluation.tuning import Point


@dataclass(frozen=True, kw_only=True)
class TuneOptions(BoundOptions, Configured, TwoModels):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("seed", "data", off, why="since the file's records are read in order"),
    )
    KEYS: ClassVar[str] = "trials"
    translator: str | None = None
    data: str | None = option(
        None, 'JSONL conversations, perhaps with "answers"; default: dialogues.'
    )
    limit: int = option(32, "Most conversations.", kind=COUNT)
    seed: int = option(0, "Seed of the generated dialogues.")
    native_layers: str | None = option(None, "Try only these numbers of layers: 0,1,2.")
    trials: int = option(5, "How often each way's first token is timed.", kind=COUNT)
    out: str = option("kvlingo-tune.jsonl", "Items' scores; the same command resumes.")
    allow_mismatch: bool = False


@verb(TuneOptions, long=True)
def command(options: TuneOptions) -> None:
    """Choose how many layers the target reads itself: quality and time for each number.

    With --max-kl or --min-recall the chosen number is kept in the translator's folder.
    """
    from kvlingo_mlx.evaluation import tuning
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.reporting import measure

    models = load_pair(options.source, options.target)
    place, found = tuning.translator_of(options.translator, *models, options.allow_mismatch)
    bounds = options.part(BoundOptions)
    bounded = any(bound is not None for bound in bounds.values())
    folder = tuning.own_folder(place) if bounded else None
    depth = len(models[1].attentions)
    layers = tuning.numbers(options.native_layers, depth)
    task = tuning.task_of(*models, options.data, options.limit, options.seed)
    if options.min_recall is not None and "recall" not in task.metrics:
        raise ValueError(
            '--min-recall needs data that mark answers: records with "answers": ["..."]'
        )
    line = tuning.line_up(*models, found, layers)
    with phase("tuning", len(task.items)) as step:
        points = tuning.measure(
            models[1], task, line, Journal(options.out), trials=options.trials, progress=step
        )
    _print(task, points)
    results: dict[str, Any] = {"points": points}
    if folder is None:
        say("nothing is kept; --max-kl or --min-recall keeps the fewest layers that will do")
    else:
        chosen = results["native_layers"] = tuning.smallest(points, **bounds)
        if chosen == depth:
            say("no number that was tried is good enough: the target reads all layers itself")
        tuning.keep(folder, chosen, {**bounds, "items": len(task.items)}, points)
        _say_what_is_kept(folder, chosen, depth)
    say(measure.machine_line())
    config = {"source": models[0].name, "target": models[1].name, "native_layers": layers}
    config |= options.some("max_kl min_recall data limit seed trials")
    keep(options.json_file, "tune", config, results)


def _say_what_is_kept(folder: Path, layers: int, depth: int) -> None:
    """The number of native layers, and where the tuned translator is used from."""
    from kvlingo_mlx.loading.translators import store

    say(f"{folder} keeps native_layers = {layers} of {depth}")
    if folder.resolve().parent == store().resolve():
        say("it is in the local store: generate and chat use it with these layers from now on")
    else:
        say(f"to use it from the store: kvlingo-mlx import {shlex.quote(str(folder))} --force")


def _print(task: Task, points: list[Point]) -> None:
    whole = next(point.time for point in points if point.way == "native")
    cells = {  # by column
        "cache": lambda point: point.way,
        "native layers": lambda point: point.layers,
        "KL": lambda point: point.kl,
        "recall": lambda point: point.recall,
        "first token, ms": lambda point: None if point.time is None else ms(point.time),
        "of native": lambda point: (
            None if point.time is None or not whole else f"{point.time / whole:.2f}"
        ),
    }
    found = ([cell(point) for cell in cells.values()] for point in points)
    rows = [["" if value is None else str(value) for value in row] for row in found]
    table(f"{task.name}, {len(task.items)} conversations", list(cells), rows)
    tell_of_machine()
