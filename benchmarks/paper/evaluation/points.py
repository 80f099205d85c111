"""Where the cache changes hands (appendix "Moving the switch point").

After the prompt, as everywhere else; before its question (``context``), which the target then reads
itself; or after a reasoning ``trace`` that the source has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lm_eval.api.instance import Instance

from benchmarks.paper.tasks import QUESTION_AT
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, read, target_ids
from kvlingo_mlx.evaluation.harness.adapter import PrefixLM, RequestedAnswer
from kvlingo_mlx.evaluation.harness.answers import Answer
from kvlingo_mlx.evaluation.harness.decoding import Decoder, Wanted, longest_first, shared_start
from kvlingo_mlx.evaluation.harness.responses import key_of
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
        question_at: As for :class:`SwitchingLM`.
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
    lm = partial(SwitchingLM, point=point, writer=writer, question_at=question_at)
    name = f"{condition.name}, {point}"
    return replace(
        condition, name=name, makers=makers, identity=identity, at_switch=None, translator=None,
        lm=lm,
    )  # fmt: skip


def _until_question(
    make: CacheMaker, target: LanguageModel, begins: Mapping[tuple[int, ...], int]
) -> CacheMaker:
    """Makes caches of our tasks' prefixes, in which the target reads the question itself."""

    def made(prefix: Prefix) -> list:
        tokens = tuple(target_ids(prefix))
        return read(make, target, tokens, begins[tokens]) if tokens in begins else make(prefix)

    return made


class SwitchingLM(PrefixLM):
    """:class:`PrefixLM` whose cache changes hands before a prompt's end, or after reasoning.

    Args:
        decoder: The target, with the condition.
        point: One of ``POINTS``.
        writer: The source, which writes the trace.
        question_at: By a task's name, the words with which the question of a context begins.
        more: As for :class:`PrefixLM`.

    Raises:
        ValueError: There is no such point, or a trace's source is not given or has no marks of
            reasoning.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        point: str = PROMPT,
        writer: Decoder | None = None,
        question_at: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(decoder, **more)
        if point not in POINTS:
            raise ValueError(f"the cache changes hands at {point!r}; give {', '.join(POINTS)}")
        writer = writer if point == TRACE else None
        if point == TRACE and writer is None:
            raise ValueError("the source writes the trace; give it as writer")
        if writer is not None and not writer.tokenizer.think_end:
            raise ValueError(
                f"{writer.name} has no marks of reasoning, so it writes no trace to hand over; "
                "leave out trace"
            )
        self.point, self.writer, self.question_at = point, writer, question_at or {}
        # Every condition is given the same traces.
        self._traced = {} if writer is None else {"source": writer.identity, **self.cutting}

    def check_tasks(self, tasks: Mapping[str, Any]) -> None:
        for name, task in tasks.items():
            if self.point == CONTEXT and name not in self.question_at:
                raise ValueError(
                    f"where the question of {name} begins is not known, so its context cannot be "
                    f"translated alone; known are {', '.join(self.question_at) or 'none'}; leave "
                    "out context"
                )
            if self.point == TRACE and task.OUTPUT_TYPE != "generate_until":
                raise ValueError(
                    f"{name} scores given answers, so no reasoning precedes them; leave out trace, "
                    "or take a task whose answers are written"
                )

    def begin(self, context: str, request: Instance) -> int | None:
        """Where the question begins; a token that reaches into it is the question's."""
        if self.point != CONTEXT:
            return None
        mark = self.question_at[request.task_name or ""]
        place = context.rfind(mark)
        if place < 0:
            raise KVLingoError(
                f"a prompt of {request.task_name} does not hold {mark!r}, before which its "
                "question begins; leave out context"
            )
        return shared_start(self.tokens(context), self.tokens(context[:place]))

    def before_answers(self, asked: Sequence[RequestedAnswer]) -> dict[str, list[int]]:
        """The source's reasoning on each prompt; it is kept like a response.

        A trace ends with its closing mark, at the budget, or where the context is full. A source
        that answers without reasoning leaves the prompt as it is.
        """
        if self.writer is None:
            return {}
        keys: dict[str, str] = {}
        missing: dict[str, tuple[Wanted, Trace]] = {}  # prompts may be the same
        for each in asked:
            prompt = self.prompt(each)
            most = min(each.most, self.max_length - len(prompt.tokens))
            key = keys[each.key] = key_of(self._traced, "trace", [each.context, most])
            if most > 0 and key not in self.responses:
                trace = Trace(self.writer.tokenizer, self.ends(each.context))
                missing[key] = Wanted(prompt, most, trace.take), trace
        writing = {wanted: (key, trace) for key, (wanted, trace) in missing.items()}
        for wanted in self.writer.write(longest_first(writing)):
            key, trace = writing[wanted]
            self.responses.add(key, trace.reasoning())
        return {k: self.responses[key] for k, key in keys.items() if key in self.responses}


class Trace(Answer):
    """Reasoning that is being written for another model, which will write the answer."""

    def take(self, token: int) -> bool:
        """Add a token; returns whether it closes the reasoning, or shows that there is none."""
        self._taken(token)
        start, begun = self.ends.start, self.text.lstrip() if not self._reasons else ""
        return self._closed or not (self._reasons or start.startswith(begun))

    def reasoning(self) -> list[int]:
        """The tokens of the reasoning; none if the model answered without."""
        return self.tokens if self._reasons else []
