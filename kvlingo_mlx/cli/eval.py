"""kvlingo-mlx eval: what a translator costs in quality, beside native decoding and alternatives."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from kvlingo_mlx.cli import eval_options as options
from kvlingo_mlx.cli.eval_options import words
from kvlingo_mlx.cli.output import (
    JSON_HELP,
    NATIVE_HELP,
    keep_stdout_for_json,
    ms,
    native_number,
    progress_bar,
    say,
    table,
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

ANSWER_TOKENS = 128
MOST_COLUMNS = 4


def command(
    translators: list[str] = typer.Argument(
        None, help="Translators: FOLDER, NAME=FOLDER, or NAME=A,B,C (seeds); else the store's."
    ),
    source: str = typer.Option(..., help="Whose cache is translated: a folder or Hub id."),
    target: str = typer.Option(..., help="Who decodes from it: a folder or Hub id."),
    quantize: str = typer.Option(
        None, help="Also compare each translator with its weights in 8 or 4 bits: 8,4."
    ),
    native_layers: str = typer.Option(None, help=NATIVE_HELP),
    compare: bool = typer.Option(False, "--compare", help="Also time each one's first token."),
    tasks: str = typer.Option(
        "continuation,recall", help="continuation, recall, needles, and any that lm-eval has."
    ),
    baselines: str = typer.Option(
        "hidden,shuffled",
        help="hidden, shuffled, canonical, reuse, droidspeak, droidspeak:J, text, folded; or none.",
    ),
    data: str = typer.Option(None, help="JSONL for continuation; default: generated dialogues."),
    limit: int = typer.Option(64, help="Items a task; of needles, a variant and length."),
    seed: int = typer.Option(0, help="Seed of what is generated."),
    needles: str = typer.Option("single,multi-key,multi-value,multi-query", help="Variants."),
    lengths: str = typer.Option(None, help="Lengths of haystacks in tokens: 4096,8192."),
    style: str = typer.Option("magic", help="Needles: magic numbers, or facts (the zoo's)."),
    haystack: str = typer.Option(None, help="A text file to hide the needles in."),
    max_tokens: int = typer.Option(
        None,
        "--max-tokens",
        "-m",
        help="Longest answer; default: 128, or as lm-eval's task has it.",
    ),
    thinking: bool = typer.Option(False, help="The chat template's thinking switch."),
    num_shots: int = typer.Option(None, help="lm-eval: examples shown; default: the task's own."),
    chat: bool = typer.Option(
        None,
        "--apply-chat-template/--no-apply-chat-template",
        help="lm-eval: prompts as chats; default: if the target has a template.",
    ),
    include_path: str = typer.Option(None, help="lm-eval: a folder of further task files."),
    task_data: list[str] = typer.Option(
        None, help="NAME=FILE: local records for a task of ours, such as quac."
    ),
    metadata: str = typer.Option(None, help='lm-eval: JSON for tasks that ask: {"key": ...}.'),
    judge: str = typer.Option(None, help="A model that judges free answers: a folder or Hub id."),
    unsafe_code: bool = typer.Option(
        False, "--confirm-run-unsafe-code", help="lm-eval: allow tasks that run generated code."
    ),
    out: str = typer.Option("kvlingo-eval.jsonl", help="Items' scores; the same command resumes."),
    plot: str = typer.Option(None, help="Draw score against first-token time (with --compare)."),
    allow_mismatch: bool = typer.Option(False, help="Accept another checkpoint's translator."),
    json_file: str = typer.Option(None, "--json", help=JSON_HELP),
) -> None:
    """Compare translated caches with native ones, controls and alternatives."""
    check_ranges(
        ("--limit", limit, limit > 0, "1 or more"),
        ("--max-tokens", max_tokens, max_tokens is None or max_tokens > 0, "1 or more"),
    )
    own, public = options.split_tasks(words(tasks), judge)
    local, facts = options.named_files(task_data), options.json_object(metadata)
    forms, layers = options.forms(quantize), native_number(native_layers)

    from kvlingo_mlx.evaluation import compare as comparison
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.pairing import check_tokenizers
    from kvlingo_mlx.reporting import measure, pictures

    keep_stdout_for_json(json_file)
    if plot:
        pictures.check(plot)
    journal = Journal(out)
    read = options.haystack_text(haystack)
    models = load_pair(source, target)
    if public:
        check_tokenizers(*models, "lm-eval's tasks are cut by one tokenizer; use our own tasks")
    asked = [
        options.make_task(name, *models, data=data, limit=limit, seed=seed, variants=words(needles),
              lengths=lengths, style=style, text=read, max_tokens=max_tokens or ANSWER_TOKENS,
              thinking=thinking)
        for name in own
    ]  # fmt: skip
    named = _named(*models, translators, forms, allow_mismatch)
    line = _line_up(*models, named, words(baselines), allow_mismatch, layers)
    outcomes: list[Outcome] = []
    with _resumable():
        if public:  # first: their data may be out of reach
            outcomes += _public(
                public, *models, line, judge, limit=limit, seed=seed, num_fewshot=num_shots,
                apply_chat_template=chat, enable_thinking=thinking, max_gen_toks=max_tokens,
                include_path=include_path, data=local, metadata=facts, unsafe_code=unsafe_code,
                responses=_beside(out),
            )  # fmt: skip
        with progress_bar("evaluating", sum(len(task.items) for task in asked)) as step:
            results = comparison.evaluate(models[1], asked, line, journal, lambda name: step())
    outcomes += [comparison.outcome(task, results[task.name]) for task in asked]
    for outcome in outcomes:
        _print(outcome)
    times = _times(models[1], line, asked, outcomes) if compare else {}
    say(measure.machine_line())
    if asked:
        say(f"every item's scores are in {out}")
    if public:
        say(f"every response is in {_beside(out)}")
    if json_file:
        config = {
            "source": models[0].name, "target": models[1].name, "data": data, "limit": limit,
            "seed": seed, "thinking": thinking, "max_tokens": max_tokens, "num_shots": num_shots,
            "apply_chat_template": chat, "judge": judge, "task_data": local, "quantize": quantize,
            "native_layers": layers, "weights": [model.precision for model in models],
        }  # fmt: skip
        found = _found(outcomes, times)
        found["translators"] = {
            name: [{"path": str(t.path), "digest": t.digest} for t in every]
            for name, every in named.items()
        }
        measure.append_json(json_file, measure.record("eval", config, found))
    if plot:
        from kvlingo_mlx.evaluation.figures import score_against_time

        title = pictures.pair(models[0].name, models[1].name)
        pictures.save(score_against_time(outcomes, times), plot, title)
        say(f"drew {plot}")


def _named(
    source: LanguageModel,
    target: LanguageModel,
    translators: list[str] | None,
    forms: list[int | None],
    allow_mismatch: bool,
) -> dict[str, list[Translator]]:
    """Every translator in each of its forms, told by name; several are one method's seeds."""
    from kvlingo_mlx.loading.translators import resolve_translator

    named = {
        name if bits is None else f"{name}, {bits} bits": [
            resolve_translator(folder, source, target, allow_mismatch=allow_mismatch, quantize=bits)
            for folder in folders
        ]
        for name, folders in options.named_translators(translators).items()
        for bits in forms
    }
    for name, found in named.items():
        say(f"{name}: {', '.join(translator.name for translator in found)}")
    return named


def _line_up(
    source: LanguageModel,
    target: LanguageModel,
    named: dict[str, list[Translator]],
    baselines: list[str],
    allow_mismatch: bool,
    native_layers: int | str | None,
) -> list[Condition]:
    """Who is compared: native, the translators, then the baselines."""
    from kvlingo_mlx.evaluation import lineup

    every = [translator for found in named.values() for translator in found]
    return [
        lineup.native(target),
        *(
            lineup.translated(
                name, source, target, found, native_layers, allow_mismatch=allow_mismatch
            )
            for name, found in named.items()
        ),
        *(
            lineup.baseline(b, source, target, every, native_layers, allow_mismatch=allow_mismatch)
            for b in baselines
            if b != "none"
        ),
    ]


def _found(outcomes: list[Outcome], times: dict[str, list[float]]) -> dict[str, Any]:
    """All of it, as JSON has it."""
    from kvlingo_mlx.evaluation.compare import plain

    return {
        "means": {o.task: plain(o.tables) for o in outcomes},
        "first_token_s": times,
        "items": {
            o.task: {name: [vars(item) for item in items] for name, items in o.items.items()}
            for o in outcomes
        },
    }


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        warn("interrupted; what was scored is kept, and the same command goes on from there")
        raise


def _beside(out: str) -> str:
    """Where lm-eval's responses go, which are long."""
    return f"{out.removesuffix('.jsonl')}.responses.jsonl"


def _public(
    names: list[str], source: LanguageModel, target: LanguageModel, line: list[Condition],
    judge: str | None, **settings: Any,
) -> list[Outcome]:  # fmt: skip
    from kvlingo_mlx.evaluation.harness import benchmarks
    from kvlingo_mlx.evaluation.harness.judge import Judge

    with progress_bar("lm-eval", None) as step:
        outcomes = benchmarks.evaluate(
            target, names, line,
            judge=None if judge is None else lambda: Judge(judge, responses=settings["responses"]),
            progress=lambda text, done, total: step(done, total, text),
            max_length=min(source.context_length, target.context_length), **settings,
        )  # fmt: skip
    for outcome in outcomes:
        for note in outcome.notes:
            warn(note)
    return outcomes


def _print(outcome: Outcome) -> None:
    """One metric: a column a group, or a row where there are many. Several: a table a group."""
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
        table(f"{title} ({group}), {count} items", ["cache", *metrics], [
            [name, *(_cell(found[group][metric]) for metric in metrics)]
            for name, found in tables.items()
        ])  # fmt: skip


def _cell(mean: Mean) -> str:
    return str(mean) if mean.count else "none"


def _times(
    target: LanguageModel, line: list[Condition], asked: list[Task], outcomes: list[Outcome]
) -> dict[str, list[float]]:
    """Print and return the seconds to the first token on the item of median length.

    lm-eval's items are not at hand: prose as long as they are stands for them.
    """
    from kvlingo_mlx.evaluation.needles import prose
    from kvlingo_mlx.reporting import measure
    from kvlingo_mlx.timing.paths import switch_times

    items = sorted((item for task in asked for item in task.items), key=lambda i: len(i.prefix))
    if items:
        middle = items[len(items) // 2]
        prefix, read = middle.prefix, middle.read
    else:
        prefix = prose(target, statistics.median_low([o.prefix_tokens for o in outcomes]))
        read = prefix
    say(f"timing a switch at {len(prefix)} tokens")
    actions = {c.name: c.at_switch(read) for c in line if c.at_switch is not None}
    times = switch_times(target, actions, prefix[-1])
    rows = [[name, ms(measure.median(samples))] for name, samples in times.items()]
    table("Time to first token at a switch (ms, median)", ["cache", "first token"], rows)
    if not measure.is_apple():
        say("Not measured on Apple hardware: these times are not comparable with a Mac's.")
    return times
