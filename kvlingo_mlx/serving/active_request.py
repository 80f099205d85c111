"""One request in the engine: its sampler, its events, and where its prompt came from."""

import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.sample_utils import make_logits_processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvlingo_mlx.engine.batches import Row
from kvlingo_mlx.engine.calls import form_of
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.offers import read_again
from kvlingo_mlx.engine.responses import GenerationResponse
from kvlingo_mlx.engine.sampling import LogitsProcessor
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.serving.guidance import guided
from kvlingo_mlx.serving.messages import (
    Delta,
    Event,
    Finished,
    FirstToken,
    GenerationRequest,
    Progress,
    TokenLogprob,
    Usage,
)
from kvlingo_mlx.serving.model_pool import PooledModel
from kvlingo_mlx.serving.policy import Way

Tell = Callable[[Event], None]
Steps = Generator[bool, None, None]  # work; True where the next step must follow at once
ALPHABET = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of byte-level tokens
PROGRESS_S = 1.0  # how often a waiting client is told how far its prompt has been read


@dataclass(eq=False)
class ActiveRequest:
    """A request that is being worked on, with its place in a batch once its prompt is read."""

    ask: GenerationRequest
    tell: Tell  # sends an event to the client
    name: str  # of the model that answers
    arrived: float = field(default_factory=time.perf_counter)
    steps: Steps = field(init=False)  # the work
    row: Row | None = None  # the answer's place in a batch; None before it joins and after
    usage: Usage = field(default_factory=Usage)  # what is known so far
    messages: list[dict[str, Any]] = field(default_factory=list)  # as they are to be read
    calls: int = 0  # those of the answer so far
    told: bool = False  # the client of the first token
    ended: bool = False  # the answer, for the client
    complete: bool = False  # the model has ended it too; else the rest of it is not wanted
    tokens: list[int] = field(default_factory=list)  # the prompt, where it is a plain text
    before: str = ""  # what is told before the answer's own text
    ways: Mapping[tuple[str, str], Way] = field(default_factory=dict)  # of this request
    queued: float = 0.0  # seconds that it waited for its turn, a model or another answer
    lacking: float | None = None  # when it first lacked room for its model or its lines
    total: int = 0  # tokens of the prompt, once somebody has waited for them
    _quiet: float = field(default_factory=time.perf_counter)

    def waits(self, done: int, length: Callable[[], int] | None = None) -> None:
        """Tell, now and then, how far the prompt has been read; ``length`` counts its tokens."""
        if time.perf_counter() - self._quiet >= PROGRESS_S:
            self._quiet = time.perf_counter()
            if length is not None and not self.total:
                self.total = length()  # a few may differ from those that a model wrote
            self.tell(Progress(min(done, self.total), self.total))

    def take(self, response: GenerationResponse, tokenizer: Any) -> None:
        """Tell the client what one token brought.

        ``tokenizer`` is the answering model's.
        """
        if not self.told:
            self.told = True
            self.usage = replace(self.usage, ttft_s=time.perf_counter() - self.arrived)
            self.tell(FirstToken(self.name, self.usage))
        reasoning = int(bool(response.reasoning))
        self.usage = replace(
            self.usage,
            completion_tokens=response.generation_tokens,
            reasoning_tokens=self.usage.reasoning_tokens + reasoning,
        )
        calls = response.tool_calls if self.ask.parallel_tool_calls else response.tool_calls[:1]
        self.calls += len(calls)
        logprobs = self._logprobs(response, tokenizer)
        content, self.before = self.before + response.content, ""
        parts = content, response.reasoning, calls
        if any(parts) or logprobs:
            self.tell(Delta(*parts, logprobs=logprobs))
        enough = bool(self.calls) and not self.ask.parallel_tool_calls
        self.complete = response.finish_reason is not None
        if self.complete or enough:
            self.ended = True
            reason = "tool_calls" if self.calls else response.finish_reason or "stop"
            self.tell(Finished(reason, self.usage, response.stop_text))

    def _logprobs(self, response: GenerationResponse, tokenizer: Any) -> tuple[TokenLogprob, ...]:
        token, found = int(response.token), response.logprobs
        if self.ask.logprobs is None or token in tokenizer.eos_token_ids:
            return ()
        likeliest: list[int] = []
        if self.ask.logprobs:
            listed: Any = mx.argsort(-found)[: self.ask.logprobs].tolist()
            likeliest = list(map(int, listed))
        values: Any = found[mx.array([token, *likeliest])].tolist()
        texts = [_spelt(tokenizer, each) for each in (token, *likeliest)]
        top = tuple(zip(texts[1:], likeliest, values[1:], strict=True))
        return (TokenLogprob(texts[0], token, values[0], top),)


def _spelt(tokenizer: Any, token: int) -> bytes:
    """A token's text in UTF-8, perhaps a part of a character."""
    piece, text = str(tokenizer.convert_ids_to_tokens(token)), str(tokenizer.decode([token]))
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    if set(piece) <= ALPHABET.keys():
        found = bytes(map(ALPHABET.__getitem__, piece))
        if found.decode(errors="replace") == text:
            return found
    spaced = piece.replace("\u2581", " ")  # which is not decoded at a text's beginning
    return (spaced if spaced.strip() == text.strip() else text).encode()


def tools_of(ask: GenerationRequest, model: LanguageModel) -> list[dict[str, Any]]:
    """The tools as chat templates announce them; "strict" is for the server, not for the model.

    One that must be called stands alone where no grammar can say so; where calls cannot be
    forbidden, there are none.
    """
    if ask.tool_choice == "none" and not _forbidden(ask, model):
        return []
    named = [tool for tool in ask.tools if tool["function"]["name"] == ask.tool_choice]
    return [
        {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
        for tool in (ask.tools if form_of(model.tokenizer).in_json else named or ask.tools)
    ]


def processors_of(ask: GenerationRequest, model: LanguageModel) -> list[LogitsProcessor]:
    """mlx-lm's logits processors for a request.

    Raises:
        ValueError: A token of ``logit_bias`` is not in the vocabulary, or calling tools cannot be
            forbidden or demanded of this model.
    """
    sampling, size = ask.sampling, int(model.facts["vocab_size"])
    if beyond := [token for token in sampling.logit_bias if not 0 <= token < size]:
        raise ValueError(
            f"logit_bias names token {beyond[0]}, but {model.name} has tokens 0 to {size - 1}"
        )
    bias = {**sampling.logit_bias, **dict.fromkeys(_forbidden(ask, model), float("-inf"))}
    return guided(ask, model) + make_logits_processors(
        bias or None,
        sampling.repetition_penalty if sampling.repetition_penalty not in (0, 1) else None,
        sampling.repetition_context_size,
        sampling.presence_penalty or None,
        sampling.presence_context_size,
        sampling.frequency_penalty or None,
        sampling.frequency_context_size,
    )


def _forbidden(ask: GenerationRequest, model: LanguageModel) -> list[int]:
    """The tokens that begin a tool call, where none may be called; none where no one does."""
    form = form_of(model.tokenizer)
    if ask.tool_choice != "none" or not ask.tools or form.bare:
        return []
    ids = [model.tokenizer.encode(start, add_special_tokens=False) for start in form.starts]
    return [token for (token,) in ids] if all(len(each) == 1 for each in ids) else []


def usage_of(
    job: ActiveRequest, exchange: Exchange, resident: PooledModel, response: GenerationResponse
) -> Usage:
    """Where a prompt's tokens came from, by its first token's ``response``.

    ``exchange`` has the conversation's lines, the answering model's brought up to date.
    """
    switch = exchange.last
    assert switch is not None
    held = switch.kept + switch.ahead
    strategy = "kept" if held else "read"
    again, fallback = _again(job, exchange, held), None
    if again is not None:
        strategy, way = "reread", job.ways[again, job.name]
        barred = way.strategy == "reread"
        fallback = way.why if barred else "the other model no longer keeps what can be translated"
    guarded = response.guarded
    doubt = str(guarded) if guarded is not None and guarded.doubts else None
    if doubt is not None and not switch.sources:
        strategy, fallback = "reread", f"the translation was in doubt: {doubt}"
    if switch.sources:
        ways = {job.ways[source, job.name].strategy for source in switch.sources}
        strategy = "hybrid" if "hybrid" in ways else "translate"
    speed = resident.read_s
    return Usage(
        prompt_tokens=response.prompt_tokens,
        cached_tokens=response.cached_tokens,
        translated_tokens=response.translated_tokens,
        read_tokens=response.read_tokens,
        strategy=strategy,
        fallback=fallback,
        doubt=doubt,
        translator=response.translator,
        translator_digest=response.translator_digest,
        queue_s=job.queued,
        reread_s=None if speed is None else speed * response.prompt_tokens,
    )


def _again(job: ActiveRequest, exchange: Exchange, kept: int) -> str | None:
    """The model that had read most of what the answering one reads again now, if any had."""
    line, known = exchange.lines[job.name], exchange.known
    counts = {
        name: read_again(line, kept, other, known)
        for name, other in exchange.lines.items()
        if other is not line
    }
    most = max(counts, key=counts.__getitem__, default=None)
    return most if most is not None and counts[most] else None
