"""lm-eval's tasks with the prefix read by any condition: native, translated, a control.

A task's contexts are prefixes (appendix "Evaluation data"). The condition makes their caches; the
target scores or generates the continuations. It needs the ``[eval]`` extra.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlingo_mlx.errors import needs_extra
from kvlingo_mlx.evaluation.error_bars import Mean, over_items
from kvlingo_mlx.evaluation.harness import task_loading
from kvlingo_mlx.evaluation.journal import Responses
from kvlingo_mlx.reporting import measure

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.conditions import CacheMaker
    from kvlingo_mlx.evaluation.harness.adapter import PrefixLM
    from kvlingo_mlx.evaluation.harness.answers import Decoder
    from kvlingo_mlx.models.language_model import LanguageModel


def run(
    target: LanguageModel,
    make_cache: CacheMaker,
    tasks: Sequence[str],
    *,
    condition: str,
    source_tokenizer: Any = None,
    lm: Callable[..., PrefixLM] | None = None,
    decode: Callable[..., Decoder] | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    apply_chat_template: bool | None = None,
    enable_thinking: bool | None = None,
    max_gen_toks: int | None = None,
    max_length: int | None = None,
    include_path: str | Path | None = None,
    added: task_loading.AddedTasks = task_loading.NONE,
    data: Mapping[str, str | Path] | None = None,
    metadata: Mapping[str, Any] | None = None,
    responses: str | Path | None = None,
    unsafe_code: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluate one condition on tasks, groups or tags of lm-eval, of the caller's, or of the
    user's.

    Args:
        make_cache: The way prefixes are read, from :mod:`kvlingo_mlx.evaluation.conditions`.
        condition: All that ``make_cache`` depends on. Kept responses are identified by it.
        source_tokenizer: The source's tokenizer, if it is not the target's. A condition then gets
            each context as both models read it, each by its own template.
        lm, decode: Make lm-eval's view of a decoder, and a decoder; by default a ``PrefixLM`` of an
            ``MLXDecoder``.
        limit: Run only this number of items of each task.
        seed: Of few-shot examples and of a task's own random choices.
        num_fewshot: The number of examples shown; None leaves it to the task. One with 0 keeps 0.
        apply_chat_template: None applies a template if there is one, with examples as turns.
        max_length: The most tokens of a context and its scored continuation. Longer contexts lose
            their front.
        data: Local files in place of the Hub's data, by a task's name; for a task that lm-eval
            reads also a folder with a file for each split, which it needs to show examples.
        metadata: Passed to tasks that ask for it; ``tokenizer`` is the target's unless given.
        responses: A JSONL file that keeps every response immediately, for a later call.
        progress: Called with the number of responses there and the number known so far.

    Returns:
        ``tasks`` and ``groups``, as :func:`collect` has them.

    Raises:
        MissingExtraError: lm-eval, or a module that a task needs, is not installed.
        ValueError: A bad argument, or an unknown task (close matches are named).
        KVLingoError: A task's data cannot be fetched or read, or the model's output is not finite.
    """
    need_lm_eval()
    if isinstance(tasks, str) or not tasks:
        raise ValueError("no tasks; give a list of names such as ['gsm8k', 'arc_challenge']")
    from lm_eval.evaluator import evaluate

    from kvlingo_mlx.evaluation.harness.adapter import PrefixLM
    from kvlingo_mlx.evaluation.harness.contexts import Contexts
    from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder

    contexts = None
    if source_tokenizer is not None:
        contexts = Contexts(source_tokenizer, target.tokenizer, enable_thinking)
        make_cache = contexts.aligning(make_cache)
    model = (lm or PrefixLM)(
        (decode or MLXDecoder)(target, make_cache),
        condition=condition,
        use_chat_template=apply_chat_template,
        max_length=max_length,
        responses=Responses(responses),
        contexts=contexts,
        progress=progress,
        enable_thinking=enable_thinking,
        max_gen_toks=max_gen_toks,
    )
    files = {name: str(path) for name, path in (data or {}).items()}
    with quiet():
        loaded = loaded_tasks(target, tasks, include_path, added, files, seed, metadata)
        model.check_tasks(loaded["tasks"])
        examples = num_fewshot, seed, added.apart(files), unsafe_code
        task_loading.set_examples(loaded["tasks"], *examples)
        evaluated = evaluate(  # without its bootstrap, which starts processes: our errors are ours
            lm=model, task_dict=loaded, limit=limit, apply_chat_template=model.use_chat_template,
            fewshot_as_multiturn=True, bootstrap_iters=0, confirm_run_unsafe_code=unsafe_code,
        )  # fmt: skip
    return collect(model, loaded, evaluated)


def loaded_tasks(
    target: LanguageModel,
    tasks: Sequence[str],
    include_path: str | Path | None,
    added: task_loading.AddedTasks,
    files: Mapping[str, str],
    seed: int,
    metadata: Mapping[str, Any] | None,
) -> Any:
    """The tasks with their data; the target's tokenizer counts, unless another is named.

    Tasks draw from Python's and NumPy's generators, which begin with the seed here.
    """
    random.seed(seed)
    np.random.seed(seed)
    facts = {"tokenizer": str(target.path or target.name), **(metadata or {})}
    return task_loading.load_tasks(tasks, include_path, added, files, seed, facts)


def need_lm_eval() -> None:
    with needs_extra("eval", "these tasks need lm-eval"):
        import datasets  # noqa: F401
        import lm_eval  # noqa: F401


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval's warnings and progress bars; ``progress`` reports instead."""
    import datasets
    import lm_eval.api.task as noisy

    bar, hidden = noisy.tqdm, datasets.are_progress_bars_disabled()
    noisy.tqdm = partial(bar, disable=True)
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        noisy.tqdm = bar
        if not hidden:
            datasets.enable_progress_bars()


def collect(model: PrefixLM, loaded: Any, evaluated: Mapping[str, Any]) -> dict[str, Any]:
    """The result of ``lm_eval.evaluate`` as plain data: ``tasks``, and ``groups`` that it
    aggregates.

    A task has ``metrics`` (by name value, standard error and count; no error if the score is not a
    mean over items) and ``items``; a group has the weights of its tasks by metric. An item has its
    ``id``, ``prefix_tokens``, ``scores`` and raw ``responses``; in added tasks also their ``facts``
    and, where these hold ``to_judge``, ``answer`` (without reasoning). Metrics of a filter are
    "metric,filter".

    The errors are ours (appendix "Seeds and error bars"): lm-eval resamples where it need not.
    """
    tasks = {}
    for name, task in loaded["tasks"].items():
        items: dict[int, dict[str, Any]] = {}
        for sample in evaluated["samples"][name]:
            number = sample["doc_id"]
            item = items[number] = items.get(number) or _item(model, task, sample)
            for metric in sample["metrics"]:
                item["scores"][_name(metric, sample["filter"])] = plain(sample[metric])
        found = list(items.values())
        tasks[name] = {"metrics": _metrics(evaluated["results"][name], found), "items": found}
    groups = {
        name: _weights(loaded["groups"][name], values, tasks)
        for name, values in evaluated.get("groups", {}).items()
    }
    return {"tasks": tasks, "groups": groups}


def _item(model: PrefixLM, task: Any, sample: Mapping[str, Any]) -> dict[str, Any]:
    contexts = {arguments[0] for arguments in sample["arguments"]}
    alone = task.OUTPUT_TYPE == "loglikelihood_rolling"
    item = {
        "id": sample["doc_id"],
        "prefix_tokens": 0 if alone else max(len(model.tokens(c)) for c in contexts),
        "scores": {},
        "responses": [plain(response) for request in sample["resps"] for response in request],
    }
    if facts := getattr(task, "facts", None):  # which lm-eval's own tasks lack
        item |= facts(sample["doc"])
        if "to_judge" in item:
            item["answer"] = model.without_trace(sample["resps"][0][0])
    return item


def _scored(values: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's scores by our names, without its errors and lengths that it did not ask (-1)."""
    split = {key: key.partition(",") for key in values}
    return {
        _name(metric, kind): values[key]
        for key, (metric, comma, kind) in split.items()
        if comma and not metric.endswith("_stderr") and not (metric.isdigit() and values[key] == -1)
    }


def _metrics(values: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each score, with its standard error if it is the mean of its items' scores."""
    found = {}
    for name, value in _scored(values).items():
        scores = [item["scores"][name] for item in items if name in item["scores"]]
        mean = Mean(float(value), math.nan, len(scores))
        if scores and all(isinstance(score, float) for score in scores):
            own = over_items(scores)
            same = math.isclose(own.value, mean.value, rel_tol=1e-9, abs_tol=1e-12)
            mean = own if same else mean
        found[name] = measure.plain(mean)
    return found


def _weights(
    group: Any, values: Mapping[str, Any], tasks: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """By metric, the weights of the tasks that a group averages."""
    sized = {config.metric: config.weight_by_size for config in group.aggregate_metric_list}
    names = [task.task_name for task in group.get_all_tasks()]
    found = {}
    for metric in _scored(values):
        base = metric.partition(",")[0]
        if base in sized:
            counts = {n: tasks[n]["metrics"][metric]["count"] for n in names
                      if metric in tasks[n]["metrics"]}  # fmt: skip
            found[metric] = {n: count if sized[base] else 1 for n, count in counts.items()}
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
