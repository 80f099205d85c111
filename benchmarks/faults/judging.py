"""Whether a greedy answer is right, as models say that are asked without any server."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from faults.server import MODELS
from kvlingo_mlx.embedded import zoo

TIE = 5e-3  # nats between two first choices below which rounding may decide
# The same after lines were rounded to 8 bits; an answer to another prompt is further off.
ROUNDED = 0.5
# Rounding may send a token to another expert of a mixture of experts, which then says something
# else. Plain mlx-lm's own caches rounded to 8 bits do so in 4 of 1,033 answers to such texts.
ROUTED, ROUTED_SHARE = {"moe"}, 0.01
Message = dict[str, Any]
_turn = threading.Lock()  # one answer is judged at a time


@dataclass
class Answer:
    """What a client was told.

    Attributes:
        model: Who answered.
        messages: The history that was sent.
        tokens: The answer's tokens.
        tops: For each of them the likeliest tokens with their log probabilities.
        text: The answer's text.
        usage: The response's ``usage``.
        reason: Why it ended; None if it was left before.
    """

    model: str
    messages: list[Message]
    tokens: list[int] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that its model had read before."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def alone(self) -> bool:
        """Whether the model read the whole prompt now, and by itself."""
        return not (self.cached or self.usage["kvlingo"]["translated_tokens"])


@functools.cache
def model_of(name: str) -> Any:
    """A model, loaded once."""
    return kv.load(zoo(MODELS[name]))


def gap(answer: Answer, messages: Sequence[Message]) -> float | None:
    """By how many nats a token of an answer is at most less likely than the first choice there.

    Plain mlx-lm reads ``messages`` and the answer anew. None where the prompt's tokens are others
    than the server's: what a model wrote is kept as its tokens, not as those of its text.
    """
    with _turn:
        model = model_of(answer.model)
        prompt = model.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, enable_thinking=False
        )
        if messages is answer.messages and len(prompt) != answer.usage["prompt_tokens"]:
            return None
        tokens = mx.array([prompt + answer.tokens])
        logits = model.model(tokens, cache=make_prompt_cache(model.model))
        rows = logits[0, len(prompt) - 1 : -1].astype(mx.float32)
        chosen = mx.take_along_axis(rows, mx.array(answer.tokens)[:, None], axis=-1)
        return float((rows.max(axis=-1, keepdims=True) - chosen).max().item())


class Replay:
    """One client's history in a conversation of the library."""

    def __init__(self) -> None:
        models = {name: model_of(name) for name in MODELS}
        self.talk = kv.Conversation(models, enable_thinking=False)

    def differs(self, answer: Answer, most: int) -> str | None:
        """What differs from the conversation's own answer; None if nothing, "tie" for a tie."""
        with _turn:
            replies = self.talk.stream_reply(
                answer.model, messages=answer.messages, max_tokens=most
            )
            own = [int(reply.token) for reply in replies]
        if own == answer.tokens:
            return None
        pairs = zip([*own, -1], [*answer.tokens, -1], strict=False)
        at = next(n for n, (a, b) in enumerate(pairs) if a != b)
        there = {} if at >= len(answer.tops) else answer.tops[at]
        if at < len(own) and own[at] in there and there[answer.tokens[at]] - there[own[at]] < TIE:
            return "tie"
        return f"token {at} of {answer.model}: {answer.tokens} where the library has {own}"
