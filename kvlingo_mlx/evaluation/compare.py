"""Scores of every condition on every item of every task, averaged with error bars."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.evaluation import probes
from kvlingo_mlx.evaluation.error_bars import NOTHING, Mean, over_clusters
from kvlingo_mlx.evaluation.journal import Journal, Scores, Seeds, averaged
from kvlingo_mlx.evaluation.lineup import Condition, identity_of
from kvlingo_mlx.evaluation.probes import Item, Task
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
Table = dict[str, dict[str, Mean]]  # by group, then by metric


def evaluate(
    target: LanguageModel,
    tasks: Sequence[Task],
    conditions: Sequence[Condition],
    journal: Journal,
    progress: Callable[[str], None] = lambda text: None,
) -> Results:
    """Score every condition on every item; scores in the journal are not computed again.

    The condition of the target's own cache is named ``NATIVE``. ``progress`` is called before each
    item.
    """
    results, identity = Results(), identity_of(target)
    for task in tasks:
        own = {"kvlingo-mlx": __version__, "task": task.name, **task.settings, "target": identity}
        runs = {c.name: journal.run(own | c.identity, c.name, target.name) for c in conditions}
        found = results[task.name] = {c.name: [] for c in conditions}
        for item in task.items:
            progress(task.name)
            name = f"{item.name} {probes.fingerprint(item)[:16]}"
            scorer = cache(partial(task.scorer, target, item))  # it reads the item when called
            for c in conditions:
                key, makers = f"{runs[c.name]} {name}", (None,) if c.name == NATIVE else c.makers
                if key not in journal:
                    journal.add(key, [scorer()(make) for make in makers])
                    mx.clear_cache()
                seeds = tuple(map(dict, journal[key]))
                several = seeds if len(seeds) > 1 else ()
                place = item.name, item.group, item.cluster
                found[c.name].append(Scored(*place, averaged(seeds), several))
    return results


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
    tables = {name: tabulated(task.metrics, found) for name, found in scored.items()}
    length = statistics.median_low([len(item.prefix) for item in task.items])
    seeds = {}
    for name, found in scored.items():
        each = [[replace(s, scores=seed, seeds=()) for seed in s.seeds] for s in found]
        if each and each[0]:
            seeds[name] = [tabulated(task.metrics, one) for one in zip(*each, strict=True)]
    facts = task.name, task.metrics, len(task.items), length
    return Outcome(*facts, tables, dict(scored), task.notes, seeds)


def tabulated(metrics: Sequence[str], scored: Sequence[Scored]) -> Table:
    """Means over the items of each group, and over all items if there are several groups.

    Perplexity is computed over all tokens, and has no error bar. Items that lack a score do not
    count.
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
        return NOTHING
    return over_clusters([s.scores[metric] for s in found], [s.cluster for s in found])


def found(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All results as a record has them."""
    seeds = {o.task: o.seeds for o in outcomes if o.seeds}
    return {
        "means": {o.task: o.tables for o in outcomes},
        **({"seeds": seeds} if seeds else {}),
        "items": {
            o.task: {
                c: [{k: v for k, v in vars(item).items() if v != ()} for item in items]
                for c, items in o.items.items()
            }
            for o in outcomes
        },
    }


def typical(items: Sequence[Item]) -> Item:
    """An item of median length."""
    return sorted(items, key=lambda item: len(item.prefix))[len(items) // 2]


def first_tokens(
    target: LanguageModel, conditions: Sequence[Condition], task: Task, trials: int = 5
) -> dict[str, list[float]]:
    """Seconds to the first token at a switch, by condition, on an item of median length."""
    middle = typical(task.items)
    actions = {c.name: c.at_switch(middle.read) for c in conditions if c.at_switch is not None}
    return switch_times(target, actions, middle.prefix[-1], trials=trials)
