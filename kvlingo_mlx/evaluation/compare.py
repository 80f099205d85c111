"""Scores of every condition on every item of every task, averaged with error bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.evaluation import probes
from kvlingo_mlx.evaluation.error_bars import Mean, over_clusters
from kvlingo_mlx.evaluation.journal import Journal, Scores
from kvlingo_mlx.evaluation.lineup import Condition, identity_of
from kvlingo_mlx.evaluation.needles import prose
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.paths import switch_times
from kvlingo_mlx.version import __version__

NATIVE = "native"
ALL = "mean"


@dataclass(frozen=True)
class Scored:
    """One item's scores under one condition, averaged over the condition's seeds."""

    item: str
    group: str
    cluster: str
    scores: Scores


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
    results: Results = {task.name: {c.name: [] for c in conditions} for task in questions}
    for task in questions:
        keys = {c.name: journal.run(_settings(target, task, c)) for c in conditions}
        for item in task.items:
            progress(task.name)
            for name, scores in _score(target, task, item, conditions, keys, journal).items():
                scored = Scored(item.name, item.group, item.cluster, scores)
                results[task.name][name].append(scored)
    return results


def _score(
    target: LanguageModel,
    task: Task,
    item: probes.Item,
    conditions: Sequence[Condition],
    keys: Mapping[str, str],
    journal: Journal,
) -> dict[str, Scores]:
    """One item's scores by condition; the target reads it only if a score is missing."""
    name = f"{item.name} {probes.fingerprint(item)[:16]}"
    kept: dict[str, Scores] = {}
    score: probes.Scorer | None = None
    for condition in conditions:
        found = journal.find(keys[condition.name], name)
        if found is None:
            score = score or task.scorer(target, item)
            own = condition.name == NATIVE
            found = _mean([score(None if own else make) for make in condition.makers])
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


def _mean(runs: Sequence[Scores]) -> Scores:
    """The mean of each score over seeds (appendix "Seeds and error bars")."""
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


Table = dict[str, dict[str, Mean]]  # by group, then by metric


@dataclass(frozen=True)
class Outcome:
    """The result of one task.

    Attributes:
        task: The task's name.
        metrics: The metrics that its tables show, in order.
        count: The number of items.
        prefix_tokens: The median length of the items' prefixes.
        tables: The tables, by condition.
        items: Every item's scores, by condition.
        notes: Remarks that a reader of the tables needs.
    """

    task: str
    metrics: tuple[str, ...]
    count: int
    prefix_tokens: int
    tables: dict[str, Table]
    items: dict[str, list[Scored]]
    notes: tuple[str, ...] = ()


def outcome(task: Task, scored: Mapping[str, list[Scored]]) -> Outcome:
    """Average a task's items under every condition."""
    tables = {name: summarise(task, found) for name, found in scored.items()}
    length = statistics.median_low([len(item.prefix) for item in task.items])
    return Outcome(task.name, task.metrics, len(task.items), length, tables, dict(scored))


def summarise(task: Task, scored: Sequence[Scored]) -> Table:
    """Means over the items of each group, and over all items if there are several groups.

    Perplexity is computed over all tokens, and has no error bar.
    """
    groups: dict[str, list[Scored]] = {}
    for entry in scored:
        groups.setdefault(entry.group, []).append(entry)
    if len(groups) > 1:
        groups[ALL] = list(scored)
    return {
        group: {metric: _over(metric, found) for metric in task.metrics}
        for group, found in groups.items()
    }


def _over(metric: str, found: Sequence[Scored]) -> Mean:
    if metric == "perplexity":
        return Mean(probes.perplexity([s.scores for s in found]), float("nan"), len(found))
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
    return {
        "means": {o.task: plain(o.tables) for o in outcomes},
        "first_token_s": times,
        "items": {
            o.task: {name: [vars(item) for item in items] for name, items in o.items.items()}
            for o in outcomes
        },
    }


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
    items = sorted((item for task in questions for item in task.items), key=lambda i: len(i.prefix))
    if items:
        middle = items[len(items) // 2]
        prefix, read = middle.prefix, middle.read
    else:
        prefix = prose(target, statistics.median_low([o.prefix_tokens for o in outcomes]))
        read = prefix
    actions = {c.name: c.at_switch(read) for c in conditions if c.at_switch is not None}
    return len(prefix), switch_times(target, actions, prefix[-1], trials=trials)
