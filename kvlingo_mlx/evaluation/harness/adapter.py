"""lm-eval's view of a model whose prompts any condition may read.

With the native condition, or an identity translator, it gives the results of
``mlx_lm.evaluate.MLXLM``. It needs the ``[eval]`` extra, and imports no MLX: a
:class:`~kvlingo_mlx.evaluation.harness.answers.Decoder` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.harness import answers
from kvlingo_mlx.evaluation.journal import Responses, key_of

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.harness.contexts import Contexts

Progress = Callable[[int, int], None]
DEFAULT_MAX_TOKENS = 8192  # MLXLM's, for a task that sets no budget


@dataclass(frozen=True)
class RequestedAnswer:
    """An answer that requests ask for."""

    key: str
    context: str
    options: dict[str, Any]

    @property
    def most(self) -> int:
        """The most tokens of the answer, and of reasoning that precedes it."""
        return self.options.get("max_gen_toks") or DEFAULT_MAX_TOKENS


class PrefixLM(LM):
    """A target whose requests' contexts are read by a condition instead of by itself.

    A request's context is the prefix. The condition makes the cache of all its tokens but the last;
    the target runs the last token and the rest. Decoding is always greedy, whatever a task asks
    for. ``loglikelihood_rolling`` has no context to translate: the target scores the text alone,
    and every condition gets the same number.

    Arguments are those of :func:`~kvlingo_mlx.evaluation.harness.running.run`, but for the decoder.
    """

    def __init__(
        self,
        decoder: answers.Decoder,
        *,
        condition: str,
        use_chat_template: bool | None = None,
        enable_thinking: bool | None = None,
        max_gen_toks: int | None = None,
        max_length: int | None = None,
        responses: Responses | None = None,
        contexts: Contexts | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        super().__init__()
        self.decoder, self.tokenizer, self.progress = decoder, decoder.tokenizer, progress
        self.max_length = max_length or decoder.context_length
        if use_chat_template is None:
            use_chat_template = self.tokenizer.has_chat_template
        if use_chat_template and not self.tokenizer.has_chat_template:
            raise ValueError(f"{decoder.name} has no chat template; run tasks without it")
        for name, number in (("max_gen_toks", max_gen_toks), ("max_length", max_length)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        self.use_chat_template = use_chat_template
        self._budget = {} if max_gen_toks is None else {"max_gen_toks": max_gen_toks}
        self._switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.responses, self.contexts = responses or Responses(), contexts
        self.cutting = {"max_length": self.max_length, "special_tokens": not use_chat_template}
        self._facts = {"condition": condition, "target": decoder.identity, **self.cutting}
        self._done = self._total = 0

    def check_tasks(self, tasks: Mapping[str, Any]) -> None:
        """Refuse (ValueError) loaded tasks that cannot be asked so."""

    def last(self, context: str, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """The last ``most`` of a context's tokens."""
        return tuple(tokens[max(0, len(tokens) - most) :])

    def before_answers(self, asked: Sequence[RequestedAnswer]) -> Mapping[str, list[int]]:
        """Tokens that stand between a prompt and its answer, by the answer's key."""
        return {}

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

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding gives it.

        Continuations of one context share its cache. A context that is cut away completely scores
        minus infinity, as in MLXLM.
        """
        asked: dict[str, list[str]] = {}
        for request in requests:
            asked.setdefault(request.args[0], []).append(request.args[1])
        found = self._respond("loglikelihood", self._score, list(asked.items()))
        scores = dict(zip(asked, map(iter, found), strict=True))
        each = (next(scores[request.args[0]]) for request in requests)
        return [(score, greedy) for score, greedy in each]

    def _score(self, context: str, continuations: Sequence[str]) -> list[tuple[float, bool]]:
        prefix = self.tokens(context)
        sequences = [self.tokens(context + c) for c in continuations]
        following = [sequence[len(prefix) :] for sequence in sequences]
        for tokens, text in zip(following, continuations, strict=True):
            if not tokens:
                raise KVLingoError(f"the continuation {text!r} adds no token to its context")
        excess = max(0, max(len(s) for s in sequences) - self.max_length - 1)
        if excess >= len(prefix):
            return [(-float("inf"), False)] * len(continuations)
        found = self.decoder.score(self.last(context, prefix, len(prefix) - excess), following)
        return [(float(np.float32(score)), greedy) for score, greedy in found]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-likelihood of each text after its first token, by the target alone."""
        return self._respond(
            "loglikelihood_rolling",
            lambda text: self.decoder.score_alone(self.tokens(text)),
            [(request.args[0],) for request in requests],
        )

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy continuations up to a stop string, the end of the turn or ``max_gen_toks``.

        A finished reasoning trace is dropped, and stop strings count only after it. MLXLM looks for
        them in the trace, too, and then has no answer. Each response is kept as soon as it is done.
        """
        asked = [self._requested(request) for request in requests]
        wanted = {each.key: each for each in asked}
        missing = [each for key, each in wanted.items() if key not in self.responses]
        self._advance(len(wanted) - len(missing), len(wanted))
        for each, text in self._answers(missing):
            self.responses.add(each.key, text)
            self._advance(1)
        return [self.responses[each.key] for each in asked]

    def _requested(self, request: Instance) -> RequestedAnswer:
        context, options = request.args[0], {**request.args[1], **self._budget}
        # A context that opens reasoning: what is kept of an unfinished trace begins with its mark.
        marked = [True] if self.ends(context).opened else []
        key = key_of(self._facts, "generate_until", [context, options, *marked])
        return RequestedAnswer(key, context, options)

    def _answers(self, asked: Sequence[RequestedAnswer]) -> Iterator[tuple[RequestedAnswer, str]]:
        """The answers, in the order in which they end."""
        before = self.before_answers(asked)
        writing: dict[answers.TextToWrite, tuple[RequestedAnswer, answers.WrittenAnswer]] = {}
        for each in asked:
            tokens, more = self.prompt(each), before.get(each.key, [])
            answer = answers.WrittenAnswer(
                self.tokenizer, self.ends(each.context, each.options), more
            )
            writing[answers.TextToWrite((*tokens, *more), each.most, answer.take)] = each, answer
        for wanted in self.decoder.write(answers.longest_first(writing)):
            each, answer = writing[wanted]
            yield each, answer.found()

    def prompt(self, asked: RequestedAnswer) -> tuple[int, ...]:
        """The prompt of an answer, cut to what the context holds."""
        tokens = self.tokens(asked.context)
        if not tokens:
            raise KVLingoError("a task asks for the continuation of an empty context")
        return self.last(asked.context, tokens, self.max_length)

    def tokens(self, text: str) -> list[int]:
        """A context in the target's tokens, before anything is cut."""
        found = list(self.tokenizer.encode(text, add_special_tokens=not self.use_chat_template))
        if self.contexts is not None:
            self.contexts.cut(text, found)
        return found

    def without_trace(self, text: str) -> str:
        """A response without reasoning; empty if the budget ended within the trace."""
        ends = self.ends("")
        return "" if ends.reasons(text) and ends.end not in text else text

    def ends(self, context: str, options: Mapping[str, Any] | None = None) -> answers.Ends:
        """Where an answer to a context ends: its stop strings, and the marks of reasoning."""
        stops = (options or {}).get("until") or []
        stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        start, end = self.tokenizer.think_start or "", self.tokenizer.think_end or ""
        return answers.Ends(stops, start, end, bool(start) and context.rstrip().endswith(start))

    def _respond(
        self, kind: str, compute: Callable[..., Any], asked: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """The responses, kept or computed now."""
        keys = [key_of(self._facts, kind, given) for given in asked]
        wanted = {key: partial(compute, *given) for key, given in zip(keys, asked, strict=True)}
        self._advance(0, len(wanted))
        for _ in self.responses.fill(wanted):
            self._advance(1)
        return [self.responses[key] for key in keys]

    def _advance(self, done: int, more: int = 0) -> None:
        """Tell of responses that are there, and of further ones to come."""
        self._done, self._total = self._done + done, self._total + more
        self.progress(self._done, self._total)
