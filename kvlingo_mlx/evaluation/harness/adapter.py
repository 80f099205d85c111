"""lm-eval's view of a model whose prompts any condition may read.

With the native condition, or an identity translator, it gives the results of
``mlx_lm.evaluate.MLXLM``. It needs the ``[eval]`` extra;
:mod:`kvlingo_mlx.evaluation.harness.running` checks for it. It imports no MLX: a
:class:`~kvlingo_mlx.evaluation.harness.decoding.Decoder` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.harness.answers import Answer, Ends, Trace
from kvlingo_mlx.evaluation.harness.decoding import (
    CONTEXT,
    POINTS,
    PROMPT,
    TRACE,
    Decoder,
    Reading,
    Wanted,
    shared_start,
)
from kvlingo_mlx.evaluation.harness.responses import Responses, key_of
from kvlingo_mlx.evaluation.lines import group

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.harness.contexts import Contexts

Progress = Callable[[int, int], None]
DEFAULT_MAX_TOKENS = 8192  # MLXLM's, for a task that sets no budget
BLOCK = 32  # answers that a rank writes before the ranks exchange theirs


@dataclass
class Asked:
    """An answer that a task asks for.

    Attributes:
        key: The key of its response.
        context: The prompt.
        options: lm-eval's options of the generation.
        begin: The token at which the question begins; None where the whole prompt is handed over.
        count: The number of requests that it answers.
    """

    key: str
    context: str
    options: dict[str, Any]
    begin: int | None = None
    count: int = 0

    @property
    def most(self) -> int:
        """The most tokens of the answer, and of a reasoning trace that precedes it."""
        return self.options.get("max_gen_toks") or DEFAULT_MAX_TOKENS


class PrefixLM(LM):
    """A target whose requests' contexts are read by a condition instead of by itself.

    A request's context is the prefix. The condition makes the cache of all its tokens but the last;
    the target runs the last token and the rest. Decoding is always greedy, whatever a task asks
    for. ``loglikelihood_rolling`` has no context to translate: the target scores the text alone,
    and every condition gets the same number.

    Args:
        decoder: The target, with the condition.
        point: Where the cache changes hands (appendix "Moving the switch point"): after the
            ``prompt``; before its question (``context``), which the target then reads itself; or
            after a reasoning ``trace`` of the source.
        writer: The source, which writes the trace.
        question_at: By a task's name, the words with which the question of a ``context`` begins.
        condition, enable_thinking, max_gen_toks, max_length, progress: As for
            :func:`~kvlingo_mlx.evaluation.harness.running.run`.
        use_chat_template: Whether contexts contain the special tokens of a chat template; None
            means that they do if the tokenizer has one.
        responses: Keeps the responses; in memory by default.
        contexts: Is told what is rendered and cut, between two tokenizers.

    Raises:
        ValueError: There is no chat template to use, a number is not positive, there is no such
            point, or a trace's source is not given or has no marks of reasoning.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        condition: str,
        point: str = PROMPT,
        writer: Decoder | None = None,
        question_at: Mapping[str, str] | None = None,
        use_chat_template: bool | None = None,
        enable_thinking: bool | None = None,
        max_gen_toks: int | None = None,
        max_length: int | None = None,
        responses: Responses | None = None,
        contexts: Contexts | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        super().__init__()
        self.decoder, self.point, self.writer, self.progress = decoder, point, writer, progress
        self.tokenizer, self.question_at = decoder.tokenizer, question_at or {}
        self.max_length = max_length or decoder.context_length
        if use_chat_template is None:
            use_chat_template = self.tokenizer.has_chat_template
        if use_chat_template and not self.tokenizer.has_chat_template:
            raise ValueError(f"{decoder.name} has no chat template; run tasks without it")
        for name, number in (("max_gen_toks", max_gen_toks), ("max_length", max_length)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        if point not in POINTS:
            raise ValueError(f"the cache changes hands at {point!r}; give {', '.join(POINTS)}")
        if point == TRACE and writer is None:
            raise ValueError("the source writes the trace; give it as writer")
        if writer is not None and not writer.tokenizer.think_end:
            raise ValueError(
                f"{writer.name} has no marks of reasoning, so it writes no trace to hand over; "
                "leave out trace"
            )
        self.use_chat_template = use_chat_template
        self._budget = {} if max_gen_toks is None else {"max_gen_toks": max_gen_toks}
        self._switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.responses, self.contexts = responses or Responses(), contexts
        shared = {"max_length": self.max_length, "special_tokens": not use_chat_template}
        self._facts = {"condition": condition, "target": decoder.identity, **shared}
        # Every condition is given the same traces.
        self._traced = {} if writer is None else {"source": writer.identity, **shared}
        self._done = self._total = 0

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer, which lm-eval asks for."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the target's own template renders it.

        Raises:
            KVLingoError: The template does not take these messages.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._switch,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise KVLingoError(
                f"the chat template of {self.decoder.name} does not take a task's messages "
                f"({error}); run the task without it"
            ) from None
        if self.contexts is not None:
            self.contexts.rendered(text, chat_history, add_generation_prompt)
        return text

    # ---- log-likelihoods -----------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding gives it.

        Continuations of one context share its cache. A context that is cut away completely scores
        minus infinity, as in MLXLM.
        """
        groups: dict[tuple[str, int | None], list[int]] = {}
        for index, request in enumerate(requests):
            context = request.args[0]
            groups.setdefault((context, self._question(context, request)), []).append(index)
        self._total += len(requests)
        asked = {
            indices[0]: (context, [requests[i].args[1] for i in indices], *_given(begin))
            for (context, begin), indices in groups.items()
        }
        counts = {indices[0]: len(indices) for indices in groups.values()}
        responses = self._respond("loglikelihood", self._score, asked, counts)
        scored: list[Any] = [None] * len(requests)
        for indices in groups.values():
            for index, (score, greedy) in zip(indices, responses[indices[0]], strict=True):
                scored[index] = (score, greedy)
        return scored

    def _score(
        self, context: str, continuations: Sequence[str], begin: int | None = None
    ) -> list[tuple[float, bool]]:
        prefix = self._tokens(context)
        sequences = [self._tokens(context + c) for c in continuations]
        following = [sequence[len(prefix) :] for sequence in sequences]
        for tokens, text in zip(following, continuations, strict=True):
            if not tokens:
                raise KVLingoError(f"the continuation {text!r} adds no token to its context")
        excess = max(0, max(len(s) for s in sequences) - self.max_length - 1)
        if excess >= len(prefix):
            return [(-float("inf"), False)] * len(continuations)
        reading = Reading.of(prefix, len(prefix) - excess, begin)
        found = self.decoder.score(reading, following)
        return [(float(np.float32(score)), greedy) for score, greedy in found]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-likelihood of each text after its first token, by the target alone."""
        self._total += len(requests)
        asked = {number: (request.args[0],) for number, request in enumerate(requests)}
        found = self._respond("loglikelihood_rolling", self._score_alone, asked, {})
        return [found[number] for number in asked]

    def _score_alone(self, text: str) -> float:
        tokens = self._tokens(text)
        return 0.0 if len(tokens) < 2 else self.decoder.score_alone(tokens)

    # ---- generation ----------------------------------------------------------------------

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy continuations up to a stop string, the end of the turn or ``max_gen_toks``.

        A finished reasoning trace is dropped, and stop strings count only after it. MLXLM looks for
        them in the trace, too, and then has no answer. Each response is kept as soon as it is done.
        """
        asked = [self._asked(request) for request in requests]
        wanted: dict[str, Asked] = {}
        for each in asked:
            wanted.setdefault(each.key, each).count += 1
        self._total += len(requests)
        self._advance(sum(each.count for key, each in wanted.items() if key in self.responses))
        missing = [each for key, each in wanted.items() if key not in self.responses]
        for block in self._blocks(missing):
            own = block[group().rank :: group().size]
            for each, text in self._answers(own):
                self.responses.add(each.key, text)
                self._advance(each.count)
            self.responses.exchange()
            self._advance(sum(each.count for each in block) - sum(each.count for each in own))
        return [self.responses[each.key] for each in asked]

    def _blocks(self, asked: list[Asked]) -> list[list[Asked]]:
        """What is answered before ranks tell one another: of like length; alone all at once."""
        if (size := group().size) == 1:
            return [asked]
        asked = sorted(asked, key=lambda each: -len(each.context))
        return [asked[n : n + BLOCK * size] for n in range(0, len(asked), BLOCK * size)]

    def _asked(self, request: Instance) -> Asked:
        context, options = request.args[0], {**request.args[1], **self._budget}
        begin = self._question(context, request)
        # A context that opens reasoning: what is kept of an unfinished trace begins with its mark.
        marked = [True] if self._ends(context).opened else []
        arguments = [context, options, *_given(begin), *marked]
        return Asked(key_of(self._facts, "generate_until", arguments), context, options, begin)

    def _answers(self, asked: Sequence[Asked]) -> Iterator[tuple[Asked, str]]:
        """The answers, in the order in which they end."""
        traces = self._traces(asked)
        writing: dict[Wanted, tuple[Asked, Answer]] = {}
        for each in asked:
            prompt, trace = self._prompt(each), traces.get(each.key, [])
            answer = Answer(self.tokenizer, self._ends(each.context, each.options), trace)
            tokens = (*prompt.tokens, *trace)
            begin = len(tokens) - 1 if trace else prompt.begin
            wanted = Wanted(Reading(tokens, begin), each.most, answer.take)
            writing[wanted] = each, answer
        for wanted in self.decoder.write(longest_first(writing)):
            each, answer = writing[wanted]
            yield each, answer.found()

    def _traces(self, asked: Sequence[Asked]) -> dict[str, list[int]]:
        """The source's reasoning on each prompt, by the answer's key; it is kept like a response.

        A trace ends with its closing mark, at the budget, or where the context is full. A source
        that answers without reasoning leaves the prompt as it is.
        """
        if self.writer is None:
            return {}
        keys: dict[str, str] = {}
        missing: dict[str, tuple[Wanted, Trace]] = {}  # prompts may be the same
        for each in asked:
            prompt = self._prompt(each)
            most = min(each.most, self.max_length - len(prompt.tokens))
            key = keys[each.key] = key_of(self._traced, "trace", [each.context, most])
            if most > 0 and key not in self.responses:
                trace = Trace(self.writer.tokenizer, self._ends(each.context))
                missing[key] = Wanted(prompt, most, trace.take), trace
        writing = {wanted: (key, trace) for key, (wanted, trace) in missing.items()}
        for wanted in self.writer.write(longest_first(writing)):
            key, trace = writing[wanted]
            self.responses.add(key, trace.reasoning())
        return {k: self.responses[key] for k, key in keys.items() if key in self.responses}

    def _prompt(self, asked: Asked) -> Reading:
        tokens = self._tokens(asked.context)
        if not tokens:
            raise KVLingoError("a task asks for the continuation of an empty context")
        return Reading.of(tokens, self.max_length, asked.begin)

    def prefix_tokens(self, context: str) -> int:
        """The number of tokens of a request's context, before anything is cut."""
        return len(self._tokens(context))

    def without_trace(self, text: str) -> str:
        """A response without reasoning; empty if the budget ended within the trace."""
        ends = self._ends("")
        return "" if ends.reasons(text) and ends.end not in text else text

    # ---- shared --------------------------------------------------------------------------

    def _tokens(self, text: str) -> list[int]:
        found = list(self.tokenizer.encode(text, add_special_tokens=not self.use_chat_template))
        if self.contexts is not None:
            self.contexts.cut(text, found)
        return found

    def _ends(self, context: str, options: dict[str, Any] | None = None) -> Ends:
        """Where an answer to a context ends: its stop strings, and the marks of reasoning."""
        stops = (options or {}).get("until") or []
        stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        start, end = self.tokenizer.think_start or "", self.tokenizer.think_end or ""
        return Ends(stops, start, end, bool(start) and context.rstrip().endswith(start))

    def _question(self, context: str, request: Instance) -> int | None:
        """The token at which the target begins to read; None where it runs the last one alone.

        A token that reaches into the question is the question's.
        """
        if self.point != CONTEXT:
            return None
        mark = self.question_at[request.task_name or ""]
        place = context.rfind(mark)
        if place < 0:
            raise KVLingoError(
                f"a prompt of {request.task_name} does not hold {mark!r}, before which its "
                "question begins; leave out context"
            )
        return shared_start(self._tokens(context), self._tokens(context[:place]))

    def _respond(
        self,
        kind: str,
        compute: Callable[..., Any],
        asked: Mapping[int, tuple[Any, ...]],
        counts: Mapping[int, int],
    ) -> dict[int, Any]:
        """The responses by number: those that are kept, and those that are computed and kept.

        ``counts`` says how many requests a number stands for, if not one.
        """
        keys = {number: key_of(self._facts, kind, given) for number, given in asked.items()}
        requests: dict[str, int] = {}
        for number, key in keys.items():
            requests[key] = requests.get(key, 0) + counts.get(number, 1)
        wanted = {
            keys[number]: (len(given[0]), partial(compute, *given))
            for number, given in asked.items()
        }
        for key in self.responses.fill(wanted):
            self._advance(requests[key])
        return {number: self.responses[key] for number, key in keys.items()}

    def _advance(self, count: int) -> None:
        if count:
            self._done += count
            self.progress(self._done, self._total)


def _given(begin: int | None) -> tuple[int, ...]:
    """What a key holds of a question's place: nothing where there is none, as ever."""
    return () if begin is None else (begin,)


def longest_first(wanted: Iterable[Wanted]) -> list[Wanted]:
    """Texts in the order of their prompts' lengths.

    Those that are written together are then of like length, and what does not fit into memory is
    found out at once.
    """
    return sorted(wanted, key=lambda each: -len(each.reading.tokens))
