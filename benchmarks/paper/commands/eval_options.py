"""The options that the paper's ``eval`` has beside the package's, and their values' parsing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.paper.evaluation.suites import Benchmark, chosen
from benchmarks.paper.tasks import JUDGED
from kvlingo_mlx.cli import eval_options
from kvlingo_mlx.cli.command import words
from kvlingo_mlx.cli.eval_options import OWN, asks, drawn, public, written
from kvlingo_mlx.options import Kind, Need, among, is_set, off, option


def _asks(*names: str) -> Any:
    """A function that tells whether one of these tasks is asked for, by ``--tasks`` or a suite."""
    return lambda tasks, suite: any(name in names for name in _asked(tasks, suite))


def _asked(tasks: str, suite: str | None) -> list[str]:
    """The names of the tasks that are asked for; a suite takes the place of ``--tasks``."""
    return words(tasks) if suite is None else [row.task for row in _rows(suite)]


def _rows(suite: str) -> list[Benchmark]:
    """A suite's benchmarks; none if it is misspelt, which the command tells."""
    try:
        return list(chosen(suite))
    except ValueError:
        return []


def _lm_eval(tasks: str, suite: str | None) -> bool:
    """Whether lm-eval runs one of the tasks, or one of a suite's."""
    return public(tasks) if suite is None else any(row.task not in OWN for row in _rows(suite))


def _written(tasks: str, suite: str | None) -> bool:
    """Whether a model writes the answers of one of the tasks."""
    return written(tasks) if suite is None else any(row.budget for row in _rows(suite))


def _reasons(tasks: str, suite: str | None) -> bool:
    """Whether a chat template renders one of the prompts whose answers are written."""
    if suite is not None:
        return any(row.chat is not False for row in _rows(suite))
    return written(tasks)


def _held(turns: str | None) -> list[str]:
    """The benchmarks whose conversations are held, without their numbers of turns."""
    return [word.partition(":")[0] for word in words(turns or "")]


def _local(files: list[str] | None, tasks: str, suite: str | None, turns: str | None) -> bool:
    """Whether every NAME=FILE names one of the tasks."""
    asked = _asked(tasks, suite) if turns is None else _held(turns)
    return all(text.partition("=")[0] in asked for text in files or [])


def _or_turns(test: Callable[[str, str | None], bool]) -> Callable[..., bool]:
    """Whether conversations are held, or a test of the tasks holds."""
    return lambda tasks, suite, turns: is_set(turns) or test(tasks, suite)


def _judged(tasks: str, suite: str | None, turns: str | None) -> bool:
    """Whether a judge is asked about some answer."""
    asked = _asked(tasks, suite) if turns is None else _held(turns)
    return any(name in JUDGED for name in asked)


WINDOW = Kind(
    lambda text: bool(re.fullmatch(r"\s*0*[1-9]\d*\s*\+\s*0*[1-9]\d*\s*", text)),
    "two numbers of tokens: 256+64",
)


@dataclass(frozen=True, kw_only=True)
class PaperEvalOptions(eval_options.EvalFields):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("tasks suite compare seed data window needles lengths style haystack num_shots chat "
             "include_path metadata unsafe_code switch_at batch_size device", "turns", off,
             why="which asks conversations alone, on MLX"),
        Need("tasks data window needles style num_shots chat include_path metadata unsafe_code",
             "suite", off, why="which has its own"),
        Need("data", "tasks", asks("continuation"), "continuation"),
        Need("window", "tasks", asks("continuation"), "continuation"),
        Need("window", "data", is_set, "FILE", "whose texts it cuts"),
        Need("needles style", "tasks", asks("needles"), "needles"),
        Need("lengths", "tasks suite", _asks("needles", "longmemeval_rungs"), "needles"),
        Need("haystack", "tasks suite", _asks("needles"), "needles"),
        Need("max_tokens", "tasks suite turns", _or_turns(_written), "needles",
             "whose tasks write no answer"),
        Need("thinking", "tasks suite turns", _or_turns(_reasons), "needles",
             "whose tasks write no answer"),
        Need("compare quantize", "device", among("mlx"), "mlx", "which runs PyTorch"),
        Need("switch_at", "tasks suite", _written, "needles",
             "whose prompts are handed over whole"),
        Need("batch_size", "tasks suite", _lm_eval, "gsm8k", "which lm-eval does not run"),
        Need("num_shots chat include_path metadata unsafe_code", "tasks", public, "gsm8k",
             "which lm-eval does not run"),
        Need("task_data", "task_data tasks suite turns", _local,
             told="where it names no task of --tasks; name it there, or leave the file out"),
        Need("judge", "tasks suite turns", _judged, JUDGED[0], "whose answers need no judge"),
        Need("judge_prompts", "judge", is_set, "MODEL"),
        Need("seed", "data tasks", drawn, why="since the file's records are read in order"),
        Need("plot", "compare", is_set, True, "which measures the times that the plot shows"),
    )  # fmt: skip
    window: str | None = option(
        None, "Cut the texts of --data into windows of a prefix and a continuation: 256+64.",
        kind=WINDOW,
    )  # fmt: skip
    suite: str | None = option(
        None, "The paper's benchmarks: paper, base, or some of them: paper:ruler,xquad."
    )
    turns: str | None = option(
        None,
        "Instead of --tasks: coqa, quac or multichallenge, answered by both models in turn; coqa:J "
        "for J turns.",
    )
    baselines: str = option(
        "hidden,shuffled",
        "hidden, shuffled, canonical, reuse, droidspeak:J, text, folded; or none.",
    )
    compare: bool = option(False, "Also time each one's first token.", "--compare")
    plot: str | None = option(None, "Draw score against first-token time (with --compare).")
    switch_at: str = option(
        "prompt",
        "Where the cache changes hands: after the prompt, after its context, after a trace; "
        "prompt,context,trace compares them.",
    )
    device: str = option(
        "mlx", "Who decodes lm-eval's tasks: mlx; or PyTorch on cuda, cuda:N or cpu."
    )
    judge: str | None = option(None, "A model that judges free answers: a folder or Hub id.")
    judge_prompts: str | None = option(
        None, "The benchmarks' own judge prompts: a folder of texts, or a JSON file."
    )


def check_device(device: str, own: list[str], baselines: list[str]) -> None:
    """Refuse what PyTorch does not do.

    Raises:
        ValueError: There is no such device, or a task or a baseline is for MLX alone.
        MissingExtraError: PyTorch is not installed.
    """
    from kvlingo_mlx.training.command_line import checked_place, runtime_of

    if checked_place(device) == "mlx":
        return
    others = [name for name in baselines if name not in ("hidden", "shuffled")]
    for where, names in (("--tasks", own), ("--baselines", others)):
        if names:
            raise ValueError(
                f"--device {device} decodes lm-eval's tasks from native and translated caches "
                f"alone; take {', '.join(names)} out of {where}, or use --device mlx"
            )
    runtime_of(device).check_device(device)


def split_tasks(options: PaperEvalOptions) -> tuple[list[str], list[str]]:
    """Our own tasks, and the tasks that lm-eval runs; none of either where a suite is asked for.

    Raises:
        ValueError: As in the package, or answers need a judge and have none.
    """
    if options.suite is not None:
        return [], []
    own, others = eval_options.split_tasks(words(options.tasks))
    for name in others:
        if name in JUDGED and options.judge is None:
            raise ValueError(f"a model judges the answers of {name}; add --judge MODEL")
    return own, others


def points(text: str, thinking: bool) -> list[str]:
    """Where the cache changes hands, by ``--switch-at``; the words are checked later.

    Raises:
        ValueError: A trace is to be handed over, and thinking is off.
    """
    found = words(text)
    if "trace" in found and not thinking:
        raise ValueError(
            "--switch-at names trace, but without --thinking no reasoning is written; add "
            "--thinking, or take trace out"
        )
    return found


def turns(text: str) -> list[tuple[str, int | None]]:
    """The benchmarks of ``--turns``, each with the number of turns to use if it is given."""
    found = []
    for word in words(text):
        name, colon, number = word.partition(":")
        if colon and not (number.isdecimal() and int(number) > 0):
            raise ValueError(
                f"--turns names {word!r}; give {name}, or {name}:J with J of 1 or more"
            )
        found.append((name, int(number) if colon else None))
    if not found or len({name for name, _ in found}) < len(found):
        raise ValueError(f"--turns is {text!r}; give benchmarks, each once: coqa,quac")
    return found
