"""lm-eval's results as plain data: means with standard errors, and every item's scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvlingo_mlx.evaluation.error_bars import Mean, over_items, over_sets
from kvlingo_mlx.evaluation.harness.adapter import PrefixLM

Means = dict[str, Mean]


def collect(model: PrefixLM, loaded: Any, evaluated: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tasks`` and ``groups`` of a result of ``lm_eval.evaluate``.

    The standard errors are ours (appendix "Seeds and error bars"): lm-eval resamples where it need
    not, and weights groups differently.
    """
    tasks, means = {}, {}
    for name, task in loaded["tasks"].items():
        items = _items(model, task, evaluated["samples"][name])
        means[name] = _means(evaluated["results"][name], items)
        tasks[name] = {
            "metrics": {metric: mean.as_json() for metric, mean in means[name].items()},
            "higher_is_better": evaluated["higher_is_better"][name],
            "num_fewshot": evaluated["n-shot"][name],
            "version": evaluated["versions"][name],
            "items": items,
        }
    groups = {
        name: _group(loaded["groups"][name], values, means)
        for name, values in evaluated.get("groups", {}).items()
    }
    return {"tasks": tasks, "groups": groups}


def _items(
    model: PrefixLM, task: Any, samples: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    items: dict[int, dict[str, Any]] = {}
    for sample in samples:
        if sample["doc_id"] not in items:
            items[sample["doc_id"]] = _item(model, task, sample)
        scores = items[sample["doc_id"]]["scores"]
        for metric in sample["metrics"]:
            scores[_name(metric, sample["filter"])] = plain(sample[metric])
    return list(items.values())


def _item(model: PrefixLM, task: Any, sample: Mapping[str, Any]) -> dict[str, Any]:
    document, contexts = sample["doc"], {arguments[0] for arguments in sample["arguments"]}
    facts = getattr(task, "facts", None)  # which lm-eval's own tasks lack
    alone = task.OUTPUT_TYPE == "loglikelihood_rolling"
    item = {
        "id": sample["doc_id"],
        "prefix_tokens": 0 if alone else max(len(model.tokens(c)) for c in contexts),
        "scores": {},
        "responses": [plain(response) for request in sample["resps"] for response in request],
    }
    if facts is not None:
        item |= facts(document)
        if "to_judge" in item:
            item["answer"] = model.without_trace(sample["resps"][0][0])
    return item


def _means(values: Mapping[str, Any], items: list[dict[str, Any]]) -> Means:
    """lm-eval's scores, with our errors where a score is the mean of its items' scores."""
    found = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        name = _name(metric, kind)
        scores = [item["scores"][name] for item in items if name in item["scores"]]
        found[name] = with_error(float(value), scores)
    return found


def with_error(value: float, scores: Sequence[Any]) -> Mean:
    """A task's score, with its standard error if it is the mean of its items' scores."""
    if scores and all(isinstance(score, float) for score in scores):
        own = over_items(scores)
        if math.isclose(own.value, value, rel_tol=1e-9, abs_tol=1e-12):
            return own
    return Mean(value, math.nan, len(scores))


def _group(group: Any, values: Mapping[str, Any], means: Mapping[str, Means]) -> dict[str, Any]:
    """A group's scores and, by metric, the weights of the tasks that they average."""
    found: dict[str, Any] = {"metrics": {}, "weights": {}}
    for config in group.aggregate_metric_list:
        for key in values:
            metric, comma, kind = key.partition(",")
            if not comma or metric != config.metric:
                continue
            name = _name(metric, kind)
            parts = {
                t.task_name: means[t.task_name][name]
                for t in group.get_all_tasks()
                if name in means[t.task_name]
            }
            weights = {t: part.count if config.weight_by_size else 1 for t, part in parts.items()}
            whole = over_sets(list(parts.values()), list(weights.values()))
            mean = Mean(float(values[key]), whole.error, whole.count)
            found["metrics"][name], found["weights"][name] = mean.as_json(), weights
    return found


def _name(metric: str, kind: str) -> str:
    """A metric's name, with its filter if it has one."""
    return metric if kind == "none" else f"{metric},{kind}"


def plain(value: Any) -> Any:
    """A score or response as JSON values: floats, text, lists; None for non-finite numbers."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value) if math.isfinite(value) else None
    return str(value)
