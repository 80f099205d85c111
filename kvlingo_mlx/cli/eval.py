"""kvlingo-mlx eval: a translator's cost in quality, beside native decoding and alternatives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli import eval_options as parsing
from kvlingo_mlx.cli.command import verb
from kvlingo_mlx.cli.eval_options import EvalOptions, words
from kvlingo_mlx.cli.output import (
    draw,
    keep,
    ms,
    native_number,
    progress_bar,
    say,
    table,
    tell_of_machine,
    warn,
)
from kvlingo_mlx.cli.sampling import check_ranges

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.compare import Outcome
    from kvlingo_mlx.evaluation.error_bars import Mean
    from kvlingo_mlx.evaluation.lineup import Condition
    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.models.language_model import LanguageModel
    from kvlingo_mlx.translators.base import Translator

    Models = tuple[LanguageModel, LanguageModel]

ANSWER_TOKENS = 128
MOST_COLUMNS = 4


@verb(EvalOptions)
def command(options: EvalOptions) -> None:
    """Compare translated caches with native ones, controls and alternatives."""
    own, public, harness = _parsed(options)

    from kvlingo_mlx.evaluation import compare
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.pairing import check_tokenizers
    from kvlingo_mlx.reporting import measure, pictures

    if options.plot:
        pictures.check(options.plot)
    journal = Journal(options.out)
    haystack = parsing.haystack_text(options.haystack)
    models = load_pair(options.source, options.target)
    if public:
        check_tokenizers(*models, "lm-eval's tasks are cut by one tokenizer; use our own tasks")
    asked = _tasks(options, own, models, haystack)
    named, line = _line_up(options, models)
    outcomes: list[Outcome] = []
    with _resumable():
        if public:  # first, since their data may be out of reach
            outcomes += _public(options, public, models, line, harness)
        with progress_bar("evaluating", sum(len(task.items) for task in asked)) as step:
            results = compare.evaluate(models[1], asked, line, journal, lambda name: step())
    outcomes += [compare.outcome(task, results[task.name]) for task in asked]
    for outcome in outcomes:
        _print(outcome)
    times = _times(models[1], line, asked, outcomes) if options.compare else {}
    say(measure.machine_line())
    if asked:
        say(f"every item's scores are in {options.out}")
    if public:
        say(f"every response is in {options.responses}")
    translators = {
        name: [{"path": str(t.path), "digest": t.digest} for t in every]
        for name, every in named.items()
    }
    found = compare.found(outcomes, times) | {"translators": translators}
    keep(options.json_file, "eval", _config(options, models, harness["data"]), found)
    if options.plot:
        from kvlingo_mlx.evaluation.figures import score_against_time

        draw(score_against_time(outcomes, times), options.plot, *(m.name for m in models))


def _parsed(options: EvalOptions) -> tuple[list[str], list[str], dict[str, Any]]:
    """Our own tasks, lm-eval's tasks, and the latter's options; bad options are refused first."""
    most = options.max_tokens
    check_ranges(
        ("--limit", options.limit, options.limit > 0, "1 or more"),
        ("--max-tokens", most, most is None or most > 0, "1 or more"),
    )
    own, public = parsing.split_tasks(words(options.tasks), options.judge)
    data, metadata = parsing.named_files(options.task_data), parsing.json_object(options.metadata)
    parsing.forms(options.quantize)
    native_number(options.native_layers)
    return own, public, {"data": data, "metadata": metadata}


def _tasks(
    options: EvalOptions, names: list[str], models: Models, haystack: str | None
) -> list[Task]:
    from kvlingo_mlx.evaluation import own_tasks

    asked = own_tasks.Asked(
        needles=words(options.needles),
        lengths=parsing.lengths(options.lengths),
        haystack=haystack,
        max_tokens=options.max_tokens or ANSWER_TOKENS,
        **options.some("limit seed data style thinking"),
    )
    return [own_tasks.make(name, *models, asked) for name in names]


def _line_up(
    options: EvalOptions, models: Models
) -> tuple[dict[str, list[Translator]], list[Condition]]:
    """The translators by name, and all conditions to compare."""
    from kvlingo_mlx.evaluation import lineup

    mismatch = options.some("allow_mismatch")
    places = parsing.named_translators(options.translators)
    named = lineup.load(places, *models, parsing.forms(options.quantize), **mismatch)
    for name, found in named.items():
        say(f"{name}: {', '.join(translator.name for translator in found)}")
    baselines = [name for name in words(options.baselines) if name != "none"]
    layers = native_number(options.native_layers)
    return named, lineup.line_up(*models, named, baselines, layers, **mismatch)


def _config(options: EvalOptions, models: Models, data: dict[str, str]) -> dict[str, Any]:
    """The run's settings in a record."""
    return {
        "source": models[0].name,
        "target": models[1].name,
        "apply_chat_template": options.chat,
        "task_data": data,
        "native_layers": native_number(options.native_layers),
        "weights": [model.precision for model in models],
        **options.some("data limit seed thinking max_tokens num_shots judge quantize"),
    }


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        warn("interrupted; what was scored is kept, and the same command goes on from there")
        raise


def _public(
    options: EvalOptions,
    names: list[str],
    models: Models,
    line: list[Condition],
    harness: dict[str, Any],
) -> list[Outcome]:
    """The outcomes of lm-eval's tasks."""
    from kvlingo_mlx.evaluation.harness import benchmarks
    from kvlingo_mlx.evaluation.harness.judge import Judge

    judge, responses = options.judge, options.responses
    with progress_bar("lm-eval", None) as step:
        outcomes = benchmarks.evaluate(
            models[1],
            names,
            line,
            judge=None if judge is None else lambda: Judge(judge, responses=responses),
            progress=lambda text, done, total: step(done, total, text),
            max_length=min(model.context_length for model in models),
            num_fewshot=options.num_shots,
            apply_chat_template=options.chat,
            enable_thinking=options.thinking,
            max_gen_toks=options.max_tokens,
            responses=responses,
            **options.some("limit seed include_path unsafe_code"),
            **harness,
        )
    for outcome in outcomes:
        for note in outcome.notes:
            warn(note)
    return outcomes


def _print(outcome: Outcome) -> None:
    """Print an outcome.

    One metric makes one table with a column per group, or a row per group if there are many.
    Several metrics make a table per group.
    """
    title, tables, metrics = outcome.task, outcome.tables, outcome.metrics
    groups = list(next(iter(tables.values())))
    if len(metrics) == 1:
        title += f": {metrics[0]}, {outcome.count} items"
        cells = {g: [_cell(found[g][metrics[0]]) for found in tables.values()] for g in groups}
        if len(groups) > MOST_COLUMNS:
            table(title, ["", *tables], [[group, *row] for group, row in cells.items()])
        else:
            rows = zip(tables, *cells.values(), strict=True)
            table(title, ["cache", *groups], [list(row) for row in rows])
        return
    for group in groups:
        first = next(iter(tables.values()))[group]
        count = max(mean.count for mean in first.values())
        table(
            f"{title} ({group}), {count} items",
            ["cache", *metrics],
            [
                [name, *(_cell(found[group][metric]) for metric in metrics)]
                for name, found in tables.items()
            ],
        )


def _cell(mean: Mean) -> str:
    return str(mean) if mean.count else "none"


def _times(
    target: LanguageModel, line: list[Condition], asked: list[Task], outcomes: list[Outcome]
) -> dict[str, list[float]]:
    """Print and return the seconds to the first token."""
    from kvlingo_mlx.evaluation.compare import first_tokens
    from kvlingo_mlx.reporting import measure

    tokens, times = first_tokens(target, line, asked, outcomes)
    rows = [[name, ms(measure.median(samples))] for name, samples in times.items()]
    title = f"Time to first token at a switch at {tokens} tokens (ms, median)"
    table(title, ["cache", "first token"], rows)
    tell_of_machine()
    return times
