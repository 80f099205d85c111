"""``python -m benchmarks.paper eval --turns``: conversations that two models answer in turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.paper.commands.eval_options import PaperEvalOptions
from benchmarks.paper.commands.eval_options import turns as parsing_turns
from kvlingo_mlx.cli import eval_options as parsing
from kvlingo_mlx.cli.eval import print_outcome, resumable
from kvlingo_mlx.cli.output import keep, phase, say, warn

if TYPE_CHECKING:
    from benchmarks.paper.evaluation.turns import Directions
    from kvlingo_mlx.evaluation.compare import Outcome
    from kvlingo_mlx.models.language_model import LanguageModel


def hold(options: PaperEvalOptions) -> None:
    """Let two models answer a benchmark's conversations in turn, and print scores by turn."""
    asked = _parsed(options)

    from benchmarks.paper.evaluation import turn_records
    from kvlingo_mlx.evaluation import compare
    from kvlingo_mlx.evaluation.journal import Responses
    from kvlingo_mlx.loading.models import load_pair
    from kvlingo_mlx.loading.pairing import check_tokenizers
    from kvlingo_mlx.reporting import measure

    files = parsing.named_files(options.task_data)
    talks = {}
    for name, depth in asked:
        talks[name], short = turn_records.read_talks(
            name, files.get(name), depth=depth, limit=options.count
        )
        if short:
            say(f"{name}: {short} conversations have fewer turns, and are left out")
    responses = Responses(Path(options.responses))
    models = load_pair(options.source, options.target)
    check_tokenizers(*models, "--turns compares ways that need one; use models of one tokenizer")
    named = _translators(options, models)
    outcomes: list[Outcome] = []
    for name, found in talks.items():
        outcomes += _held(options, name, found, models, named, responses)
    for outcome in outcomes:
        print_outcome(outcome)
    say(measure.machine_line())
    say(f"every answer is in {options.responses}")
    digests = {name: [[t.digest for t in seed] for seed in seeds] for name, seeds in named.items()}
    config = {
        "models": [model.name for model in models],
        "weights": [model.precision for model in models],
        "task_data": files,
        **options.some("native_layers turns baselines limit thinking max_tokens judge quantize"),
    }
    results = compare.found(outcomes) | {"translators": digests}
    keep(options.json_file, "eval turns", config, results)


def _parsed(options: PaperEvalOptions) -> list[tuple[str, int | None]]:
    """The benchmarks of ``--turns``; bad options are refused before any work."""
    asked = parsing_turns(options.turns or "")
    for name in options.named_baselines:
        if name not in ("hidden", "shuffled"):
            raise ValueError(
                f"--baselines names {name!r}; with --turns give hidden, shuffled or none"
            )
    if any(name == "multichallenge" for name, _ in asked) and options.judge is None:
        raise ValueError("a model judges the answers of multichallenge; add --judge MODEL")
    return asked


def _translators(
    options: PaperEvalOptions, models: tuple[LanguageModel, LanguageModel]
) -> dict[str, tuple[Directions, ...]]:
    """The translators of both directions by method, one pair of them for each seed."""
    from benchmarks.paper.evaluation import turns

    named = {}
    for name, places in parsing.named_translators(options.translators).items():
        for bits in options.forms:
            label = name if bits is None else f"{name}, {bits} bits"
            named[label] = turns.directed(
                places, models, bits, allow_mismatch=options.allow_mismatch
            )
            say(f"{label}: {', '.join(t.name for seed in named[label] for t in seed)}")
    return named


def _held(
    options: PaperEvalOptions,
    name: str,
    talks: Any,
    models: tuple[LanguageModel, LanguageModel],
    named: dict[str, tuple[Directions, ...]],
    responses: Any,
) -> list[Outcome]:
    """The outcomes of one benchmark, one for each model that begins."""
    from benchmarks.paper.evaluation import turn_scores, turns
    from benchmarks.paper.evaluation.judge import Judge
    from benchmarks.paper.evaluation.turn_records import PUBLISHED

    benchmark, judge = PUBLISHED[name].benchmark, options.judge
    manner = turns.Manner(
        max_tokens=options.max_tokens or benchmark.max_tokens,
        **options.some("native_layers thinking allow_mismatch"),
    )
    ends = turns.names_of(models)
    ways, notes = turns.ways_of(ends, named, options.named_baselines, manner)
    fitting, _ = turn_scores.that_fit(ends, talks, manner)
    if left := len(talks) - len(fitting):
        notes.append(f"{left} conversations do not fit both contexts, and are left out")
    for note in notes:
        warn(f"{name}: {note}")
    held = turn_scores.Held(ends, fitting, ways, manner, responses)
    asks = None
    if benchmark.score is None and judge is not None:
        asks = lambda: Judge(judge, responses=options.responses)  # noqa: E731
    with resumable(), phase(name, held.runs) as step:
        outcomes = turn_scores.evaluate(benchmark, held, judge=asks, progress=step)
    for outcome in outcomes:
        for note in outcome.notes:
            warn(note)
    return outcomes
