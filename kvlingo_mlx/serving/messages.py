"""What the front and the worker of a server send each other: plain data, pickled.

The front makes an :class:`Ask` of a client's request, whichever API it came by, and turns the
:class:`Event` s that come back into that API's form. Nothing here knows HTTP or MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# ---- front to worker ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the names and ranges are those of mlx-lm's server.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: Samples from the likeliest tokens that make up this share; 1 is off.
        top_k: Samples from this many of the likeliest tokens; 0 is off.
        min_p: Leaves out tokens with less than this share of the likeliest one's probability.
        repetition_penalty: Divides the logits of the tokens before, if it is neither 0 nor 1.
        repetition_context_size: How many of the tokens before it looks at.
        presence_penalty: Subtracted from the logits of the tokens before; 0 is off.
        presence_context_size: How many of the tokens before it looks at.
        frequency_penalty: Subtracted once for each time that a token came before; 0 is off.
        frequency_context_size: How many of the tokens before it looks at.
        xtc_probability: How often the likeliest tokens are left out; 0 is off.
        xtc_threshold: The probability above which a token counts as one of them.
        logit_bias: Added to the logits, by token id.
        seed: Seeds this answer's own random numbers.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class Ask:
    """A request for one answer.

    Attributes:
        model: The name that the client gave.
        messages: The whole conversation in the form of OpenAI's chat messages: ``role``
            ("system", "user", "assistant", "tool"), ``content`` (a text), and where they are
            given ``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content``. Contents of
            several text parts are joined. None for a plain completion.
        prompt: The text, or the token ids, of a plain completion; None for a chat.
        tools: The tools that the template announces, in OpenAI's chat form.
        tool_choice: "auto", "none", "required", or a tool's name.
        parallel_tool_calls: Whether an answer may hold several tool calls.
        schema: A JSON schema that the answer must fit; ``{}`` for any JSON object; None for none.
        max_tokens: The most tokens of the answer; None for the server's own limit.
        stop: Texts before which the answer ends.
        sampling: How tokens are chosen.
        logprobs: How many of the likeliest tokens to tell with each token; None for none, 0 for
            the chosen one alone.
        template: Further arguments of the chat template (``chat_template_kwargs``).
        prefill: Whether the last message is the beginning of the answer, to be gone on with.
        echo: Whether a plain completion repeats its prompt.
        strategy: "translate", "reread", or None for what the server's policy says.
        pin: Whether the conversation stays in memory as long as the server runs.
    """

    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    schema: Mapping[str, Any] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    prefill: bool = False
    echo: bool = False
    strategy: str | None = None
    pin: bool = False


@dataclass(frozen=True)
class Count:
    """A request for the number of tokens of a prompt, without an answer."""

    ask: Ask


# ---- worker to front ------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Where the tokens of a prompt came from, and how long things took.

    Attributes:
        prompt_tokens: All tokens of the prompt.
        completion_tokens: Tokens of the answer, so far or in all.
        reasoning_tokens: Those of them that are reasoning.
        cached_tokens: Prompt tokens that the answering model's line held from before. With the two
            following they are the whole prompt (see ``conversation.exchange.Switch``).
        translated_tokens: Prompt tokens that were translated for this answer, perhaps ahead of it.
        read_tokens: Prompt tokens that the answering model read now, the last one included.
        strategy: How the line was brought up to date: "translate", "hybrid" (some layers read),
            "reread" (though another model had read it), "kept" (nothing was lacking but what is
            new), or "read" (nobody had read it).
        fallback: Why tokens were read anew that another model had read; None if none were.
        doubt: Why the guard found the translation in doubt; None if it did not.
        translator: The translator's folder, where one was used.
        translator_digest: A sha256 of what that translator computes.
        ttft_s: Seconds from the worker's receipt of the request to the first token.
        queue_s: The part of them that the request waited for its turn or for a model to load.
        reread_s: Seconds that reading the whole prompt would take, from the model's measured
            speed; None while none has been measured.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    translated_tokens: int = 0
    read_tokens: int = 0
    strategy: str = "read"
    fallback: str | None = None
    doubt: str | None = None
    translator: str | None = None
    translator_digest: str | None = None
    ttft_s: float = 0.0
    queue_s: float = 0.0
    reread_s: float | None = None


@dataclass(frozen=True)
class Begun:
    """The first token is there. Sent once, before any :class:`Piece`.

    Attributes:
        model: The model that answers, which may be another than the one asked for ("auto").
        usage: What is known of the prompt.
    """

    model: str
    usage: Usage


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability, and those of the likeliest tokens: (text, id, log probability)."""

    text: str
    token: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A further part of the answer; every part may be empty.

    Attributes:
        content: Text for the user.
        reasoning: Text of a reasoning trace.
        tool_calls: Whole tool calls: ``{"id", "type": "function", "function": {"name",
            "arguments"}}``, the arguments as JSON text.
        logprobs: Those of the tokens of this piece, if they were asked for.
        tokens: The number of tokens in this piece.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: int = 1


@dataclass(frozen=True)
class Ended:
    """The answer is complete.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        usage: All counts and times.
        stop_text: The stop text before which it ended, or None.
    """

    reason: str
    usage: Usage
    stop_text: str | None = None


@dataclass(frozen=True)
class Waiting:
    """Nothing to tell yet; how far the prompt has been read.

    Attributes:
        done: Prompt tokens that the model's line holds.
        total: Prompt tokens in all; 0 while the request waits in the queue.
    """

    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Counted:
    """The answer to :class:`Count`."""

    tokens: int


@dataclass(frozen=True)
class Failed:
    """No answer, or no more of it. It is the last event of a request.

    Attributes:
        kind: "invalid" (400), "not_found" (404), "too_long" (400), "busy" (429),
            "unready" (503), "memory" (503), "crashed" (503) or "internal" (500).
        message: One line: what was found, what was expected, what to do.
        param: The request's field that is wrong, or None.
    """

    kind: str
    message: str
    param: str | None = None


Event = Begun | Piece | Ended | Waiting | Counted | Failed


@dataclass(frozen=True)
class ModelInfo:
    """A model that the server offers.

    Attributes:
        name: Its name in requests.
        path: Its folder or Hub id.
        context: The longest context in tokens.
        loaded: Whether its weights are in memory.
        weights_bytes: The bytes of its weights.
        family: mlx-lm's name of the architecture.
    """

    name: str
    path: str
    context: int
    loaded: bool
    weights_bytes: int
    family: str


@dataclass(frozen=True)
class Status:
    """What the worker holds and does; sent when it is ready, and after each answer.

    Attributes:
        models: The models that are offered.
        routes: Whether a model named "auto" is offered.
        conversations: Conversations in memory, and on disk.
        lines_bytes: Bytes of their caches in memory.
        translators_bytes: Bytes of the translators in memory.
        budget_bytes: What weights, lines and translators may take together.
        running: Answers that are being read or written.
        queued: Requests that wait.
        pairs: For each ordered pair of models how it is switched: (source, target, "translate" |
            "hybrid" | "reread", why).
        healed: Tokens that were read in the place of translated ones, since the worker began.
    """

    models: tuple[ModelInfo, ...] = ()
    routes: bool = False
    conversations: tuple[int, int] = (0, 0)
    lines_bytes: int = 0
    translators_bytes: int = 0
    budget_bytes: int = 0
    running: int = 0
    queued: int = 0
    pairs: tuple[tuple[str, str, str, str], ...] = ()
    healed: int = 0
