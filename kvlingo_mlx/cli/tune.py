"""kvlingo-mlx tune: choose how many layers the target reads itself at a switch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvlingo_mlx.cli.command import COUNTS, Configured, TwoModels, numbers, verb
from kvlingo_mlx.cli.output import keep, ms, phase, say, table, tell_of_machine
from kvlingo_mlx.options import COUNT, Need, number, off, option

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.evaluation.tuning import Point
    from kvlingo_mlx.models.language_model import LanguageModel

    Models = tuple[LanguageModel, LanguageModel]


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Configured, TwoModels):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("seed", "data", off, why="since the file's records are read in order"),
    )
    KEYS: ClassVar[str] = "lengths trials"
    translator: str | None = None
    data: str | None = option(
        None, 'JSONL conversations, perhaps with "answers"; default: dialogues.'
    )
    max_kl: float | None = option(
        None, "Choose the fewest layers with at most this KL.",
        kind=number("0 or more", lambda value: value >= 0),
    )  # fmt: skip
    min_recall: float | None = option(
        None, "Choose the fewest that recall this share of answers.",
        kind=number("0 to 1, a share", lambda value: 0 <= value <= 1),
    )  # fmt: skip
    limit: int = option(32, "Most conversations, of each length.", kind=COUNT)
    seed: int = option(0, "Seed of the generated dialogues.")
    native_layers: str | None = option(None, "Try only these numbers of layers: 0,1,2.")
    lengths: str | None = option(
        None,
        "Choose for prefixes of at most so many tokens each, the last for longer ones: 512,2048.",
        kind=COUNTS,
    )
    trials: int = option(5, "How often each way's first token is timed.", kind=COUNT)
    out: str = option("kvlingo-tune.jsonl", "Items' scores; the same command resumes.")
    allow_mismatch: bool = False


@verb(TuneOptions, long=True)
def command(options: TuneOptions) -> None:
    """Choose how many layers the target reads itself: quality and time for each number.

    With --max-kl or --min-recall the chosen number is kept in the translator's folder.
    """
    from kvlingo_mlx.evaluation import tuning
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.reporting import measure

    models = load_pair(options.source, options.target)
    place, found = tuning.translator_of(options.translator, *models, options.allow_mismatch)
    bounds = options.some("max_kl min_recall")
    keeps = any(bound is not None for bound in bounds.values())
    folder = tuning.own_folder(place) if keeps else None
    depth = len(models[1].attentions)
    layers = tuning.numbers(options.native_layers, depth)
    tasks = _tasks(options, models)
    line = tuning.line_up(*models, found, layers, **options.some("allow_mismatch"))
    results, chosen = dict[str, Any](), dict[int | None, int]()
    for longest, task in tasks.items():
        points = _points(options, models[1], task, line)
        _print(task, points, longest)
        results[str(longest)] = {"points": [point.as_json() for point in points]}
        if keeps:
            chosen[longest] = tuning.smallest(points, **bounds)
            if chosen[longest] == depth:
                say("no number that was tried is good enough: the target reads all layers itself")
            results[str(longest)]["native_layers"] = chosen[longest]
    if folder is not None:
        last = chosen.pop(longest)
        shorter = {n: layers for n, layers in chosen.items() if n is not None}
        tuning.keep(folder, last, {**bounds, "items": len(task.items)}, points, shorter)
        _say_what_is_kept(folder, shorter, last, depth)
    else:
        say("nothing is kept; --max-kl or --min-recall keeps the fewest layers that will do")
    say(measure.machine_line())
    config = {"source": models[0].name, "target": models[1].name, "native_layers": layers}
    config |= options.some("max_kl min_recall data limit seed trials lengths")
    whole = {"lengths": results} if options.lengths else results[str(None)]
    keep(options.json_file, "tune", config, whole)


def _tasks(options: TuneOptions, models: Models) -> Mapping[int | None, Task]:
    """What is scored, by the longest prefix for which it counts; None for all."""
    from kvlingo_mlx.evaluation import tuning

    asked = options.data, options.limit, options.seed
    tasks: dict[int | None, Task] = {}
    if options.lengths is None:
        tasks[None] = tuning.task_of(models[0], models[1], *asked)
    else:
        lengths = sorted(numbers(options.lengths))
        tasks |= tuning.tasks_of(models[0], models[1], *asked, lengths)
    for task in tasks.values():
        tuning.check_bounds(task, options.min_recall)
    return tasks


def _points(options: TuneOptions, target: LanguageModel, task: Task, line: Any) -> list[Point]:
    """The measured ways to take over the prefixes of a task."""
    from kvlingo_mlx.evaluation import tuning
    from kvlingo_mlx.evaluation.journal import Journal

    journal, trials = Journal(options.out), options.trials
    with phase("tuning", len(task.items)) as step:
        return tuning.measure(target, task, line, journal, trials=trials, progress=step)


def _say_what_is_kept(folder: Path, shorter: Mapping[int, int], last: int, depth: int) -> None:
    """The numbers of native layers, and where the tuned translator is used from."""
    from kvlingo_mlx.evaluation.tuning import distinct
    from kvlingo_mlx.loading.translators import store

    said = "".join(
        f", {layers} for prefixes of at most {tokens} tokens"
        for tokens, layers in distinct(shorter, last)
    )
    say(f"{folder} keeps native_layers = {last} of {depth}{said}")
    if folder.resolve().parent == store().resolve():
        say("it is in the local store: generate and chat use it with these layers from now on")
    else:
        say(f"to use it from the store: kvlingo-mlx import {shlex.quote(str(folder))} --force")


def _print(task: Task, points: list[Point], longest: int | None) -> None:
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
    of = "" if longest is None else f", prefixes of at most {longest} tokens"
    table(f"{task.name}, {len(task.items)} conversations{of}", list(cells), rows)
    tell_of_machine()
