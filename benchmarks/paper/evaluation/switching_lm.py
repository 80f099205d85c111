"""lm-eval's view of a decoder whose cache changes hands at a point of :mod:`.points`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lm_eval.api.instance import Instance

from benchmarks.paper.evaluation.points import CONTEXT, POINTS, PROMPT, TRACE
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.harness.adapter import PrefixLM, RequestedAnswer
from kvlingo_mlx.evaluation.harness.answers import (
    Decoder,
    TextToWrite,
    WrittenAnswer,
    longest_first,
)
from kvlingo_mlx.evaluation.journal import key_of


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
        if point == CONTEXT:
            self._facts["point"] = point
            decoder.make_cache = partial(self._until_question, decoder.make_cache)
        self._questions: dict[str, int] = {}  # where they begin, by context
        self._begins: dict[tuple[int, ...], int] = {}  # the same within what is left of a context
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

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        self._find_questions(requests)
        return super().loglikelihood(requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self._find_questions(requests)
        return super().generate_until(requests)

    def _find_questions(self, requests: Sequence[Instance]) -> None:
        """Where questions begin; a token that reaches into one is the question's."""
        for request in requests if self.point == CONTEXT else ():
            context, mark = request.args[0], self.question_at[request.task_name or ""]
            place = context.rfind(mark)
            if place < 0:
                raise KVLingoError(
                    f"a prompt of {request.task_name} does not hold {mark!r}, before which its "
                    "question begins; leave out context"
                )
            before = self.tokens(context[:place])
            self._questions[context] = common_prefix(self.tokens(context), before)

    def last(self, context: str, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        found = super().last(context, tokens, most)
        if self.point == CONTEXT:
            begin = min(self._questions[context], len(tokens) - 1)
            self._begins[found] = max(0, begin - (len(tokens) - len(found)))
        return found

    def _until_question(self, make: Callable[..., Any], prefix: Sequence[int]) -> Any:
        """A cache in which the target reads the question itself."""
        begin = self._begins[tuple(prefix)]
        cache = make(prefix[: begin + 1])
        self.decoder.read_on(cache, prefix[begin:-1])
        return cache

    def before_answers(self, asked: Sequence[RequestedAnswer]) -> dict[str, list[int]]:
        """The source's reasoning on each prompt; it is kept like a response.

        A trace ends with its closing mark, at the budget, or where the context is full. A source
        that answers without reasoning leaves the prompt as it is.
        """
        if self.writer is None:
            return {}
        keys: dict[str, str] = {}
        missing: dict[str, tuple[TextToWrite, Trace]] = {}  # prompts may be the same
        for each in asked:
            prompt = self.prompt(each)
            most = min(each.most, self.max_length - len(prompt))
            key = keys[each.key] = key_of(self._traced, "trace", [each.context, most])
            if most > 0 and key not in self.responses:
                trace = Trace(self.writer.tokenizer, self.ends(each.context))
                missing[key] = TextToWrite(prompt, most, trace.take), trace
        writing = {wanted: (key, trace) for key, (wanted, trace) in missing.items()}
        for wanted in self.writer.write(longest_first(writing)):
            key, trace = writing[wanted]
            self.responses.add(key, trace.reasoning())
        return {k: self.responses[key] for k, key in keys.items() if key in self.responses}


class Trace(WrittenAnswer):
    """Reasoning that is being written for another model, which will write the answer."""

    _reasons = False  # whether the reasoning has begun

    def take(self, token: int) -> bool:
        """Add a token; returns whether it closes the reasoning, or shows that there is none."""
        tail = self._taken(token)
        self._reasons = self._reasons or self.ends.reasons(self.text)
        begins = self._reasons or self.ends.start.startswith(self.text.lstrip())
        return self.ends.end in tail or not begins

    def reasoning(self) -> list[int]:
        """The tokens of the reasoning; none if the model answered without."""
        return self.tokens if self._reasons else []
