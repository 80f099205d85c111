"""lm-eval's tasks with the prefix read by any condition: native, translated, a control.

A task's contexts are prefixes (appendix "Evaluation data"). The condition makes their caches; the
target scores or generates the continuations. It needs the ``[eval]`` extra.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlingo_mlx.errors import needs_extra
from kvlingo_mlx.evaluation.harness.added import NONE, AddedTasks
from kvlingo_mlx.evaluation.harness.responses import Responses

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.conditions import CacheMaker
    from kvlingo_mlx.evaluation.harness.adapter import PrefixLM
    from kvlingo_mlx.evaluation.harness.decoding import Decoder
    from kvlingo_mlx.models.language_model import LanguageModel

NOISY = ("lm_eval", "datasets", "huggingface_hub")


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
    items: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    apply_chat_template: bool | None = None,
    enable_thinking: bool | None = None,
    fewshot_as_multiturn: bool = True,
    system_instruction: str | None = None,
    max_gen_toks: int | None = None,
    max_length: int | None = None,
    include_path: str | Path | None = None,
    added: AddedTasks = NONE,
    data: Mapping[str, str | Path] | None = None,
    metadata: Mapping[str, Any] | None = None,
    responses: str | Path | None = None,
    unsafe_code: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Evaluate one condition on tasks of lm-eval, of the caller's, or of the user's.

    Args:
        target: The model that continues.
        make_cache: The way prefixes are read, from :mod:`kvlingo_mlx.evaluation.conditions`.
        tasks: Names of tasks, groups or tags.
        condition: A name for ``make_cache``. Kept responses are identified by it, so different ways
            of reading need different names: put a translator's digest into it.
        source_tokenizer: The source's tokenizer, if it is not the target's. A condition then gets
            each context as both models read it, each by its own template.
        lm: Makes lm-eval's view of the decoder; by default a
            :class:`~kvlingo_mlx.evaluation.harness.adapter.PrefixLM`.
        decode: Makes a decoder of the target and ``make_cache``; by default an
            :class:`~kvlingo_mlx.evaluation.harness.on_mlx.MLXDecoder`, which writes 8 answers at
            once.
        limit: Run only this number of items of each task.
        items: Run only these items (numbers from 0) of the tasks named; not with ``limit``.
        seed: The seed of few-shot examples and of a task's own random choices.
        num_fewshot: The number of examples shown; None leaves it to the task. A task with 0 keeps
            0.
        apply_chat_template: None applies a template if the tokenizer has one.
        enable_thinking: The template's reasoning switch; None leaves it to the template.
        fewshot_as_multiturn: Show examples as turns of the chat, not as one message.
        system_instruction: A system message for every item.
        max_gen_toks: The most tokens of a generated answer; None leaves it to the task.
        max_length: The most tokens of a context (and its scored continuation), by default the
            target's context length. Longer contexts lose their front. Give less if the model that
            reads the prefix has a shorter context.
        include_path: A folder of further task files.
        added: Tasks of the caller's.
        data: Local files in place of the Hub's data, by a task's name; for a task that lm-eval
            reads also a folder with a file for each split, which it needs to show examples.
        metadata: Passed to tasks that ask for it, such as RULER's ``max_seq_lengths``, and what
            ``added.settings`` names. ``tokenizer`` is the target's unless given.
        responses: A JSONL file that keeps every response immediately. A later call with the same
            file skips those requests, whether the first call finished or was interrupted.
        unsafe_code: Allow tasks that run code written by the model.
        progress: Called with the number of requests done and the number known so far.

    Returns:
        Plain data for JSON: ``condition``, ``target``, ``settings``, ``tasks`` and, where lm-eval
        aggregates, ``groups``. A task has ``metrics`` (name to value, standard error over items and
        count; the error is None if the score is not a mean over items), ``higher_is_better``,
        ``num_fewshot``, ``version`` and ``items``. A group has ``metrics`` and, by metric, the
        ``weights`` of its tasks. An item has its ``id``, ``prefix_tokens``, ``scores`` by metric
        and raw ``responses``; in added tasks it also has their ``facts`` and, where these hold
        ``to_judge``, ``answer`` (without reasoning). Metrics of a named filter are called
        "metric,filter", as in lm-eval.

    Raises:
        MissingExtraError: lm-eval, or a module that a task needs, is not installed.
        ValueError: A bad argument, or an unknown task (close matches are named).
        KVLingoError: A task's data cannot be fetched or read, or the model's output is not finite.
    """
    _check(tasks, condition, limit, items)
    from kvlingo_mlx.evaluation.harness import adapter
    from kvlingo_mlx.evaluation.harness.results import collect

    answers: dict[str, Any] = {"enable_thinking": enable_thinking, "max_gen_toks": max_gen_toks}
    contexts, read = _contexts(source_tokenizer, target, enable_thinking, make_cache)
    model = (lm or adapter.PrefixLM)(
        (decode or _on_mlx())(target, read),
        condition=condition,
        use_chat_template=apply_chat_template,
        max_length=max_length,
        responses=Responses(None if responses is None else Path(responses)),
        contexts=contexts,
        progress=progress,
        **answers,
    )
    files = {name: str(path) for name, path in (data or {}).items()}
    with _quiet(), _seeded(seed):
        loaded = _loaded(target, tasks, include_path, added, files, seed, metadata)
        model.check_tasks(loaded["tasks"])
        chosen = _check_tasks(loaded["tasks"], items or {}, unsafe_code) or None
        _set_examples(loaded["tasks"], num_fewshot, seed, added.apart(files))
        asked: dict[str, Any] = {"limit": limit, "system_instruction": system_instruction}
        asked["apply_chat_template"] = model.use_chat_template
        asked["fewshot_as_multiturn"] = fewshot_as_multiturn
        evaluated = _evaluated(model, loaded, chosen, unsafe_code, **asked)
    examples = {"items": chosen, "seed": seed, "num_fewshot": num_fewshot}
    where = {"data": files, "max_length": model.max_length}
    named: dict[str, Any] = {"condition": condition, "target": target.name}
    named["settings"] = asked | answers | examples | where
    return named | collect(model, loaded, evaluated)


def check_data(
    target: LanguageModel,
    task: str,
    *,
    seed: int = 0,
    added: AddedTasks = NONE,
    data: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Load a task's data and do nothing with them, so that what is missing is told at once.

    Raises:
        MissingExtraError, ValueError, KVLingoError: As in :func:`run`.
    """
    _need_lm_eval()
    with _quiet(), _seeded(seed):
        _loaded(target, [task], None, added, data or {}, seed, metadata)


def _contexts(
    source: Any, target: LanguageModel, thinking: bool | None, make_cache: CacheMaker
) -> tuple[Any, CacheMaker]:
    """What remembers contexts, and a condition that gets them as both models read them.

    With one tokenizer (``source`` is None) nothing is remembered.
    """
    from kvlingo_mlx.evaluation.harness.contexts import Contexts

    if source is None:
        return None, make_cache
    switch = {} if thinking is None else {"enable_thinking": thinking}
    contexts = Contexts(source, target.tokenizer, **switch)
    return contexts, contexts.aligning(make_cache)


def _loaded(
    target: LanguageModel,
    tasks: Sequence[str],
    include_path: str | Path | None,
    added: AddedTasks,
    files: Mapping[str, str],
    seed: int,
    metadata: Mapping[str, Any] | None,
) -> Any:
    """The tasks with their data; the target's tokenizer counts, unless told otherwise."""
    from kvlingo_mlx.evaluation.harness.task_loading import load_tasks

    facts = {"tokenizer": str(target.path or target.name), **(metadata or {})}
    return load_tasks(tasks, include_path, added, files, seed, facts)


def _on_mlx() -> Callable[..., Decoder]:
    from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder

    return MLXDecoder


def _evaluated(
    model: Any, loaded: Mapping[str, Any], chosen: Any, unsafe_code: bool, **options: Any
) -> Any:
    """lm-eval's results without its bootstrap, which starts processes; we add our own errors."""
    from lm_eval.evaluator import evaluate

    options |= {"samples": chosen, "confirm_run_unsafe_code": unsafe_code}
    return evaluate(lm=model, task_dict=loaded, bootstrap_iters=0, **options)


def _need_lm_eval() -> None:
    with needs_extra("eval", "these tasks need lm-eval"):
        import datasets  # noqa: F401
        import lm_eval  # noqa: F401


def _check(
    tasks: Sequence[str],
    condition: str,
    limit: int | None,
    items: Mapping[str, Sequence[int]] | None,
) -> None:
    _need_lm_eval()
    if isinstance(tasks, str) or not tasks:
        raise ValueError("no tasks; give a list of names such as ['gsm8k', 'arc_challenge']")
    if not condition:
        raise ValueError("condition is empty; say how the prefix is read")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    if limit is not None and items:
        raise ValueError("give either limit or items")


def _check_tasks(
    tasks: Mapping[str, Any], items: Mapping[str, Sequence[int]], unsafe_code: bool
) -> dict[str, list[int]]:
    """The chosen items of each task, in order."""
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not unsafe_code:
            raise ValueError(f"the task {name} runs code that the model wrote; allow it explicitly")
    for name, numbers in items.items():
        if name not in tasks:
            raise ValueError(f"items of {name} are named, but the tasks are {', '.join(tasks)}")
        count = len(tasks[name].eval_docs)
        wrong = [number for number in numbers if not 0 <= number < count]
        if wrong or not numbers:
            raise ValueError(f"items of {name} are 0 to {count - 1}; {wrong or 'none'} are named")
    return {name: sorted(set(numbers)) for name, numbers in items.items()}


def _set_examples(
    tasks: Mapping[str, Any], num_fewshot: int | None, seed: int, files: Mapping[str, str]
) -> None:
    """Set the number of examples as lm-eval's own command line does."""
    from kvlingo_mlx.evaluation.harness.task_loading import check_examples

    for task in tasks.values():
        default = task.get_config("num_fewshot")
        if num_fewshot is not None and default != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
    check_examples(tasks, files)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's generators, from which tasks draw, and restore them afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval's warnings and progress bars; ``progress`` reports instead."""
    import datasets
    import lm_eval.api.task as noisy

    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    bar, bars = noisy.tqdm, datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    noisy.tqdm = partial(bar, disable=True)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        noisy.tqdm = bar
        if not bars:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
