"""kvlingo-mlx profile: how many layers the target should read itself at a switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli.output import (
    JSON_HELP,
    keep_stdout_for_json,
    ms,
    progress_bar,
    say,
    table,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.evaluation.profile import Point
    from kvlingo_mlx.models.language_model import LanguageModel


def command(
    pair: list[str] = typer.Argument(None, metavar="[A B]", help="--source and --target, shorter."),
    source: str = typer.Option(None, help="Whose cache is translated: a folder or Hub id."),
    target: str = typer.Option(None, help="Who takes over: a folder or Hub id."),
    translator: str = typer.Option(None, help="A translator folder; else the local store's."),
    data: str = typer.Option(
        None, help='JSONL conversations, perhaps with "answers": [...]; default: dialogues.'
    ),
    max_kl: float = typer.Option(None, help="Keep the fewest layers with at most this KL."),
    min_recall: float = typer.Option(None, help="Keep the fewest that recall this share."),
    limit: int = typer.Option(32, help="Most conversations."),
    seed: int = typer.Option(0, help="Seed of the generated dialogues."),
    native_layers: str = typer.Option(None, help="Try these numbers alone: 0,1,2."),
    droidspeak: bool = typer.Option(True, help="Also reuse the source's cache verbatim above."),
    trials: int = typer.Option(5, help="How often each way's first token is timed."),
    out: str = typer.Option("kvlingo-profile.jsonl", help="Items' scores; it resumes from them."),
    plot: str = typer.Option(None, help="Draw quality against time to the first token."),
    allow_mismatch: bool = typer.Option(False, help="Accept another checkpoint's translator."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Measure quality and time for each number of layers that the target reads itself."""
    names = _pair(pair, source, target)
    if limit < 1 or trials < 1:
        raise ValueError(f"--limit is {limit}, --trials {trials}; both are at least 1")
    for name, bound in (("--max-kl", max_kl), ("--min-recall", min_recall)):
        if bound is not None and not bound >= 0:
            raise ValueError(f"{name} is {bound}; give 0 or more")
    if min_recall is not None and min_recall > 1:
        raise ValueError(f"--min-recall is {min_recall}; it is a share: give 0 to 1")

    from kvlingo_mlx.evaluation import profile
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.pairing import check_one_tokenizer
    from kvlingo_mlx.loading.translators import find_translator, resolve_translator
    from kvlingo_mlx.reporting import measure, pictures

    keep_stdout_for_json(json_file)
    if plot:
        pictures.check(plot)
    models = load_pair(*names)
    place = translator or find_translator(*models, allow_mismatch=allow_mismatch)
    found = resolve_translator(place, *models, allow_mismatch=allow_mismatch)
    check_one_tokenizer(found.config, "profile")
    keeps = max_kl is not None or min_recall is not None
    folder = _own_folder(str(place)) if keeps else None
    layers = _numbers(native_layers, len(models[1].attentions))
    task = _task(*models, data, limit, seed)
    profile.check_bounds(task, min_recall)
    line = profile.line_up(
        *models, found, layers, droidspeak=droidspeak, allow_mismatch=allow_mismatch
    )
    with progress_bar("profiling", len(task.items)) as step:
        points = profile.measure(
            models[1], task, line, Journal(out), trials=trials, progress=lambda: step()
        )
    _print(task, points)
    results: dict[str, Any] = {"points": [point.as_json() for point in points]}
    if folder is not None:
        chosen = profile.smallest(points, max_kl=max_kl, min_recall=min_recall)
        results["native_layers"] = chosen
        bounds = {"max_kl": max_kl, "min_recall": min_recall, "items": len(task.items)}
        profile.keep(folder, chosen, bounds, points)
        say(f"{folder} keeps native_layers = {chosen} of {len(models[1].attentions)}")
    say(measure.machine_line())
    if json_file:
        config = {"source": models[0].name, "target": models[1].name, "data": data,
                  "limit": limit, "seed": seed, "max_kl": max_kl, "min_recall": min_recall,
                  "native_layers": layers, "trials": trials}  # fmt: skip
        measure.append_json(json_file, measure.record("profile", config, results))
    if plot:
        from kvlingo_mlx.evaluation.figures import quality_by_layers

        title = pictures.pair(models[0].name, models[1].name)
        pictures.save(quality_by_layers(points), plot, title)
        say(f"drew {plot}")


def _pair(both: list[str] | None, source: str | None, target: str | None) -> tuple[str, str]:
    """The two models, by their options or in a row."""
    if not both and source is not None and target is not None:
        return source, target
    if both and len(both) == 2 and (source, target) == (None, None):
        return both[0], both[1]
    options = {"--source": source, "--target": target}
    found = [*(both or []), *(f"{name} {value}" for name, value in options.items() if value)]
    raise ValueError(
        f"a profile is of two models, and found {', '.join(found) or 'none'}; give --source A "
        "--target B, or A B alone"
    )


def _numbers(text: str | None, most: int) -> list[int]:
    """The numbers of layers to try, each below ``most``, which is a re-prefill."""
    if text is None:
        return list(range(most))
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 0 or numbers[-1] >= most:
        raise ValueError(
            f"--native-layers is {text!r}; give numbers from 0 to {most - 1}: 0,1,2 (all {most} "
            "are a re-prefill, which is always measured)"
        )
    return numbers


def _own_folder(place: str) -> Path:
    """The translator's folder, which what is chosen is written to; refused before measuring."""
    import os
    from pathlib import Path

    from kvlingo_mlx.embedded import TRANSLATORS
    from kvlingo_mlx.format import translator_folder

    path = Path(place)
    if not path.is_dir() or path.parent == TRANSLATORS or not os.access(path, os.W_OK):
        raise ValueError(
            f"{place} is no folder of yours, so nothing can be kept in it; `kvlingo-mlx import "
            f"{place} --out DIR` and give --translator DIR"
        )
    others = sorted({file.name for file in path.iterdir()} - set(translator_folder.OUR_FILES))
    if others:  # the folder is replaced as a whole
        raise ValueError(
            f"{place} holds {others[0]}, which is no file of a translator and would be lost when "
            "what is chosen is kept; move it elsewhere"
        )
    translator_folder.check_destination(path)
    return path


def _task(
    source: LanguageModel, target: LanguageModel, data: str | None, limit: int, seed: int
) -> Task:
    from kvlingo_mlx.evaluation import probes
    from kvlingo_mlx.tokenization.samples import read_jsonl

    if data is None:
        return probes.recall(target, limit, seed)
    records = read_jsonl(data)
    context = min(source.context_length, target.context_length)
    answers = any("answers" in record for record in records)
    make = probes.marked if answers else probes.continuation
    return make(target, records, limit, context)


def _print(task: Task, points: list[Point]) -> None:
    from kvlingo_mlx.reporting import measure

    whole = next(point.time for point in points if point.way == "native")
    rows = []
    for point in points:
        share = "" if point.time is None or not whole else f"{point.time / whole:.2f}"
        rows.append([
            point.way, "" if point.layers is None else str(point.layers), str(point.kl),
            "" if point.recall is None else str(point.recall),
            "" if point.time is None else ms(point.time), share,
        ])  # fmt: skip
    columns = ["cache", "native layers", "KL", "recall", "first token, ms", "of a re-prefill"]
    table(f"{task.name}, {len(task.items)} conversations", columns, rows)
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
