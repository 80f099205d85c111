"""Scores of every condition on every item of every task, averaged with error bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.evaluation import lineup, probes
from kvlingo_mlx.evaluation.error_bars import Mean, over_clusters, over_tokens
from kvlingo_mlx.evaluation.journal import Journal, Scores, Seeds, averaged
from kvlingo_mlx.evaluation.lineup import Condition, identity_of
from kvlingo_mlx.evaluation.needles import prose
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.switching import switch_times
from kvlingo_mlx.version import __version__

NATIVE = "native"
ALL = "mean"


@dataclass(frozen=True)
class Scored:
    """One item's scores under one condition, averaged over seeds, and of each if several."""

    item: str
    group: str
    cluster: str
    scores: Scores
    seeds: Seeds = ()


Results = dict[str, dict[str, list[Scored]]]  # by task, then by condition


def evaluate(
    target: LanguageModel,
    questions: Sequence[Task],
    conditions: Sequence[Condition],
    journal: Journal,
    progress: Callable[[str], None] = lambda text: None,
) -> Results:
    """Score every condition on every item; scores in the journal are not computed again.

    Args:
        target: The model that decodes.
        questions: The tasks.
        conditions: Conditions with different names; the target's own cache is named ``NATIVE``.
        journal: Keeps each score as soon as it is known.
        progress: Called before each item.
    """
    results = Results()
    for task in questions:
        keys = {c.name: journal.run(_settings(target, task, c)) for c in conditions}
        found = list[dict[str, Seeds]]()
        for item in task.items:
            progress(task.name)
            found.append(_score(target, task, item, conditions, keys, journal))
        results[task.name] = {
            c.name: [
                _scored(item, each[c.name]) for item, each in zip(task.items, found, strict=True)
            ]
            for c in conditions
        }
    return results


def _named(item: probes.Item) -> str:
    """An item's name in a journal, which tells its content."""
    return f"{item.name} {probes.fingerprint(item)[:16]}"


def _scored(item: probes.Item, seeds: Seeds) -> Scored:
    several = seeds if len(seeds) > 1 else ()
    return Scored(item.name, item.group, item.cluster, averaged(seeds), several)


def _score(
    target: LanguageModel,
    task: Task,
    item: probes.Item,
    conditions: Sequence[Condition],
    keys: Mapping[str, str],
    journal: Journal,
) -> dict[str, Seeds]:
    """One item's scores by condition and seed; the target reads it only if a score is missing."""
    name = _named(item)
    kept: dict[str, Seeds] = {}
    score: probes.Scorer | None = None
    for condition in conditions:
        found = journal.find(keys[condition.name], name)
        if len(found) != len(condition.makers):
            score = score or task.scorer(target, item)
            own = condition.name == NATIVE
            found = tuple(score(None if own else make) for make in condition.makers)
            journal.keep(keys[condition.name], name, found)
            mx.clear_cache()
        kept[condition.name] = found
    return kept


def _settings(target: LanguageModel, task: Task, condition: Condition) -> dict:
    return {
        "kvlingo-mlx": __version__,
        "task": task.name,
        **task.settings,
        "target": identity_of(target),
        **condition.identity,
    }


Table = dict[str, dict[str, Mean]]  # by group, then by metric


@dataclass(frozen=True)
class Outcome:
    """The result of one task."""

    task: str
    metrics: tuple[str, ...]  # the metrics that its tables show, in order
    count: int  # the number of items
    prefix_tokens: int  # the median length of the items' prefixes
    tables: dict[str, Table]  # the tables, by condition
    items: dict[str, list[Scored]]  # every item's scores, by condition
    notes: tuple[str, ...] = ()  # remarks that a reader of the tables needs
    # A table for each seed, by condition, of conditions with several.
    seeds: Mapping[str, Sequence[Table]] = field(default_factory=dict)


def outcome(task: Task, scored: Mapping[str, list[Scored]]) -> Outcome:
    """Average a task's items under every condition."""
    tables = {name: summarise(task, found) for name, found in scored.items()}
    length = statistics.median_low([len(item.prefix) for item in task.items])
    seeds = {name: each for name, found in scored.items() if (each := _by_seed(task, found))}
    facts = task.name, task.metrics, len(task.items), length
    return Outcome(*facts, tables, dict(scored), task.notes, seeds)


def _by_seed(task: Task, scored: Sequence[Scored]) -> list[Table]:
    """The table of each seed alone; none where there is one seed."""
    count = min((len(each.seeds) for each in scored), default=0)
    alone = ([replace(s, scores=s.seeds[n], seeds=()) for s in scored] for n in range(count))
    return [summarise(task, each) for each in alone]


def alone(
    source: LanguageModel, task: Task, native: Sequence[Scored], journal: Journal
) -> list[Scored]:
    """The log loss of a source with the same tokenizer, beside that of the target's own cache."""
    condition = lineup.native(source)
    found = evaluate(source, [task], [condition], journal)[task.name][condition.name]
    return [
        replace(
            own,
            scores={
                "nll": own.scores["nll"],
                "gap": own.scores["nll"] - theirs.scores["nll"],
                "tokens": own.scores["tokens"],
            },
        )
        for own, theirs in zip(found, native, strict=True)
    ]


def summarise(task: Task, scored: Sequence[Scored]) -> Table:
    """A task's :func:`tabulated` scores."""
    return tabulated(task.metrics, scored)


def tabulated(metrics: Sequence[str], scored: Sequence[Scored]) -> Table:
    """Means over the items of each group, and over all items if there are several groups.

    Perplexity is computed over all tokens, and has no error bar; so is ``gap``, its logarithm less
    that of native, with an error. Items that lack a score do not count.
    """
    groups: dict[str, list[Scored]] = {}
    for entry in scored:
        groups.setdefault(entry.group, []).append(entry)
    if len(groups) > 1:
        groups[ALL] = list(scored)
    return {
        group: {metric: _over(metric, found) for metric in metrics}
        for group, found in groups.items()
    }


def _over(metric: str, found: Sequence[Scored]) -> Mean:
    if metric == "perplexity":
        return Mean(probes.perplexity([s.scores for s in found]), float("nan"), len(found))
    found = [entry for entry in found if metric in entry.scores]
    if not found:
        return Mean(math.nan, math.nan, 0)
    if metric == "gap":
        tokens = [entry.scores["tokens"] for entry in found]
        return over_tokens(
            [entry.scores[metric] for entry in found], tokens, [entry.cluster for entry in found]
        )
    return over_clusters([s.scores[metric] for s in found], [s.cluster for s in found])


def plain(tables: Mapping[str, Table]) -> dict:
    """A task's tables, by condition, as JSON values."""
    return {
        condition: {
            group: {metric: mean.as_json() for metric, mean in means.items()}
            for group, means in table.items()
        }
        for condition, table in tables.items()
    }


def found(outcomes: Sequence[Outcome], times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """All results as JSON values."""
    seeds = {
        o.task: {name: [plain({name: t})[name] for t in each] for name, each in o.seeds.items()}
        for o in outcomes
        if o.seeds
    }
    return {
        "means": {o.task: plain(o.tables) for o in outcomes},
        **({"seeds": seeds} if seeds else {}),
        "first_token_s": times,
        "items": {
            o.task: {name: [_facts(item) for item in items] for name, items in o.items.items()}
            for o in outcomes
        },
    }


def _facts(item: Scored) -> dict[str, Any]:
    return {name: value for name, value in vars(item).items() if value != ()}


def typical(questions: Sequence[Task]) -> probes.Item:
    """An item of median length, of tasks that have one at least."""
    items = sorted((item for task in questions for item in task.items), key=lambda i: len(i.prefix))
    return items[len(items) // 2]


def first_tokens(
    target: LanguageModel,
    conditions: Sequence[Condition],
    questions: Sequence[Task],
    outcomes: Sequence[Outcome],
    trials: int = 5,
) -> tuple[int, dict[str, list[float]]]:
    """Seconds to the first token at a switch, by condition, on an item of median length.

    The items of lm-eval are not available here, so generated prose of their length stands for them.
    The first element of the result is the length in tokens.
    """
    if any(task.items for task in questions):
        middle = typical(questions)
        prefix, read = middle.prefix, middle.read
    else:
        prefix = prose(target, statistics.median_low([o.prefix_tokens for o in outcomes]))
        read = prefix
    actions = {c.name: c.at_switch(read) for c in conditions if c.at_switch is not None}
    return len(prefix), switch_times(target, actions, prefix[-1], trials=trials)
