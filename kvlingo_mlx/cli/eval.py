"""kvlingo-mlx eval: a translator's cost in quality, beside native decoding and alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli import eval_options as parsing
from kvlingo_mlx.cli.command import verb
from kvlingo_mlx.cli.eval_options import EvalOptions, words
from kvlingo_mlx.cli.eval_printing import print_outcome, resumable
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
    from kvlingo_mlx.evaluation.compare import Outcome, Results
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.evaluation.lineup import Condition
    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.models.language_model import LanguageModel
    from kvlingo_mlx.translators.base import Translator

    Models = tuple[LanguageModel, LanguageModel]

ALONE = "source alone"
ANSWER_TOKENS = 128


class Addition:
    """What a caller of :func:`evaluate` adds to the verb: nothing, but for what a subclass does.

    ``harness`` are further options of :func:`.harness.benchmarks.evaluate`.
    """

    harness: Mapping[str, Any] = {}

    def prepare(self, models: Models, harness: dict[str, Any], haystack: str | None) -> None:
        """Look at the models before any work."""

    def line_up(
        self, models: Models, named: Mapping[str, Any], names: list[str], tasks: list[Task],
        **more: Any,
    ) -> list[Condition]:  # fmt: skip
        """The conditions: ``named`` translators beside baselines; ``more`` as for the package's."""
        from kvlingo_mlx.evaluation import lineup

        return lineup.line_up(*models, named, names, **more)

    def outcomes(self, models: Models, line: list[Condition], journal: Journal) -> list[Outcome]:
        """Further outcomes, beside those of the tasks."""
        return []

    def shares(self, models: Models, line: list[Condition], tokens: int) -> dict[str, float] | None:
        """What each condition computes at a switch, to be printed beside its scores."""
        return None

    def tell(self, outcomes: list[Outcome]) -> None:
        """Print more of all outcomes."""

    def kept(self) -> set[str]:
        """Which files of the run further outcomes have written to: ``out``, ``responses``."""
        return set()

    def record(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Further settings and results of the record."""
        return {}, {}


@verb(EvalOptions, long=True)
def command(options: EvalOptions) -> None:
    """Compare translated caches with native ones, controls and alternatives."""
    evaluate(options, parsing.split_tasks(words(options.tasks)), Addition())


def evaluate(options: EvalOptions, tasks: tuple[list[str], list[str]], addition: Addition) -> None:
    """Carry out the verb for our own tasks and lm-eval's, with what a caller adds."""
    own, public = tasks
    harness = _parsed(options, own) | dict(addition.harness)

    from kvlingo_mlx.evaluation import compare
    from kvlingo_mlx.evaluation.journal import Journal
    from kvlingo_mlx.loading.pairing import check_tokenizers
    from kvlingo_mlx.reporting import measure, pictures

    if options.plot:
        pictures.check(options.plot)
    journal = Journal(options.out)
    haystack = parsing.haystack_text(options.haystack)
    models = _models(options)
    if options.compare and not own:
        check_tokenizers(*models, "times are of our own tasks' prompts; add one: --tasks recall")
    asked = _tasks(options, own, models, haystack)
    harness |= _decoding(options)
    addition.prepare(models, harness, haystack)
    named, line = _line_up(options, models, addition, asked)
    outcomes: list[Outcome] = []
    with resumable():
        if public:  # first, since their data may be out of reach
            outcomes += _public(options, public, models, line, harness)
        outcomes += addition.outcomes(models, line, journal)
        results = _own(options, asked, models, line, journal)
    outcomes += [compare.outcome(task, results[task.name]) for task in asked]
    for outcome in outcomes:
        print_outcome(outcome, addition.shares(models, line, outcome.prefix_tokens))
        for note in outcome.notes:
            warn(note)
    addition.tell(outcomes)
    times = _times(models[1], line, asked, outcomes) if options.compare else {}
    say(measure.machine_line())
    if asked or "out" in addition.kept():
        say(f"every item's scores are in {options.out}")
    if public or "responses" in addition.kept():
        say(f"every response is in {options.responses}")
    translators = {
        name: [{"path": str(t.path), "digest": t.digest} for t in every]
        for name, every in named.items()
    }
    settings, more = addition.record()
    results = compare.found(outcomes, times) | {"translators": translators}
    keep(
        options.json_file,
        "eval",
        _config(options, models, harness["data"]) | settings,
        results | more,
    )
    if options.plot:
        from kvlingo_mlx.evaluation.figures import score_against_time

        draw(score_against_time(outcomes, times), options.plot, *(m.name for m in models))


def _own(
    options: EvalOptions,
    asked: list[Task],
    models: Models,
    line: list[Condition],
    journal: Journal,
) -> Results:
    """The scores of our own tasks; of windows, the source's own perplexity too."""
    from kvlingo_mlx.evaluation import compare

    with progress_bar("evaluating", sum(len(task.items) for task in asked)) as step:
        results = compare.evaluate(models[1], asked, line, journal, lambda name: step())
    if options.window:
        (task,) = (task for task in asked if task.name == "continuation")
        found = results[task.name]
        found[ALONE] = compare.alone(models[0], task, found[compare.NATIVE], journal)
    return results


def _parsed(options: EvalOptions, own: list[str]) -> dict[str, Any]:
    """The options of lm-eval's tasks; bad options are refused first."""
    most = options.max_tokens
    check_ranges(
        ("--limit", options.limit, options.limit is None or options.limit > 0, "1 or more"),
        ("--max-tokens", most, most is None or most > 0, "1 or more"),
        ("--batch-size", options.batch_size, options.batch_size > 0, "1 or more"),
    )
    data, metadata = parsing.named_files(options.task_data), parsing.json_object(options.metadata)
    parsing.forms(options.quantize)
    parsing.check_device(options.device, own, words(options.baselines))
    parsing.window(options.window)
    native_number(options.native_layers)
    return {"data": data, "metadata": metadata}


def _models(options: EvalOptions) -> Models:
    """The source and the target, by MLX or PyTorch."""
    names = options.source, options.target
    if options.device == "mlx":
        from kvlingo_mlx.loading.models import load_pair

        return load_pair(*names)
    from kvlingo_mlx.cuda.runtime import load_as_stored

    loaded: Any = tuple(load_as_stored(name, options.device) for name in names)
    return loaded  # with the same facts under the same names


def ways(options: EvalOptions) -> tuple[Any, Any]:
    """The functions that fill caches, and who decodes from these."""
    if options.device == "mlx":
        from kvlingo_mlx.evaluation import conditions
        from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder

        return conditions, MLXDecoder
    from kvlingo_mlx.cuda import decoding

    return decoding, decoding.TorchDecoder


def _decoding(options: EvalOptions) -> dict[str, Any]:
    """Who decodes lm-eval's tasks."""
    return {"decode": partial(ways(options)[1], batch_size=options.batch_size)}


def _tasks(
    options: EvalOptions, names: list[str], models: Models, haystack: str | None
) -> list[Task]:
    from kvlingo_mlx.evaluation import probes

    asked = probes.TaskOptions(
        needles=words(options.needles),
        lengths=parsing.lengths(options.lengths),
        haystack=haystack,
        max_tokens=options.max_tokens or ANSWER_TOKENS,
        limit=options.count,
        window=parsing.window(options.window),
        **options.some("seed data style thinking"),
    )
    return [probes.make(name, *models, asked) for name in names]


def _line_up(
    options: EvalOptions, models: Models, addition: Addition, tasks: list[Task]
) -> tuple[dict[str, list[Translator]], list[Condition]]:
    """The translators by name, and all conditions to compare."""
    from kvlingo_mlx.evaluation import lineup

    mismatch = options.some("allow_mismatch")
    places = parsing.named_translators(options.translators)
    named = lineup.load(places, *models, parsing.forms(options.quantize), **mismatch)
    for name, found in named.items():
        say(f"{name}: {', '.join(translator.name for translator in found)}")
    baselines = [name for name in words(options.baselines) if name != "none"]
    more = {"native_layers": native_number(options.native_layers), "ways": ways(options)[0]}
    return named, addition.line_up(models, named, baselines, tasks, **more, **mismatch)


def _config(options: EvalOptions, models: Models, data: dict[str, str]) -> dict[str, Any]:
    """The run's settings in a record."""
    return {
        "source": models[0].name,
        "target": models[1].name,
        "apply_chat_template": options.chat,
        "task_data": data,
        "native_layers": native_number(options.native_layers),
        "weights": [model.precision for model in models],
        **options.some("data window limit seed thinking max_tokens num_shots quantize device"),
    }


def _public(
    options: EvalOptions,
    names: list[str],
    models: Models,
    line: list[Condition],
    harness: dict[str, Any],
) -> list[Outcome]:
    """The outcomes of lm-eval's tasks."""
    from kvlingo_mlx.evaluation.harness import benchmarks
    from kvlingo_mlx.tokenization.samples import other_tokenizer

    with progress_bar("lm-eval", None) as step:
        outcomes = benchmarks.evaluate(
            models[1],
            names,
            line,
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
            **harness,
        )
    return outcomes


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
