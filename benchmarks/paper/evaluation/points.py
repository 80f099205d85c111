"""Where the cache changes hands (appendix "Moving the switch point").

After the prompt, as everywhere else; before its question (``context``), which the target then reads
itself; or after a reasoning ``trace`` that the source has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.paper.tasks import QUESTION_AT
from kvlingo_mlx.engine import hybrid
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, target_ids
from kvlingo_mlx.evaluation.harness.answers import Decoder
from kvlingo_mlx.evaluation.lineup import Condition, identity_of
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.loading.pairing import check_tokenizers
from kvlingo_mlx.models.language_model import LanguageModel

PROMPT, CONTEXT, TRACE = POINTS = ("prompt", "context", "trace")


def check_points(points: Sequence[str], source: LanguageModel, target: LanguageModel) -> None:
    """Refuse points of a prompt at which a cache cannot change hands.

    Raises:
        ValueError: One is unknown, or given for two tokenizers.
    """
    if not points or set(points) - set(POINTS):
        raise ValueError(
            f"--switch-at is {','.join(points)!r}; give one or more of {', '.join(POINTS)}"
        )
    if set(points) != {PROMPT}:
        check_tokenizers(source, target, "their caches change hands after the whole prompt alone")


def check_tasks(tasks: Sequence[Task], points: Sequence[str]) -> None:
    """Refuse points that a task of ours does not have.

    Raises:
        ValueError: The message names the task and what it has.
    """
    for point in set(points) - {PROMPT}:
        for task in tasks:
            if point == TRACE or any(item.question is None for item in task.items):
                raise ValueError(
                    f"{task.name} has no {point} after which a cache could change hands: take it "
                    f"out of --tasks, or {point} out of --switch-at (needles has a context, and "
                    "lm-eval's tasks whose answers are written a trace)"
                )


def moved(
    condition: Condition,
    point: str,
    models: tuple[LanguageModel, LanguageModel],
    writer: Decoder | None = None,
    tasks: Sequence[Task] = (),
    question_at: Mapping[str, str] = QUESTION_AT,
) -> Condition:
    """The same way to read, with the cache changing hands elsewhere.

    Args:
        condition: The way.
        point: One of ``POINTS``.
        models: The source and the target.
        writer: The source as a decoder, which writes the trace.
        tasks: Our own tasks, whose items say where their questions begin.
        question_at: As for :class:`~.switching_lm.SwitchingLM`.
    """
    if point == PROMPT:
        return condition
    source, target = models
    identity, makers = condition.identity | {"switch_at": point}, condition.makers
    if point == TRACE:
        identity["source"] = identity_of(source)
    begins = {i.prefix: i.question for task in tasks for i in task.items if i.question is not None}
    if point == CONTEXT and begins:
        makers = tuple(_until_question(make, target, begins) for make in makers)
    lm = partial(_switching, point=point, writer=writer, question_at=question_at)
    name = f"{condition.name}, {point}"
    return replace(
        condition, name=name, makers=makers, identity=identity, at_switch=None, translator=None,
        lm=lm,
    )  # fmt: skip


def _switching(*arguments: Any, **more: Any) -> Any:
    """lm-eval's view of a decoder; lm-eval may not be there, and is needed only now."""
    from benchmarks.paper.evaluation.switching_lm import SwitchingLM

    return SwitchingLM(*arguments, **more)


def _until_question(
    make: CacheMaker, target: LanguageModel, begins: Mapping[tuple[int, ...], int]
) -> CacheMaker:
    """Makes caches of our tasks' prefixes, in which the target reads the question itself."""

    def made(prefix: Prefix) -> list:
        tokens = tuple(target_ids(prefix))
        if tokens not in begins:
            return make(prefix)
        cache = make(list(tokens[: begins[tokens] + 1]))
        hybrid.read_layers(target, tokens[begins[tokens] : -1], cache)
        return cache

    return made
