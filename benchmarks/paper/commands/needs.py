"""Options of the paper's commands that need others to have an effect, as in the package's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from benchmarks.paper.commands.bench import BUDGET, HEALING
from benchmarks.paper.evaluation.suites import Benchmark, chosen
from benchmarks.paper.tasks import JUDGED
from kvlingo_mlx.cli import needs
from kvlingo_mlx.cli.eval_options import OWN, words
from kvlingo_mlx.cli.needs import asks, drawn, public, written
from kvlingo_mlx.options import Need, among, but, is_set, off


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


VERBS: dict[str, tuple[Need, ...]] = {
    "analyze": (
        Need("hidden epochs", "mlp", is_set, True),
    ),
    "eval": (
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
    ),
    "bench": (
        Need("source target translator geometry nu quantize prefill_step_size", "table_name",
             but(BUDGET), "moe-switch", "whose models, maps and cache are the paper's, random"),
        Need("quantize", "table_name", but(HEALING), "moe-switch",
             "which heals one prompt behind the maps as they are"),
        Need("batch_sizes", "table_name", among(BUDGET), BUDGET),
        Need("source target translator", "geometry", off, why="whose models and maps are random"),
        Need("layers precision", "geometry table_name",
             lambda geometry, table: is_set(geometry) or table == BUDGET,
             "qwen3-4b:qwen3-30b-a3b", "and models from a folder are as they are"),
        Need("decode_tokens", "table_name", among("moe-switch", "all", HEALING, BUDGET),
             "moe-switch", "which times no decoding"),
    ),
    "reproduce": (
        Need("labels tiny models translators data text task_data judge steps items seeds device",
             "listing", off, why="which makes nothing"),
    ),
}  # fmt: skip


class Checked(needs.Checked):
    """A command that refuses options without effect before it begins."""

    needs = VERBS
    keys: ClassVar[Mapping[str, str]] = {}  # none: every option of these is a flag
