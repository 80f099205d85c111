"""kvlingo-mlx eval: a translator's cost in quality, beside native decoding and alternatives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli import eval_options as parsing
from kvlingo_mlx.cli.command import verb, words
from kvlingo_mlx.cli.eval_options import EvalFields, EvalOptions
from kvlingo_mlx.cli.output import keep, phase, say, table, warn

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.compare import Outcome
    from kvlingo_mlx.evaluation.error_bars import Mean
    from kvlingo_mlx.evaluation.lineup import Condition
    from kvlingo_mlx.evaluation.probes import Task, TaskOptions

ANSWER_TOKENS = 128
MOST_COLUMNS = 4


@verb(EvalOptions, long=True)
def command(options: EvalOptions) -> None:
    """Compare translated caches with native ones, controls and alternatives."""
    Comparison(options, *parsing.split_tasks(words(options.tasks))).run()


class Comparison:
    """One run of the verb; the paper's command extends it.

    ``own`` and ``public`` name our own tasks and lm-eval's. Bad options are refused (ValueError)
    before anything is loaded.
    """

    def __init__(self, options: EvalFields, own: list[str], public: list[str]) -> None:
        self.options, self.public, self._own_names = options, public, own
        self.harness: dict[str, Any] = {  # further arguments of lm-eval's tasks
            "data": parsing.named_files(options.task_data),
            "metadata": options.metadata,
        }

    def run(self) -> None:
        """Evaluate, print, and keep the record."""
        self._load()
        options, asked = self.options, self.tasks
        with resumable():
            outcomes = self.outcomes()
        for outcome in outcomes:
            print_outcome(outcome)
            for note in outcome.notes:
                warn(note)
        self.print_more(outcomes)

        from kvlingo_mlx.evaluation import compare
        from kvlingo_mlx.reporting import measure

        say(measure.machine_line())
        if asked:
            say(f"every item's scores are in {options.out}")
        if self.public:
            say(f"every response is in {options.responses}")
        settings, more = self.record()
        translators = {
            name: [{"path": str(t.path), "digest": t.digest} for t in every]
            for name, every in self.named.items()
        }
        results = compare.found(outcomes) | {"translators": translators} | more
        keep(options.json_file, "eval", settings, results)

    # ---- before the work ------------------------------------------------------------------------

    def _load(self) -> None:
        """Load the models, and make the tasks and the conditions."""
        from kvlingo_mlx.evaluation.journal import Journal

        options = self.options
        self.journal = Journal(options.out)
        self.haystack = parsing.haystack_text(options.haystack)
        self.models = self.load_models()
        self.tasks = self._tasks()
        self.ways, decoder = self.decoders()
        self.harness["decode"] = partial(decoder, batch_size=options.batch_size)
        self.prepare()
        self.named = self._translators()
        self.line = self.line_up(options.named_baselines)

    def load_models(self) -> tuple[Any, Any]:
        """The source and the target."""
        from kvlingo_mlx.loading.models import load_pair

        return load_pair(self.options.source, self.options.target)

    def decoders(self) -> tuple[Any, Any]:
        """The functions that fill caches, and who decodes lm-eval's tasks from these."""
        from kvlingo_mlx.evaluation import conditions
        from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder

        return conditions, MLXDecoder

    def _tasks(self) -> list[Task]:
        from kvlingo_mlx.evaluation import probes

        options = self.options
        asked = probes.TaskOptions(
            needles=words(options.needles),
            haystack=self.haystack,
            max_tokens=options.max_tokens or ANSWER_TOKENS,
            limit=options.count,
            **options.some("seed data style thinking lengths"),
        )
        return [self.task(name, asked) for name in self._own_names]

    def _translators(self) -> dict[str, list[Any]]:
        """The translators by name."""
        from kvlingo_mlx.evaluation import lineup

        options = self.options
        places = parsing.named_translators(options.translators)
        mismatch = options.some("allow_mismatch")
        named = lineup.load(places, *self.models, options.forms, **mismatch)
        for name, found in named.items():
            say(f"{name}: {', '.join(translator.name for translator in found)}")
        return named

    # ---- what the paper's command adds to -------------------------------------------------------

    def task(self, name: str, options: TaskOptions) -> Task:
        """One of our own tasks."""
        from kvlingo_mlx.evaluation import probes

        return probes.make(name, *self.models, options)

    def prepare(self) -> None:
        """Look at the models before any work."""

    def line_up(self, baselines: Sequence[str]) -> list[Condition]:
        """The conditions: the translators beside baselines."""
        from kvlingo_mlx.evaluation import lineup

        native_layers = self.options.native_layers
        return lineup.line_up(*self.models, self.named, baselines, native_layers, ways=self.ways)

    def outcomes(self) -> list[Outcome]:
        """What is found in all tasks; of lm-eval's first, since their data may be out of reach."""
        found = self._of_harness() if self.public else []
        return [*found, *self._of_probes()]

    def print_more(self, outcomes: list[Outcome]) -> None:
        """Print more of all outcomes."""

    def record(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The run's settings in a record, and further results."""
        options, models = self.options, self.models
        settings = {
            "source": models[0].name,
            "target": models[1].name,
            "apply_chat_template": options.chat,
            "task_data": self.harness["data"],
            "weights": [model.precision for model in models],
            **options.some("native_layers data limit seed thinking max_tokens num_shots"),
            **options.some("quantize"),
        }
        return settings, {}

    # ---- the work -------------------------------------------------------------------------------

    def _of_harness(self) -> list[Outcome]:
        """The outcomes of lm-eval's tasks."""
        from kvlingo_mlx.evaluation.harness import benchmarks
        from kvlingo_mlx.tokenization.samples import other_tokenizer

        options, models = self.options, self.models
        with phase("lm-eval") as step:
            return benchmarks.evaluate(
                models[1],
                self.public,
                self.line,
                progress=lambda text, done, total: step(done, total, text),
                source_tokenizer=other_tokenizer(*(model.tokenizer for model in models)),
                max_length=min(model.context_length for model in models),
                num_fewshot=options.num_shots,
                apply_chat_template=options.chat,
                enable_thinking=options.thinking,
                max_gen_toks=options.max_tokens,
                responses=options.responses,
                limit=options.count,
                **options.some("seed include_path unsafe_code"),
                **self.harness,
            )

    def _of_probes(self) -> list[Outcome]:
        """The outcomes of our own tasks."""
        from kvlingo_mlx.evaluation import compare

        with phase("evaluating", sum(len(task.items) for task in self.tasks)) as step:
            results = compare.evaluate(
                self.models[1], self.tasks, self.line, self.journal, lambda name: step()
            )
        return [compare.outcome(task, results[task.name]) for task in self.tasks]


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Say that an interrupted run can be resumed."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        warn("interrupted; what was scored is kept, and the same command goes on from there")
        raise


# ---- tables ------------------------------------------------------------------------------------


def print_outcome(outcome: Outcome) -> None:
    """Print an outcome.

    One metric makes one table with a column per group, or a row per group if there are many, and
    then a table for every few conditions.
    Several metrics make a table per group; of many groups, the first metric's and all items' alone.
    """
    title, tables, metrics = outcome.task, outcome.tables, outcome.metrics
    groups = list(next(iter(tables.values())))
    if len(metrics) > 1:
        if len(groups) > MOST_COLUMNS:
            print_outcome(replace(outcome, metrics=metrics[:1]))
            groups = groups[-1:]  # all items; the other scores of each part are in the record
        for group in groups:
            count = max(mean.count for mean in next(iter(tables.values()))[group].values())
            rows = [[name, *(_cell(of[group][m]) for m in metrics)] for name, of in tables.items()]
            table(f"{title} ({group}), {count} items", ["cache", *metrics], rows)
        return
    title += f": {metrics[0]}, {outcome.count} items"
    cells = {
        name: [_cell(of[group][metrics[0]]) for group in groups] for name, of in tables.items()
    }
    if len(groups) <= MOST_COLUMNS:
        table(title, ["cache", *groups], [[name, *row] for name, row in cells.items()])
        return
    names = list(cells)
    for start in range(0, len(names), MOST_COLUMNS):
        some = names[start : start + MOST_COLUMNS]
        columns = zip(*(cells[name] for name in some), strict=True)
        table(title, ["", *some], [[g, *row] for g, row in zip(groups, columns, strict=True)])


def _cell(mean: Mean) -> str:
    return str(mean) if mean.count else "none"
