"""lm-eval's tasks under every condition, as :mod:`compare` does for our own tasks."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvlingo_mlx.evaluation.compare import ALL, Outcome, Scored, Table
from kvlingo_mlx.evaluation.error_bars import NOTHING, Mean, over_items, over_sets
from kvlingo_mlx.evaluation.harness import running
from kvlingo_mlx.evaluation.lineup import Condition, identity_of
from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.models.language_model import LanguageModel

Progress = Callable[[str, int, int], None]
Run = dict[str, Any]  # the result of running.run, or one of its tasks
Judge = Callable[[Run, Callable[[int, int], None]], Run]


def evaluate(
    target: LanguageModel,
    tasks: Sequence[str],
    conditions: Sequence[Condition],
    *,
    judge: Callable[[], Judge] | None = None,
    progress: Progress = lambda text, done, total: None,
    **options: Any,
) -> list[Outcome]:
    """Run lm-eval's tasks under every condition; a condition's seeds are averaged item by item.

    Once all answers are there, ``judge`` makes what scores a run's free answers. ``options`` and
    errors are those of :func:`running.run`. There is one outcome per task, then one per group.
    """
    runs: dict[str, list[Run]] = {}
    # What tasks may refuse goes first, before hours have gone into the others.
    for condition in sorted(conditions, key=lambda each: each.lm is None):
        facts, tell = identity_of(target) | condition.identity, partial(progress, condition.name)
        options |= {"lm": condition.lm, "progress": tell}
        runs[condition.name] = [
            running.run(
                target, make, tasks, condition=canonical_json(facts | {"seed": seed}), **options
            )
            for seed, make in enumerate(condition.makers)
        ]
    runs = {condition.name: runs[condition.name] for condition in conditions}
    if judge is not None:
        judged = judge()
        for name, found in runs.items():
            tell = partial(progress, f"judging {name}")
            runs[name] = [judged(run, tell) for run in found]
    first = runs[conditions[0].name][0]
    outcomes = {}
    for name in first["tasks"]:
        seeds = {c: [run["tasks"][name] for run in found] for c, found in runs.items()}
        outcomes[name] = _outcome(name, seeds)
    groups = [_group(name, weights, outcomes) for name, weights in first["groups"].items()]
    return [*outcomes.values(), *groups]


def _outcome(name: str, runs: Mapping[str, Sequence[Run]]) -> Outcome:
    """The outcome of one task; ``runs`` has a result for each seed of each condition."""
    notes = tuple(
        f"{name}, {condition}: {failed} of the judge's replies are no verdict and do not count"
        for condition, found in runs.items()
        if (failed := sum(run.get("malformed", 0) for run in found))
    )
    items = {condition: _items(found) for condition, found in runs.items()}
    first = next(iter(runs.values()))[0]
    return Outcome(
        name,
        tuple(first["metrics"]),
        len(first["items"]),
        statistics.median_low([item["prefix_tokens"] for item in first["items"]]),
        {condition: _table(found, items[condition]) for condition, found in runs.items()},
        items,
        notes,
        {c: [_table([run], _items([run])) for run in each] for c, each in runs.items()
         if len(each) > 1},
    )  # fmt: skip


def _items(seeds: Sequence[Run]) -> list[Scored]:
    """Items with the averages of those scores that are numbers in every seed."""
    scored = []
    for same in zip(*(seed["items"] for seed in seeds), strict=True):
        each = [{m: s for m, s in item["scores"].items() if isinstance(s, float)} for item in same]
        shared = [metric for metric in each[0] if all(metric in scores for scores in each)]
        means = {m: math.fsum(scores[m] for scores in each) / len(each) for m in shared}
        first, name = same[0], str(same[0]["id"])
        place = name, first.get("subset", ALL), first.get("cluster", name)
        scored.append(Scored(*place, means, tuple(each) if len(each) > 1 else ()))
    return scored


def _table(seeds: Sequence[Run], items: Sequence[Scored]) -> Table:
    """Means over items where each seed's score is such a mean, else means over seeds."""
    means = {}
    for metric in seeds[0]["metrics"]:
        found = [seed["metrics"][metric] for seed in seeds]
        scores = [item.scores[metric] for item in items if metric in item.scores]
        values = [mean["value"] for mean in found]
        if None in values:
            means[metric] = NOTHING
        elif all(mean["error"] is not None or mean["count"] == 1 for mean in found) and scores:
            means[metric] = over_items(scores)
        else:
            means[metric] = Mean(math.fsum(values) / len(values), math.nan, len(items))
    return {ALL: means}


def _group(
    name: str, weights: Mapping[str, Mapping[str, float]], outcomes: Mapping[str, Outcome]
) -> Outcome:
    """The outcome of a group: a weighted mean over tasks, whose items are disjoint."""
    parts = {task: outcomes[task] for shares in weights.values() for task in shares}

    def pooled(tables: Mapping[str, Table]) -> Table:
        means = {
            metric: over_sets([tables[t][ALL][metric] for t in shares], list(shares.values()))
            for metric, shares in weights.items()
        }
        return {ALL: means}

    first = next(iter(parts.values()))
    tables = {c: pooled({task: o.tables[c] for task, o in parts.items()}) for c in first.tables}
    seeds = {
        c: [pooled({t: o.seeds[c][n] for t, o in parts.items()}) for n in range(len(each))]
        for c, each in first.seeds.items()
    }
    length = statistics.median_low([part.prefix_tokens for part in parts.values()])
    count = sum(part.count for part in parts.values())
    return Outcome(name, tuple(weights), count, length, tables, {}, seeds=seeds)
