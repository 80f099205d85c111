"""kvlingo-mlx eval: what a translator costs in quality, beside native decoding and alternatives."""

from __future__ import annotations

import math
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
    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.language_model import LanguageModel

LENGTHS = (4096, 8192, 16384, 32768)


def command(
    translators: list[str] = typer.Argument(
        None, help="Translators: FOLDER, NAME=FOLDER, or NAME=A,B,C (seeds); else the store's."
    ),
    source: str = typer.Option(..., help="Whose cache is translated: a folder or Hub id."),
    target: str = typer.Option(..., help="Who decodes from it: a folder or Hub id."),
    compare: bool = typer.Option(False, "--compare", help="Also time each one's first token."),
    tasks: str = typer.Option("continuation,recall", help="continuation, recall, needles."),
    baselines: str = typer.Option(
        "hidden,shuffled", help="hidden, shuffled, reuse, droidspeak, droidspeak:J, text; or none."
    ),
    data: str = typer.Option(None, help="JSONL for continuation; default: generated dialogues."),
    limit: int = typer.Option(64, help="Items a task; of needles, a variant and length."),
    seed: int = typer.Option(0, help="Seed of what is generated."),
    needles: str = typer.Option("single,multi-key,multi-value,multi-query", help="Variants."),
    lengths: str = typer.Option(None, help="Lengths of haystacks in tokens: 4096,8192."),
    style: str = typer.Option("magic", help="Needles: magic numbers, or facts (the zoo's)."),
    haystack: str = typer.Option(None, help="A text file to hide the needles in."),
    max_tokens: int = typer.Option(128, "--max-tokens", "-m", help="Longest answer."),
    thinking: bool = typer.Option(False, help="The chat template's thinking switch."),
    out: str = typer.Option("kvlingo-eval.jsonl", help="Items' scores; the same command resumes."),
    plot: str = typer.Option(None, help="Draw score against first-token time (with --compare)."),
    allow_mismatch: bool = typer.Option(False, help="Accept another checkpoint's translator."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Compare translated caches with native ones, controls and alternatives."""
    if limit < 1 or max_tokens < 1:
        raise ValueError(f"--limit is {limit}, --max-tokens {max_tokens}; both are at least 1")
    if plot and not compare:
        raise ValueError("--plot draws score against time to first token; add --compare")

    from kvlingo_mlx import measure, pictures
    from kvlingo_mlx.evaluation import lineup
    from kvlingo_mlx.evaluation.compare import evaluate, plain, summarise
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.loading import load, resolve_translator

    keep_stdout_for_json(json_file)
    if plot:
        pictures.check(plot)
    journal = Journal(out)
    read = _text(haystack)
    models = load(source), load(target)
    named = {
        name: [resolve_translator(f, *models, allow_mismatch=allow_mismatch) for f in folders]
        for name, folders in _named(translators).items()
    }
    asked = [
        _task(name, *models, data=data, limit=limit, seed=seed, variants=_words(needles),
              lengths=lengths, style=style, text=read, max_tokens=max_tokens, thinking=thinking)
        for name in _words(tasks)
    ]  # fmt: skip
    every = [t for folders in named.values() for t in folders]
    line = [lineup.native(models[1])]
    line += [lineup.translated(name, *models, found) for name, found in named.items()]
    line += [lineup.baseline(spec, *models, every) for spec in _words(baselines) if spec != "none"]
    with progress_bar("evaluating", sum(len(task.items) for task in asked)) as step:
        results = evaluate(models[1], asked, line, journal, lambda name: step())
    tables = {
        task.name: {c: summarise(task, found) for c, found in results[task.name].items()}
        for task in asked
    }
    for task in asked:
        _print(task, tables[task.name])
    times = _times(models[1], line, asked) if compare else {}
    say(measure.machine_line())
    say(f"every item's scores are in {out}")
    if json_file:
        items = {
            task: {name: [vars(item) for item in found] for name, found in by_name.items()}
            for task, by_name in results.items()
        }
        config = {
            "source": models[0].name, "target": models[1].name, "data": data, "limit": limit,
            "seed": seed, "thinking": thinking, "max_tokens": max_tokens,
        }  # fmt: skip
        found = {"means": {t: plain(by_name) for t, by_name in tables.items()},
                 "first_token_s": times, "items": items}  # fmt: skip
        measure.append_json(json_file, measure.record("eval", config, found))
    if plot:
        from kvlingo_mlx.evaluation.figures import score_against_time

        pictures.save(score_against_time(asked[0], tables[asked[0].name], times), plot)
        say(f"drew {plot}")


def _words(text: str) -> list[str]:
    """The parts of a list, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _named(translators: list[str] | None) -> dict[str, list[str | None]]:
    """What each argument is called: NAME= before it, else its last part, else "translated"."""
    if not translators:
        return {"translated": [None]}
    named: dict[str, list[str | None]] = {}
    for text in translators:
        name, equals, listed = text.rpartition("=")
        folders = _words(listed)
        if not folders:
            raise ValueError(f"{text!r} names no translator; give FOLDER or NAME=FOLDER")
        if not equals:
            name = "translated" if len(translators) == 1 else folders[0].rstrip("/").split("/")[-1]
        if name in named or name in ("native", "shuffled", "prefix hidden", "reuse", "text"):
            raise ValueError(f"{name!r} is taken; name the translators: NAME=FOLDER")
        named[name] = list(folders)
    return named


def _text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--haystack {path} cannot be read ({error})") from None
    if not text.strip():
        raise ValueError(f"--haystack {path} is empty; give a text, or none for generated prose")
    return text


def _task(name: str, source: LanguageModel, target: LanguageModel, **options: Any) -> Task:
    from kvlingo_mlx.embedded import dialogues
    from kvlingo_mlx.evaluation import probes
    from kvlingo_mlx.samples import read_jsonl

    limit, seed = options["limit"], options["seed"]
    context = min(source.context_length, target.context_length)
    if name == "continuation":
        if options["data"]:
            records = read_jsonl(options["data"])
        else:
            talks = dialogues.held_out(limit, seed=seed)
            records = [{"messages": talk.conversation()} for talk in talks]
        return probes.continuation(target, records, limit, context)
    if name == "recall":
        return probes.recall(target, limit, seed)
    if name == "needles":
        room = context - options["max_tokens"]
        lengths = _lengths(options["lengths"], room)
        return probes.find_needles(
            target, options["variants"], lengths, limit, seed=seed, style=options["style"],
            text=options["text"], max_tokens=options["max_tokens"], thinking=options["thinking"],
        )  # fmt: skip
    raise ValueError(f"--tasks names {name!r}; known are continuation, recall, needles")


def _lengths(text: str | None, room: int) -> list[int]:
    if text is None:
        return [length for length in LENGTHS if length <= room] or [room]
    try:
        lengths = [int(word) for word in _words(text)]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1 or max(lengths) > room:
        raise ValueError(
            f"--lengths is {text!r}; give numbers from 1 to {room}, which the shorter context "
            "leaves for a prompt: 1024,2048"
        )
    return lengths


def _print(task: Task, tables: dict) -> None:
    """One metric: a column a group. Several: a table a group, a column a metric."""
    groups = list(next(iter(tables.values())))
    if len(task.metrics) == 1:
        metric = task.metrics[0]
        rows = [
            [name, *(_cell(found[group][metric]) for group in groups)]
            for name, found in tables.items()
        ]
        table(f"{task.name}: {metric}, {len(task.items)} items", ["cache", *groups], rows)
        return
    for group in groups:
        rows = [
            [name, *(_cell(found[group][metric]) for metric in task.metrics)]
            for name, found in tables.items()
        ]
        count = next(iter(tables.values()))[group][task.metrics[0]].count
        table(f"{task.name} ({group}), {count} items", ["cache", *task.metrics], rows)


def _cell(mean: Any) -> str:
    return f"{mean.value:.3f}" if math.isnan(mean.error) else str(mean)


def _times(target: LanguageModel, line: list, asked: list[Task]) -> dict[str, list[float]]:
    """Print and return the seconds to the first token on the item of median length."""
    from kvlingo_mlx import measure
    from kvlingo_mlx.evaluation.latency import switch_times

    prefixes = sorted((item.prefix for task in asked for item in task.items), key=len)
    prefix = prefixes[len(prefixes) // 2]
    say(f"timing a switch at {len(prefix)} tokens")
    actions = {c.name: c.at_switch(prefix) for c in line if c.at_switch is not None}
    times = switch_times(target, actions, prefix[-1])
    rows = [[name, ms(measure.median(samples))] for name, samples in times.items()]
    table("Time to first token at a switch (ms, median)", ["cache", "first token"], rows)
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
    return times
