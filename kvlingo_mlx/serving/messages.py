"""What HTTP and the engine pass each other: requests, and the events of their answers.

Each API of :mod:`.wire` makes a :class:`GenerationRequest` of a client's request, and turns the
events that come back into its own form. Nothing here knows HTTP or MLX; ranks send each other what
is here, pickled.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MOST = 2**31 - 1
Message = Mapping[str, Any]
Tool = Mapping[str, Any]


def _seed(found: Any) -> Any:
    """Negative seeds are taken too: the same bits without a sign."""
    return found % 2**64 if type(found) is int else found


def _by_token(found: Any) -> Any:
    """A bias by the tokens' ids, which JSON spells as texts."""
    if not isinstance(found, dict):
        return found
    if any(isinstance(t, str) and not re.fullmatch(r"[0-9]{1,9}", t) for t in found):
        raise PydanticCustomError("expected", 'token ids as keys, such as "42"; a text has no bias')
    return {int(token): bias for token, bias in found.items()}


Size = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-1e4, le=1e4)]


class Sampling(BaseModel):
    """How tokens are chosen; the names, ranges and defaults are those of mlx-lm's server."""

    model_config = ConfigDict(frozen=True)
    temperature: Annotated[float, Field(ge=0, le=1e4)] = 0.0
    top_p: Share = 1.0
    top_k: Size = 0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Field(ge=0, le=1e4)] = 0.0  # 0 and 1 are off
    repetition_context_size: Size = 20
    presence_penalty: Penalty = 0.0
    presence_context_size: Size = 20
    frequency_penalty: Penalty = 0.0
    frequency_context_size: Size = 20
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-1e9, le=1e9)]], BeforeValidator(_by_token)
    ] = {}
    seed: Annotated[int | None, BeforeValidator(_seed)] = None  # of this answer's own numbers


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer: to ``messages``, a whole conversation, or to a plain ``prompt``.

    The messages are OpenAI's chat messages: ``role`` ("system", "user", "assistant", "tool"), a
    text as ``content``, and where they are given ``tool_calls``, ``tool_call_id``, ``name`` and
    ``reasoning_content``.
    """

    model: str  # the name that the client gave
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None  # a text, or token ids
    tools: tuple[Tool, ...] = ()  # in OpenAI's chat form
    tool_choice: str = "auto"  # or "none", "required", or a tool's name
    parallel_tool_calls: bool = True
    schema: Mapping[str, Any] | None = None  # of the answer; {} is any JSON object
    max_tokens: int | None = None  # None: the server's own limit
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None  # likeliest tokens to tell with each; 0: of the chosen one alone
    template: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    begun: str = ""  # the beginning of the answer, which is given
    echo: bool = False  # whether a plain completion repeats its prompt
    strategy: str | None = None  # "translate" or "reread"; None: as the server's policy says
    pin: bool = False  # whether the conversation stays in memory
    count: bool = False  # whether only the prompt's tokens are counted


@dataclass(frozen=True)
class Usage:
    """Where the tokens of a prompt came from, and how long things took; times are in seconds.

    ``cached_tokens``, ``translated_tokens`` and ``read_tokens`` are together the whole prompt (see
    ``conversation.exchange.Switch``).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0  # so far, or in all
    reasoning_tokens: int = 0  # of these
    cached_tokens: int = 0  # that the model's line held from before
    translated_tokens: int = 0  # for this answer, perhaps ahead of it
    read_tokens: int = 0  # by the answering model now, the last one included
    strategy: str = "read"  # or "translate", "hybrid", "reread", "kept"
    fallback: str | None = None  # why tokens were read that another model had read
    doubt: str | None = None  # why the guard found the translation in doubt
    translator: str | None = None  # its folder
    translator_digest: str | None = None  # a sha256 of what it computes
    ttft_s: float = 0.0  # from the request's receipt to the first token
    queue_s: float = 0.0  # the part of it that was spent waiting for a turn or a model
    reread_s: float | None = None  # what reading the whole prompt would take, once measured


@dataclass(frozen=True)
class FirstToken:
    """The first token is there; sent once, before any :class:`Delta`."""

    model: str  # that answers, which may be another than the one asked for ("auto")
    usage: Usage


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability, and those of the likeliest tokens: (text, id, log probability).

    Texts are bytes in UTF-8, which may be no whole characters.
    """

    text: bytes
    token: int
    logprob: float
    top: tuple[tuple[bytes, int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """A further part of the answer; every part may be empty."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()  # whole ones, in OpenAI's chat form
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The answer is complete."""

    reason: str  # "stop", "length" or "tool_calls"
    usage: Usage
    stop_text: str | None = None  # before which it ended


@dataclass(frozen=True)
class Progress:
    """Nothing to tell yet but how far the prompt has been read; in the queue, 0 of 0."""

    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class TokenCount:
    """The number of a prompt's tokens, which is all that was asked for."""

    tokens: int


@dataclass(frozen=True)
class Failure:
    """No answer, or no more of it; the last event of a request."""

    kind: str  # see ``wire.KINDS``, which have a status each
    message: str  # one line: what was found, what was expected, what to do
    param: str | None = None  # the request's field that is wrong


Event = FirstToken | Delta | Finished | Progress | TokenCount | Failure
LAST = (Finished, TokenCount, Failure)
LEFT = 499  # the status by which metrics count a client that left; nobody reads it


@dataclass(frozen=True)
class ModelInfo:
    """A model that the server offers."""

    name: str
    path: str  # its folder or Hub id
    context: int  # tokens
    loaded: bool
    weights_bytes: int
    family: str  # mlx-lm's name of the architecture


@dataclass(frozen=True)
class Status:
    """What the engine holds and does."""

    models: tuple[ModelInfo, ...] = ()
    routes: bool = False  # whether a model named "auto" is offered
    conversations: tuple[int, int] = (0, 0)  # in memory, and on disk
    lines_bytes: int = 0  # of their caches in memory
    translators_bytes: int = 0
    budget_bytes: int = 0  # for weights, lines and translators together
    running: int = 0  # answers that are being written
    queued: int = 0  # requests that wait
    pairs: tuple[tuple[str, str, str, str], ...] = ()  # source, target, strategy, why
    healed: int = 0  # tokens read in the place of translated ones
