"""One benchmark of a suite under every condition, and the one score that the paper's tables show.

:mod:`.suites` says what a benchmark asks; here it is asked and its items are pooled (appendix
"Seeds and error bars").
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.paper.evaluation.judge import Ask, judging
from benchmarks.paper.evaluation.suites import CLUSTERS, GROUPS, NEEDLE_FORMS, NEEDLES, Benchmark
from benchmarks.paper.tasks import ADDED, CHATS
from kvlingo_mlx.errors import MissingExtraError
from kvlingo_mlx.evaluation import compare, probes
from kvlingo_mlx.evaluation.compare import ALL, NATIVE, Outcome, Scored, Table
from kvlingo_mlx.evaluation.error_bars import Mean, over_clusters, over_items, over_sets
from kvlingo_mlx.evaluation.harness import benchmarks, running
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.evaluation.lineup import Condition
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import other_tokenizer

Progress = Callable[[str, int, int], None]
NOTHING = Mean(math.nan, math.nan, 0)


@dataclass(frozen=True)
class Settings:
    """What a user decides about a suite; the rest is the benchmark's.

    Attributes:
        thinking: Whether models reason; None leaves it to the template, with the budget of off.
        limit: At most so many records of a benchmark (needles: of each length), the first of those
            that are drawn. Each record comes with all its languages, turns or rungs.
        max_tokens: The most new tokens of an answer, in place of the benchmark's.
        lengths: Lengths of haystacks and of LongMemEval's rungs in tokens, in place of the
            benchmark's; the rung of the evidence alone stays.
        seed: The seed of needles and of MT-Bench-101's turns.
        haystack: A text that hides the needles.
        data: Local records by a task's name.
        prompts: A benchmark's own judge prompts by name, as for :func:`.judge.judge_answers`.
        more: Further options of :func:`.harness.running.run`.
    """

    thinking: bool | None = False
    limit: int | None = None
    max_tokens: int | None = None
    lengths: Sequence[int | str] | None = None
    seed: int = 0
    haystack: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def run(
    row: Benchmark,
    models: tuple[LanguageModel, LanguageModel],
    conditions: Sequence[Condition],
    settings: Settings = Settings(),
    *,
    journal: Journal | None = None,
    judge: Callable[[], Ask] | None = None,
    progress: Progress = lambda text, done, total: None,
) -> Outcome:
    """Ask a benchmark's questions under every condition.

    Args:
        row: The benchmark.
        models: The source and the target.
        conditions: Conditions with different names; the target's own cache is called "native".
        settings: What the user decides.
        journal: Keeps needles' scores; responses are kept by ``settings.more["responses"]``.
        judge: Makes the judge of free answers.
        progress: Called with a text, the number of requests done and the number known.

    Returns:
        The outcome: its tables hold the pooled score as "mean" and, where the benchmark has parts
        that are shown, each part. With a part to compare against ("en" of XQuAD), a metric ``did``
        tells how much more a condition loses elsewhere than there.

    Raises:
        ValueError: The benchmark needs a judge and has none, or its setting is odd.
        Exception: Any that :func:`.harness.running.run` raises.
    """
    if row.judged and judge is None:
        raise ValueError(f"a model judges the answers of {row.name}; give a judge")
    if row.task == NEEDLES:
        found = _needles(row, models, conditions, settings, journal or Journal(), progress)
    else:
        found = _harness(row, models, conditions, settings, judge, progress)
    return summarised(row, found)


def check(
    rows: Sequence[Benchmark], models: tuple[LanguageModel, LanguageModel], settings: Settings
) -> None:
    """Refuse, before any work, what one of the benchmarks would refuse when its turn comes.

    Raises:
        ValueError: A haystack does not fit into a model's context.
        Exception: Any that :func:`.harness.running.run` raises for its data.
    """
    for row in rows:
        if row.task == NEEDLES:
            asked = _asked(row, settings)
            context = min(model.context_length for model in models)
            probes.lengths_within(asked.lengths, context - asked.max_tokens)
        else:
            given = {name: file for name, file in settings.data.items() if name == row.task}
            facts = _metadata(row, settings)
            running.need_lm_eval()
            with running.quiet():
                running.loaded_tasks(
                    models[1], [row.task], None, ADDED, given, settings.seed, facts
                )


def _asked(row: Benchmark, settings: Settings) -> probes.TaskOptions:
    """RULER's needles: as many of each form, at every length."""
    tokens = settings.max_tokens or row.tokens(bool(settings.thinking))
    return probes.TaskOptions(
        limit=-(-_least(row.draw, settings.limit) // len(NEEDLE_FORMS)),
        seed=settings.seed,
        needles=NEEDLE_FORMS,
        lengths=[n for n in settings.lengths or row.lengths if isinstance(n, int)],
        haystack=settings.haystack,
        max_tokens=tokens or 1,
        thinking=bool(settings.thinking),
    )


def _needles(
    row: Benchmark,
    models: tuple[LanguageModel, LanguageModel],
    conditions: Sequence[Condition],
    settings: Settings,
    journal: Journal,
    progress: Progress,
) -> Outcome:
    task = probes.make(NEEDLES, *models, _asked(row, settings))
    done = 0

    def step(name: str) -> None:
        nonlocal done
        progress(row.title, done, len(task.items))
        done += 1

    results = compare.evaluate(models[1], [task], conditions, journal, step)
    found = compare.outcome(task, results[task.name])
    by_length = {
        name: [replace(item, group=item.group.rpartition(", ")[2]) for item in items]
        for name, items in found.items.items()
    }
    return replace(found, items=by_length)


def _metadata(row: Benchmark, settings: Settings) -> dict[str, Any]:
    """What the benchmark's task is told."""
    found = dict(settings.more.get("metadata", {}))
    drawn = _least(row.draw, settings.limit)
    if row.task in CHATS and drawn is not None:
        found["draw"] = drawn
    if row.lengths:
        named = [rung for rung in row.lengths if isinstance(rung, str)]
        found["rungs"] = [*named, *settings.lengths] if settings.lengths else list(row.lengths)
    return found


def _harness(
    row: Benchmark,
    models: tuple[LanguageModel, LanguageModel],
    conditions: Sequence[Condition],
    settings: Settings,
    judge: Callable[[], Ask] | None,
    progress: Progress,
) -> Outcome:
    found = benchmarks.evaluate(
        models[1],
        [row.task],
        conditions,
        judge=judging(judge, settings.prompts) if row.judged and judge else None,
        progress=lambda text, done, total: progress(f"{row.title}, {text}", done, total),
        limit=None if row.task in CHATS else _least(row.limit, settings.limit),
        seed=settings.seed,
        num_fewshot=row.shots,
        apply_chat_template=row.chat,
        enable_thinking=settings.thinking,
        max_gen_toks=settings.max_tokens or row.tokens(bool(settings.thinking)),
        source_tokenizer=other_tokenizer(*(model.tokenizer for model in models)),
        max_length=min(model.context_length for model in models),
        added=ADDED,
        data={name: file for name, file in settings.data.items() if name == row.task},
        metadata=_metadata(row, settings),
        **{key: value for key, value in settings.more.items() if key != "metadata"},
    )
    return found[0]


def _least(*numbers: int | None) -> Any:
    """The smallest number; None if there is none."""
    return min((number for number in numbers if number is not None), default=None)


def check_modules(rows: Sequence[Benchmark]) -> None:
    """Refuse a benchmark whose task needs a module that is not installed.

    Raises:
        MissingExtraError: The message says what to install.
    """
    for row in rows:
        missing = [name for name in row.needs if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingExtraError(
                f"{row.title} needs {' and '.join(missing)}: pip install {' '.join(missing)}, or "
                "name the benchmarks to run: --suite paper:NAME,NAME"
            )


# ---- one score ----------------------------------------------------------------------------


def summarised(row: Benchmark, found: Outcome) -> Outcome:
    """An outcome with the metrics, parts and pooled scores of the paper's tables."""
    metrics = tuple(m for m in row.metrics if m in found.metrics)
    missing = [m for m in row.metrics if m not in metrics]
    if missing:
        raise ValueError(f"{row.task} has no score {missing[0]!r}; it has {found.metrics}")
    tables = {
        name: _table(row, metrics, items, found.tables[name]) for name, items in found.items.items()
    }
    if row.against is not None and NATIVE in found.items:
        native = found.items[NATIVE]
        for name, items in found.items.items():
            same = name == NATIVE
            _compare(tables[name], None if same else items, native, metrics[0], row.against)
        metrics += ("did",)
    seeds = {
        name: [_of_seed(row, row.metrics, found.items[name], each, n) for n, each in enumerate(of)]
        for name, of in found.seeds.items()
    }
    return replace(found, task=row.name, metrics=metrics, tables=tables, seeds=seeds)


def _of_seed(
    row: Benchmark, metrics: Sequence[str], items: Sequence[Scored], given: Table, seed: int
) -> Table:
    """The table of one seed of a condition that has several."""
    own = [replace(item, scores=item.seeds[seed], seeds=()) for item in items]
    return _table(row, metrics, own, given)


def _table(row: Benchmark, metrics: Sequence[str], items: Sequence[Scored], given: Table) -> Table:
    parts: dict[str, list[Scored]] = {}
    for item in items:
        parts.setdefault(item.group, []).append(item)
    shown = {name: {m: pooled(CLUSTERS, p, m) for m in metrics} for name, p in parts.items()}
    whole = {m: pooled(row.pooled, items, m, given[ALL].get(m)) for m in metrics}
    return {**(shown if row.by_group else {}), ALL: whole}


def pooled(rule: str, items: Sequence[Scored], metric: str, given: Mean | None = None) -> Mean:
    """The mean of a metric over items by a benchmark's rule, with its standard error.

    Args:
        rule: ``items``, ``groups`` or ``clusters``, as :class:`.suites.Benchmark` has it.
        items: Every item's scores; those without this score do not count.
        metric: The score's name.
        given: lm-eval's own value where the score is no mean over items.
    """
    scored = [item for item in items if metric in item.scores]
    if not scored:
        return given or NOTHING
    scores = [item.scores[metric] for item in scored]
    if rule == CLUSTERS:
        return over_clusters(scores, [item.cluster for item in scored])
    if rule == GROUPS:
        parts: dict[str, list[float]] = {}
        for item in scored:
            parts.setdefault(item.group, []).append(item.scores[metric])
        return over_sets([over_items(part) for part in parts.values()])
    return over_items(scores)


def _compare(
    table: Table,
    items: Sequence[Scored] | None,
    native: Sequence[Scored],
    metric: str,
    against: str,
) -> None:
    """Add to a table how much more is lost in each part than in the part ``against``."""
    for part, means in table.items():
        if items is None or part == against:
            means["did"] = NOTHING
        else:
            others = None if part == ALL else part
            means["did"] = difference_in_differences(items, native, metric, against, others)


def difference_in_differences(
    items: Sequence[Scored],
    native: Sequence[Scored],
    metric: str,
    against: str,
    part: str | None = None,
) -> Mean:
    """How much better a condition does against native elsewhere than in the part ``against``.

    The paper's table names this score ("DiD") and gives no formula. Here it is, for each question,
    (condition - native) in ``part`` less (condition - native) in ``against``; without ``part``, the
    first difference is the mean over all other parts. The mean is over questions (clusters), whose
    parts are the same question, so its standard error is that of paired differences. Below zero,
    the condition loses more there than in ``against``.

    Args:
        items: The condition's items.
        native: The same items with the target's own cache.
        metric: The score that is compared.
        against: The part that the others are compared with, such as "en".
        part: One other part; all of them by default.
    """
    own = {item.item: item.scores.get(metric) for item in native}
    gained: dict[str, dict[str, float]] = {}
    for item in items:
        ours, theirs = item.scores.get(metric), own.get(item.item)
        if ours is not None and theirs is not None:
            gained.setdefault(item.cluster, {})[item.group] = ours - theirs
    differences = []
    for parts in gained.values():
        others = [gain for name, gain in parts.items() if name != against and part in (None, name)]
        if against in parts and others:
            differences.append(math.fsum(others) / len(others) - parts[against])
    return over_items(differences) if differences else NOTHING
