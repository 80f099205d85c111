"""``kvlingo-mlx eval --suite``: the paper's benchmarks, and the judges' own prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli import eval_options as parsing
from kvlingo_mlx.cli.eval_options import EvalOptions
from kvlingo_mlx.cli.output import progress_bar, warn

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.compare import Outcome
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.evaluation.lineup import Condition
    from kvlingo_mlx.evaluation.suite_runs import Settings
    from kvlingo_mlx.evaluation.suites import Benchmark
    from kvlingo_mlx.models.language_model import LanguageModel

    Models = tuple[LanguageModel, LanguageModel]


def benchmarks(options: EvalOptions) -> list[Benchmark]:
    """The benchmarks of ``--suite``; those left out for want of a judge are named now."""
    if options.suite is None:
        return []
    from kvlingo_mlx.evaluation import suites
    from kvlingo_mlx.evaluation.suite_runs import check_modules

    rows = suites.chosen(options.suite, options.thinking)
    if options.judge is None:
        rows, told = suites.without_judge(rows, options.suite)
        if told:
            warn(told)
    check_modules(rows)
    if options.device != "mlx" and any(row.task in parsing.OWN for row in rows):
        raise ValueError(
            f"--device {options.device} runs lm-eval's tasks alone, and RULER's are our own: name "
            "the others, as --suite paper:mmlu_pro,xquad, or use --device mlx"
        )
    return rows


def _some(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def judge_prompts(options: EvalOptions) -> dict[str, str] | None:
    """The benchmarks' own judge prompts, if there are any."""
    if options.judge_prompts is None:
        return None
    from kvlingo_mlx.evaluation.harness.judge import read_prompts

    return read_prompts(options.judge_prompts)


def prepared(
    options: EvalOptions,
    rows: list[Benchmark],
    models: Models,
    harness: dict[str, Any],
    haystack: str | None,
) -> Settings:
    """The settings of a suite's runs, for which all data are there and all lengths fit."""
    from kvlingo_mlx.evaluation import suite_runs

    settings = suite_runs.Settings(
        lengths=parsing.lengths(options.lengths),
        haystack=haystack,
        data=harness["data"],
        prompts=harness["prompts"] or {},
        more={"responses": options.responses, **_some(harness, "decode", "writer")},
        **options.some("thinking limit max_tokens seed"),
    )
    suite_runs.check(rows, models, settings)
    return settings


def outcomes(
    rows: list[Benchmark],
    models: Models,
    line: list[Condition],
    settings: Settings,
    journal: Journal,
    judge: str | None,
) -> list[Outcome]:
    """The outcomes of a suite's benchmarks."""
    from kvlingo_mlx.evaluation import suite_runs
    from kvlingo_mlx.evaluation.harness.judge import Judge

    def ask() -> Judge:
        return Judge(judge or "", responses=settings.more["responses"])

    with progress_bar("suite", None) as step:
        return [
            suite_runs.run(
                row,
                models,
                line,
                settings,
                journal=journal,
                judge=None if judge is None else ask,
                progress=lambda text, done, total: step(done, total, text),
            )
            for row in rows
        ]
