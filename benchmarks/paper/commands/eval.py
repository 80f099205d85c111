"""python -m benchmarks.paper eval: the package's, with the paper's benchmarks, tasks and judge."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.paper.commands import eval_options as parsing
from benchmarks.paper.commands.eval_options import PaperEvalOptions
from benchmarks.paper.reproducing import decoding
from benchmarks.paper.tasks import ADDED
from kvlingo_mlx.cli import eval as packages
from kvlingo_mlx.cli.command import verb
from kvlingo_mlx.cli.eval_options import OWN
from kvlingo_mlx.cli.output import draw, ms, phase, say, table, tell_of_machine, warn
from kvlingo_mlx.group import launched

if TYPE_CHECKING:
    from benchmarks.paper.evaluation.droidspeak import Profile
    from benchmarks.paper.evaluation.suite_runs import Settings
    from benchmarks.paper.evaluation.suites import Benchmark
    from kvlingo_mlx.evaluation.compare import Outcome
    from kvlingo_mlx.evaluation.lineup import Condition
    from kvlingo_mlx.evaluation.probes import Task, TaskOptions

CONTROLS = ("hidden", "shuffled")
ALONE = "source alone"


@verb(PaperEvalOptions, long=True)
def command(options: PaperEvalOptions) -> None:
    """Compare caches on the paper's benchmarks: the package's eval, and what it leaves out."""
    if launched():
        raise ValueError("eval runs in one process; start it without mlx.launch")
    side = "on_mlx" if options.device == "mlx" else "on_torch"
    importlib.import_module(f"benchmarks.paper.converted_mla.{side}")  # registers the family
    if options.turns is not None:
        from benchmarks.paper.commands.eval_turns import hold

        hold(options)
        return
    PaperComparison(options).run()


class PaperComparison(packages.Comparison):
    """A suite's benchmarks, points of a prompt, a judge, DroidSpeak's profiler, and seeds."""

    options: PaperEvalOptions

    def __init__(self, options: PaperEvalOptions) -> None:
        own, public = parsing.split_tasks(options)
        parsing.check_device(options.device, own, options.named_baselines)
        super().__init__(options, own, public)
        self.rows = benchmarks(options)
        self.points = parsing.points(options.switch_at, options.thinking)
        self.prompts = judge_prompts(options)
        self.profile: Profile | None = None
        self.computed: dict[str, dict[str, float]] = {}  # by task
        self.times: dict[str, list[float]] = {}  # to the first token, by condition
        self.drawn: list[Outcome] = []
        self.harness["added"] = ADDED
        if options.plot:
            from kvlingo_mlx.reporting import pictures

            pictures.check(options.plot)
        if options.judge is not None:
            from benchmarks.paper.evaluation.judge import judging

            self.harness["judge"] = judging(self._judge, self.prompts)

    def run(self) -> None:
        """Evaluate, print, keep the record, and draw scores over times."""
        super().run()
        if self.options.plot:
            from benchmarks.paper.evaluation.frontier import score_against_time

            names = (model.name for model in self.models)
            draw(score_against_time(self.drawn, self.times), self.options.plot, *names)

    def load_models(self) -> tuple[Any, Any]:
        return decoding.load(self.options.device, self.options.source, self.options.target)

    def decoders(self) -> tuple[Any, Any]:
        return decoding.ways(self.options.device), decoding.decoder(self.options.device)

    def _judge(self) -> Any:
        from benchmarks.paper.evaluation.judge import Judge

        return Judge(self.options.judge or "", responses=self.options.responses)

    def prepare(self) -> None:
        """See that all data of a suite are there and all lengths fit."""
        from benchmarks.paper.evaluation import suite_runs

        options, decode = self.options, self.harness["decode"]
        self.writer = decode(self.models[0], self.ways.native(self.models[0]))
        self.settings: Settings = suite_runs.Settings(
            haystack=self.haystack,
            data=self.harness["data"],
            prompts=self.prompts or {},
            more={"responses": options.responses, "decode": decode},
            **options.some("thinking limit max_tokens seed lengths"),
        )
        suite_runs.check(self.rows, self.models, self.settings)

    def task(self, name: str, options: TaskOptions) -> Task:
        """One of our own tasks; continuations within windows of texts, if they are asked for."""
        if self.options.window is None or name != "continuation":
            return super().task(name, options)
        from benchmarks.paper.evaluation import windows

        prefix, continuation = map(int, self.options.window.split("+"))
        given = self.options.data or "", self.options.count
        return windows.task(*self.models, *given, (prefix, continuation))

    def line_up(self, baselines: Sequence[str]) -> list[Condition]:
        """The package's, reuse and DroidSpeak too, each at every point of a prompt."""
        from benchmarks.paper.evaluation import baselines as further
        from benchmarks.paper.evaluation import points, reuse

        models, tasks = self.models, self.tasks
        points.check_points(self.points, *models)
        points.check_tasks(tasks, self.points)
        shared = None
        if any(reuse.is_reuse(spec) for spec in baselines):
            shared = reuse.Reuse(*models)
        lab = [s for s in baselines if reuse.is_reuse(s) or s in further.NAMES]
        own = super().line_up([s for s in baselines if s not in lab])
        first, *others = own
        at = partial(points.moved, models=models, writer=self.writer, tasks=tasks)
        line = [first] + ([at(first, points.TRACE)] if points.TRACE in self.points else [])
        for one in others[: len(self.named)]:
            line += [at(one, point) for point in self.points]
        controls = iter(others[len(self.named) :])
        for spec in baselines:
            if reuse.is_reuse(spec):
                line.append(reuse.baseline(self._spelt(spec), *models, shared))
                continue
            if spec in further.NAMES:
                translator = next(iter(self.named.values()))[0]
                one = further.baseline(spec, *models, translator, self.options.native_layers)
            else:
                one = next(controls)
            line += [at(one, p) for p in (self.points if spec in CONTROLS else (points.PROMPT,))]
        # The profiler may choose a number of layers that is asked for beside it.
        return list({condition.name: condition for condition in line}.values())

    def _spelt(self, spec: str) -> str:
        """A baseline, with DroidSpeak's layers chosen on generated dialogues."""
        if spec != "droidspeak":
            return spec
        from benchmarks.paper.evaluation import droidspeak

        found = self.profile = droidspeak.measured(*self.models)
        say(f"droidspeak: {found.recomputed} layers chosen on {found.samples} samples")
        return f"{spec}:{found.recomputed}"

    def outcomes(self) -> list[Outcome]:
        """The package's, and those of a suite's benchmarks."""
        from benchmarks.paper.evaluation import suite_runs

        found = list(map(self._beside_the_source, super().outcomes()))
        if not self.rows:
            return found
        judge = None if self.options.judge is None else self._judge
        ask = partial(suite_runs.run, journal=self.journal, judge=judge)
        with phase("suite") as step:
            tell = lambda text, done, total: step(done, total, text)  # noqa: E731
            more = (ask(r, self.models, self.line, self.settings, progress=tell) for r in self.rows)
            return [*found, *more]

    def _beside_the_source(self, outcome: Outcome) -> Outcome:
        """An outcome; that of windows with the source's own perplexity, too."""
        if self.options.window is None or outcome.task != "continuation":
            return outcome
        from benchmarks.paper.evaluation import windows
        from kvlingo_mlx.evaluation import compare

        (task,) = (task for task in self.tasks if task.name == outcome.task)
        native = outcome.items[compare.NATIVE]
        alone = windows.alone(self.models[0], task, native, self.journal)
        return windows.outcome(task, {**outcome.items, ALONE: alone})

    def print_more(self, outcomes: list[Outcome]) -> None:
        """Print what each condition computes, how far seeds lie apart, and first tokens' times."""
        if self.options.device == "mlx":  # PyTorch's conditions do not tell what they compute
            self._compute(outcomes)
        print_seeds(outcomes)
        if self.options.compare:
            self._time(outcomes)
        for row in self.rows:
            where = self.options.out if row.task in OWN else self.options.responses
            say(f"{row.name}: every item is in {where}")

    def _compute(self, outcomes: list[Outcome]) -> None:
        """Count what each condition computes at a switch; it is printed beside reuse alone."""
        from benchmarks.paper.evaluation import reuse

        lengths = {o.prefix_tokens for o in outcomes}
        found = {n: reuse.shares(*self.models, self.line, n) for n in lengths}
        self.computed = {o.task: found[o.prefix_tokens] for o in outcomes}
        if any("recomputed" in condition.identity for condition in self.line):
            for task, shares in self.computed.items():
                rows = [[name, f"{share:.2f}"] for name, share in shares.items()]
                table(f"{task}: share of the target's prefill", ["cache", "compute"], rows)

    def record(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings that the package's verb lacks, and what DroidSpeak was chosen by."""
        settings, _ = super().record()
        settings |= self.options.some("window judge suite switch_at")
        profile = None if self.profile is None else vars(self.profile)
        more = {"profile": profile, "compute": self.computed, "first_token_s": self.times}
        return settings, more

    def _time(self, outcomes: list[Outcome]) -> None:
        """Print the seconds to the first token."""
        from benchmarks.paper.evaluation.frontier import first_tokens
        from kvlingo_mlx.reporting.measure import median

        tokens, self.times = first_tokens(self.models[1], self.line, self.tasks, outcomes)
        self.drawn = outcomes
        rows = [[name, ms(median(samples))] for name, samples in self.times.items()]
        title = f"Time to first token at a switch at {tokens} tokens (ms, median)"
        table(title, ["cache", "first token"], rows)
        tell_of_machine()


def benchmarks(options: PaperEvalOptions) -> list[Benchmark]:
    """The benchmarks of ``--suite``; those left out for want of a judge are named now."""
    if options.suite is None:
        return []
    from benchmarks.paper.evaluation import suites
    from benchmarks.paper.evaluation.suite_runs import check_modules

    rows = suites.chosen(options.suite, options.thinking)
    if options.judge is None:
        rows, told = suites.without_judge(rows, options.suite)
        if told:
            warn(told)
    check_modules(rows)
    if options.device != "mlx" and any(row.task in OWN for row in rows):
        raise ValueError(
            f"--device {options.device} runs lm-eval's tasks alone, and RULER's are our own: name "
            "the others, as --suite paper:mmlu_pro,xquad, or use --device mlx"
        )
    return rows


def judge_prompts(options: PaperEvalOptions) -> dict[str, str] | None:
    """The benchmarks' own judge prompts, if there are any."""
    if options.judge_prompts is None:
        return None
    from benchmarks.paper.evaluation.judge import read_prompts

    return read_prompts(options.judge_prompts)


def print_seeds(outcomes: list[Outcome]) -> None:
    """Print how far the seeds of a method lie apart, beside the error over items of one of them."""
    from benchmarks.paper.evaluation import seeds

    rows = [
        [
            f"{cell.task}: {cell.metric}",
            cell.condition,
            ", ".join(f"{seed.value:.3f}" for seed in cell.seeds),
            *(_number(x) for x in (cell.mean, cell.seed_sd, cell.item_error)),
        ]
        for cell in seeds.cells(outcomes)
    ]
    if rows:
        columns = ["score", "cache", "each seed", "mean", "sd of seeds", "error of items"]
        table("Seeds, beside the first one's standard error over items", columns, rows)


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.3f}"
