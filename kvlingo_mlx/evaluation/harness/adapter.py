"""mlx-lm's own lm-eval model, with a prefix cache that any condition may fill.

With the native condition, or an identity translator, it gives the results of
``mlx_lm.evaluate.MLXLM``. It needs the ``[eval]`` extra;
:mod:`kvlingo_mlx.evaluation.harness.running` checks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from mlx_lm.evaluate import DEFAULT_MAX_TOKENS, MLXLM
from mlx_lm.generate import stream_generate

from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.evaluation.conditions import CacheMaker
from kvlingo_mlx.evaluation.harness.responses import Responses, key_of
from kvlingo_mlx.models.language_model import LanguageModel

Progress = Callable[[int, int], None]


class PrefixLM(MLXLM):
    """A target whose requests' contexts are read by a condition instead of by itself.

    A request's context is the prefix. The condition makes the cache of all its tokens but the last;
    the target runs the last token and the rest. Decoding is always greedy, whatever a task asks
    for. ``loglikelihood_rolling`` has no context to translate: the target scores the text alone,
    and every condition gets the same number.

    Args:
        target: The model that continues.
        make_cache, condition, enable_thinking, max_gen_toks, max_length, progress: As for
            :func:`~kvlingo_mlx.evaluation.harness.running.run`.
        use_chat_template: Whether contexts contain the special tokens of a chat template; None
            means that they do if the tokenizer has one.
        responses: Keeps the responses; in memory by default.

    Raises:
        ValueError: There is no chat template to use, or a number is not positive.
    """

    def __init__(
        self,
        target: LanguageModel,
        make_cache: CacheMaker,
        *,
        condition: str,
        use_chat_template: bool | None = None,
        enable_thinking: bool | None = None,
        max_gen_toks: int | None = None,
        max_length: int | None = None,
        responses: Responses | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        LM.__init__(self)  # MLXLM's own __init__ would load a model
        self.target, self.make_cache, self.progress = target, make_cache, progress
        self._model, self.tokenizer = target.model, target.tokenizer
        self.max_length = max_length or target.context_length
        if use_chat_template is None:
            use_chat_template = self.tokenizer.has_chat_template
        if use_chat_template and not self.tokenizer.has_chat_template:
            raise ValueError(f"{target.name} has no chat template; run tasks without it")
        for name, number in (("max_gen_toks", max_gen_toks), ("max_length", max_length)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        self.use_chat_template = use_chat_template
        self._budget = {} if max_gen_toks is None else {"max_gen_toks": max_gen_toks}
        self._switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.responses = responses or Responses()
        self._facts = {
            "condition": condition,
            "target": [target.name, target.revision, target.weights_fingerprint],
            "max_length": self.max_length,
            "special_tokens": not use_chat_template,
        }
        self._done = self._total = 0

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the target's own template renders it.

        Raises:
            KVLingoError: The template does not take these messages.
        """
        try:
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._switch,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise KVLingoError(
                f"the chat template of {self.target.name} does not take a task's messages "
                f"({error}); run the task without it"
            ) from None

    # ---- log-likelihoods -----------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding gives it.

        Continuations of one context share its cache. A context that is cut away completely scores
        minus infinity, as in MLXLM.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.args[0], []).append(index)
        self._total += len(requests)
        scored: list[Any] = [None] * len(requests)
        for context, indices in groups.items():
            continuations = [requests[i].args[1] for i in indices]
            found = self._respond("loglikelihood", self._score, context, continuations)
            for index, (score, greedy) in zip(indices, found, strict=True):
                scored[index] = (score, greedy)
            self._advance(len(indices))
        return scored

    def _score(self, context: str, continuations: Sequence[str]) -> list[tuple[float, bool]]:
        (prefix,) = self._tokenize([context])
        start = len(prefix)
        sequences = self._tokenize([context + c for c in continuations])
        excess = max(0, max(len(s) for s in sequences) - self.max_length - 1)
        prefix = prefix[excess:]
        if not prefix:
            return [(-float("inf"), False)] * len(continuations)
        logs, cache = self._process_prompt(prefix)
        best = mx.argmax(logs).item()
        scored = []
        for sequence, text in zip(sequences, continuations, strict=True):
            tokens = sequence[start:]
            if not tokens:
                raise KVLingoError(f"the continuation {text!r} adds no token to its context")
            score, greedy = logs[0, tokens[0]].item(), tokens[0] == best
            if len(tokens) > 1:
                rest, _, rest_greedy = self._score_fn(
                    mx.array(tokens)[None, :], cache=copy.deepcopy(cache)
                )
                score += mx.sum(rest).item()
                greedy &= mx.all(rest_greedy).item()
            scored.append((float(np.float32(score)), greedy))
        return scored

    def _process_prompt(self, prompt: Sequence[int], step_size: int = 2048) -> Any:
        """The log-probabilities (1, V) after the prompt, in float32, and the prompt's cache."""
        cache = self.make_cache(list(prompt))
        logits = self._model(mx.array([prompt[-1:]]), cache=cache)
        logs = nn.log_softmax(logits[:, -1, :].astype(mx.float32))
        mx.eval(logs, [c.state for c in cache])
        mx.clear_cache()
        self._check_numbers(logs)
        return logs, cache

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-likelihood of each text after its first token, by the target alone."""
        self._total += len(requests)
        found = []
        for request in requests:
            found.append(self._respond("loglikelihood_rolling", self._score_alone, request.args[0]))
            self._advance(1)
        return found

    def _score_alone(self, text: str) -> float:
        (tokens,) = self._tokenize([text])
        if len(tokens) < 2:
            return 0.0
        scores, _, _ = self._score_fn([tokens])
        return scores.sum().item()

    # ---- generation ----------------------------------------------------------------------

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy continuations up to a stop string, the end of the turn or ``max_gen_toks``.

        A finished reasoning trace is dropped, and stop strings count only after it. MLXLM looks for
        them in the trace, too, and then has no answer.
        """
        self._total += len(requests)
        found = []
        for request in requests:
            context, options = request.args[:2]
            options = {**options, **self._budget}
            found.append(self._respond("generate_until", self._generate, context, options))
            self._advance(1)
        return found

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        (prompt,) = self._tokenize([context])
        prompt = prompt[-self.max_length :]
        if not prompt:
            raise KVLingoError("a task asks for the continuation of an empty context")
        stops = options.get("until") or []
        stops = [s for s in ([stops] if isinstance(stops, str) else stops) if s]
        answer = _Answer(stops, *self._marks(context))
        tokens: list[int] = []
        streamed = ""
        for response in stream_generate(
            self._model,
            self.tokenizer,
            prompt[-1:],
            max_tokens=options.get("max_gen_toks", DEFAULT_MAX_TOKENS),
            prompt_cache=self.make_cache(list(prompt)),
        ):
            if not tokens:
                self._check_numbers(response.logprobs)
            if response.finish_reason != "stop":
                tokens.append(response.token)
            # The streamed text may differ from the decoding of all tokens, so it is only a hint.
            streamed += response.text
            if answer.stopped(streamed) and answer.stopped(self.tokenizer.decode(tokens)):
                break
        mx.clear_cache()
        return answer.cut(self.tokenizer.decode(tokens))

    def prefix_tokens(self, context: str) -> int:
        """The number of tokens of a request's context, before anything is cut."""
        return len(self._tokenize([context])[0])

    def without_trace(self, context: str, text: str) -> str:
        """A generated text without reasoning; empty if the budget ended within the trace."""
        return "" if _Answer([], *self._marks(context)).in_trace(text) else text

    def _marks(self, context: str) -> tuple[str, str, bool]:
        """The marks around reasoning, if there are any, and whether the context opens it."""
        start, end = self.tokenizer.think_start or "", self.tokenizer.think_end or ""
        return start, end, bool(start) and context.rstrip().endswith(start)

    # ---- shared --------------------------------------------------------------------------

    def _respond(self, kind: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        """The kept response to a request; if there is none, it is computed and kept."""
        key = key_of(self._facts, kind, arguments)
        if key not in self.responses:
            self.responses.add(key, compute(*arguments))
        return self.responses[key]

    def _advance(self, count: int) -> None:
        self._done += count
        self.progress(self._done, self._total)

    def _check_numbers(self, logs: mx.array) -> None:
        if mx.isnan(logs).any().item():
            raise KVLingoError(
                f"a prediction of {self.target.name} is not a number: the translator's output "
                "overflows, or the model's weights are damaged"
            )


class _Answer:
    """Finds the end of the reasoning and the end of the answer in a generated text."""

    def __init__(self, stops: list[str], start: str, end: str, opened: bool) -> None:
        self.stops, self.start, self.end, self.opened = stops, start, end, opened

    def _reasons(self, text: str) -> bool:
        return self.opened or (bool(self.start) and text.lstrip().startswith(self.start))

    def in_trace(self, text: str) -> bool:
        """Whether the text ends within a reasoning trace."""
        return self._reasons(text) and self.end not in text

    def stopped(self, text: str) -> bool:
        """Whether a stop string ends the answer."""
        if self._reasons(text):
            _, closed, text = text.partition(self.end)
            return bool(closed) and self._first_stop(text.lstrip()) is not None
        return self._first_stop(text) is not None

    def cut(self, text: str) -> str:
        """The answer alone; with an unfinished trace, the same text that MLXLM returns."""
        if self._reasons(text) and self.end in text:
            text = text.partition(self.end)[2]
            blank = len(text) - len(text.lstrip())
            return text[:blank] + text[blank:][: self._first_stop(text[blank:])]
        text = text[: self._first_stop(text)]
        _, closed, answer = text.partition(self.end) if self.end else ("", "", "")
        return answer if closed else text

    def _first_stop(self, text: str) -> int | None:
        places = [text.find(stop) for stop in self.stops]
        return min((place for place in places if place >= 0), default=None)
