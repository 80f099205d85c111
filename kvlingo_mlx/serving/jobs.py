"""One request in the worker: from its Ask to the events of its answer, a unit of work at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.sample_utils import make_logits_processors, make_sampler

from kvlingo_mlx.handover.responses import GenerationResponse
from kvlingo_mlx.handover.sampling import LogitsProcessor, Sampler
from kvlingo_mlx.serving.messages import (
    Ask,
    Begun,
    Ended,
    Event,
    Piece,
    Sampling,
    TokenLogprob,
    Usage,
    Waiting,
)

Tell = Callable[[Event], None]
Steps = Generator[GenerationResponse | None, None, None]


@dataclass(eq=False)
class Job:
    """A request that is being worked on.

    Attributes:
        ask: The request.
        tell: Sends an event to the client.
        name: The model that answers.
        arrived: When the worker got the request (``time.perf_counter``).
        steps: The work; None before it has begun.
        decoding: Whether the answer's tokens come from a batch now.
        began: When the work began.
        usage: What is known of the prompt and the answer so far.
        content: The answer's text for the user so far.
        calls: Its tool calls so far.
        quiet_since: When the client last got an event.
    """

    ask: Ask
    tell: Tell
    name: str
    arrived: float = field(default_factory=time.perf_counter)
    steps: Steps | None = None
    decoding: bool = False
    began: float = 0.0
    usage: Usage = field(default_factory=Usage)
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    told: bool = False

    def begin(self, steps: Steps) -> None:
        """Start the work."""
        self.steps, self.began = steps, time.perf_counter()

    def progress(self, done: int, total: int) -> None:
        """Tell how far the prompt has been read."""
        self.tell(Waiting(done, total))

    def take(self, response: GenerationResponse, tokenizer: Any) -> None:
        """Tell the client what one token brought.

        ``tokenizer`` is the answering model's.
        """
        if not self.told:
            self.told = True
            self.tell(Begun(self.name, self.usage))
        reasoning = int(bool(response.reasoning))
        self.usage = replace(
            self.usage,
            completion_tokens=response.generation_tokens,
            reasoning_tokens=self.usage.reasoning_tokens + reasoning,
        )
        self.content += response.content
        self.calls += response.tool_calls
        logprobs = self._logprobs(response, tokenizer)
        parts = response.content, response.reasoning, response.tool_calls
        if any(parts) or logprobs:
            self.tell(Piece(*parts, logprobs=logprobs))
        if response.finish_reason is not None:
            reason = "tool_calls" if self.calls else response.finish_reason
            self.tell(Ended(reason, self.usage, response.stop_text))

    def _logprobs(self, response: GenerationResponse, tokenizer: Any) -> tuple[TokenLogprob, ...]:
        if self.ask.logprobs is None:
            return ()
        token, found = int(response.token), response.logprobs
        likeliest: list[int] = []
        if self.ask.logprobs:
            listed: Any = mx.argsort(-found)[: self.ask.logprobs].tolist()
            likeliest = list(map(int, listed))
        values: Any = found[mx.array([token, *likeliest])].tolist()
        texts = [tokenizer.decode([each]) for each in (token, *likeliest)]
        top = tuple(zip(texts[1:], likeliest, values[1:], strict=True))
        return (TokenLogprob(texts[0], token, values[0], top),)


def sampler_of(sampling: Sampling) -> Sampler | None:
    """mlx-lm's sampler; None is greedy."""
    if not sampling.temperature:
        return None
    return make_sampler(
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        top_k=sampling.top_k,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
    )


def processors_of(sampling: Sampling, forbidden: Sequence[int] = ()) -> list[LogitsProcessor]:
    """mlx-lm's logits processors; tokens that are ``forbidden`` are never chosen."""
    bias = {**sampling.logit_bias, **dict.fromkeys(forbidden, float("-inf"))}
    return make_logits_processors(
        bias or None,
        sampling.repetition_penalty if sampling.repetition_penalty not in (0, 1) else None,
        sampling.repetition_context_size,
        sampling.presence_penalty or None,
        sampling.presence_context_size,
        sampling.frequency_penalty or None,
        sampling.frequency_context_size,
    )
