"""lm-eval's tasks under every condition, as :mod:`compare` does for our own tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvlingo_mlx.evaluation.compare import ALL, Outcome, Scored, Table
from kvlingo_mlx.evaluation.error_bars import Mean, over_items, over_sets
from kvlingo_mlx.evaluation.harness import running
from kvlingo_mlx.evaluation.lineup import Condition, identity_of
from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.models.language_model import LanguageModel

Progress = Callable[[str, int, int], None]
Run = dict[str, Any]  # the result of running.run
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
    """Run tasks under every condition; a condition's seeds are averaged item by item.

    Args:
        target: The model that decodes.
        tasks: Names of lm-eval's tasks or groups, or of added ones.
        conditions: Conditions with different names.
        judge: Makes what scores a run's free answers and calls its second argument with the
            numbers of those that are judged and of all; called once all answers are there.
        progress: Called with a text, the number of requests done and the number known.
        options: Options of :func:`running.run`.

    Returns:
        One outcome per task, then one per group.

    Raises:
        Exception: Any that :func:`running.run` raises.
    """
    runs: dict[str, list[Run]] = {}
    # What tasks may refuse goes first, before hours have gone into the others.
    for condition in sorted(conditions, key=lambda each: each.lm is None):
        facts = identity_of(target) | condition.identity
        runs[condition.name] = [
            running.run(
                target,
                make,
                tasks,
                condition=canonical_json(facts | {"seed": seed}),
                lm=condition.lm,
                progress=partial(progress, condition.name),
                **options,
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
    groups = [_group(name, group["weights"], outcomes) for name, group in first["groups"].items()]
    return [*outcomes.values(), *groups]


def _outcome(name: str, runs: Mapping[str, Sequence[Run]]) -> Outcome:
    """The outcome of one task; ``runs`` has a result for each seed of each condition."""
    items = {condition: _items(found) for condition, found in runs.items()}
    tables = {condition: _table(found, items[condition]) for condition, found in runs.items()}
    notes = tuple(
        f"{name}, {condition}: {failed} of the judge's replies are no verdict and do not count"
        for condition, found in runs.items()
        if (failed := sum(run.get("malformed", 0) for run in found))
    )
    first = next(iter(runs.values()))[0]
    length = statistics.median_low([item["prefix_tokens"] for item in first["items"]])
    count, metrics = len(first["items"]), tuple(first["metrics"])
    seeds = {c: [_table([run], _items([run])) for run in each] for c, each in runs.items()}
    several = {condition: each for condition, each in seeds.items() if len(each) > 1}
    return Outcome(name, metrics, count, length, tables, items, notes, several)


def _items(seeds: Sequence[Run]) -> list[Scored]:
    """Items with the averages of those scores that are numbers in every seed."""
    scored = []
    for same in zip(*(seed["items"] for seed in seeds), strict=True):
        first = same[0]
        scores = {
            metric: math.fsum(item["scores"][metric] for item in same) / len(same)
            for metric in first["scores"]
            if all(isinstance(item["scores"].get(metric), float) for item in same)
        }
        name = str(first["id"])
        place = name, first.get("subset", ALL), first.get("cluster", name)
        each = tuple(_numbers(item["scores"]) for item in same) if len(same) > 1 else ()
        scored.append(Scored(*place, scores, each))
    return scored


def _numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    return {metric: score for metric, score in scores.items() if isinstance(score, float)}


def _table(seeds: Sequence[Run], items: Sequence[Scored]) -> Table:
    """Means over items where each seed's score is such a mean, else means over seeds."""
    means = {}
    for metric in seeds[0]["metrics"]:
        found = [seed["metrics"][metric] for seed in seeds]
        scores = [item.scores[metric] for item in items if metric in item.scores]
        values = [mean["value"] for mean in found]
        if None in values:
            means[metric] = Mean(math.nan, math.nan, 0)
        elif all(mean["error"] is not None or mean["count"] == 1 for mean in found) and scores:
            means[metric] = over_items(scores)
        else:
            means[metric] = Mean(math.fsum(values) / len(values), math.nan, len(items))
    return {ALL: means}


def _group(
    name: str, weights: Mapping[str, Mapping[str, float]], outcomes: Mapping[str, Outcome]
) -> Outcome:
    """The outcome of a group: a weighted mean over tasks, whose items are disjoint."""

    def pooled(table_of: Callable[[Outcome], Table]) -> Table:
        return {
            ALL: {
                metric: over_sets(
                    [table_of(outcomes[task])[ALL][metric] for task in shares],
                    list(shares.values()),
                )
                for metric, shares in weights.items()
            }
        }

    first = next(iter(outcomes.values()))
    tables = {c: pooled(lambda o, c=c: o.tables[c]) for c in first.tables}  # type: ignore[misc]
    seeds = {
        c: [pooled(lambda o, c=c, n=n: o.seeds[c][n]) for n in range(len(each))]  # type: ignore[misc]
        for c, each in first.seeds.items()
    }
    parts = [outcomes[task] for task in {task for shares in weights.values() for task in shares}]
    length = statistics.median_low([part.prefix_tokens for part in parts])
    count = sum(part.count for part in parts)
    return Outcome(name, tuple(weights), count, length, tables, {}, seeds=seeds)
