"""OpenAI's chat completions and plain completions, with the fields of mlx-lm's server."""

import codecs
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvlingo_mlx.serving.messages import (
    MOST,
    Delta,
    Failure,
    GenerationRequest,
    Message,
    TokenLogprob,
)
from kvlingo_mlx.serving.wire import BadRequest, oddities, openai_error
from kvlingo_mlx.serving.wire.answers import Gathered, extension, finite, frame, logprobs_of
from kvlingo_mlx.serving.wire.forms import conversation
from kvlingo_mlx.serving.wire.requests import (
    Api,
    Body,
    Conversing,
    Name,
    Positive,
    Sampled,
    Stop,
    Tops,
)
from kvlingo_mlx.serving.wire.tools import CUSTOM
from kvlingo_mlx.version import __version__

FINGERPRINT = f"kvlingo-mlx-{__version__}"

# ---- requests -----------------------------------------------------------------------------------


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    rules = oddities.STREAM
    include_usage: bool | None = None


class OpenAIRequest(Sampled):
    """What chat completions and completions have in common."""

    aliases = oddities.ALIASES
    model: Name = "default_model"
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    stop: Stop | None = None
    top_logprobs: Tops | None = None

    @property
    def counted(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(OpenAIRequest, Conversing):
    rules = oddities.CHAT
    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    response_format: Any = None
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def conversation(self) -> tuple[Message, ...]:
        return conversation(self.messages, "messages")

    def goes_on(self, messages: tuple[Message, ...]) -> bool:
        last, given = self.messages[-1], self.add_generation_prompt
        begun = isinstance(last, dict) and True in (last.get("prefix"), last.get("partial"))
        answers = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        if self.continue_final_message and (given or not answers):
            told = "needs a last message of role assistant, no add_generation_prompt; change one"
            raise BadRequest(f"continue_final_message {told}", "continue_final_message")
        if given is False and not self.continue_final_message:
            told = "add_generation_prompt is false, expected true; give continue_final_message "
            raise BadRequest(f"{told}to go on with the last message", "add_generation_prompt")
        return bool(self.continue_final_message) or (begun and answers)

    def ask(self) -> GenerationRequest:
        return self.converse(
            ("response_format", self.response_format),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(self.stop or ()),
            logprobs=tops(self.logprobs, self.top_logprobs),
        )


def tops(wanted: bool | None, top: int | None) -> int | None:
    """As mlx-lm's server has it: the likeliest tokens may be asked for alone."""
    if top is not None and top > 0:
        return top
    return 0 if wanted else None


def _prompt(found: Any) -> Any:
    """The text or token ids of the one prompt."""
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | list):
        found = found[0]
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(map(_is_token, found)):
        return tuple(found)
    if isinstance(found, list) and len(found) > 1 and isinstance(found[0], str | list):
        raise PydanticCustomError("prompt", "Give one prompt; send each in a request of its own")
    raise PydanticCustomError("prompt", "Input should be a text or token ids, and not empty")


def _is_token(item: Any) -> bool:
    return type(item) is int and 0 <= item <= MOST


def _wanted(found: Any) -> Any:
    """OpenAI's number of likeliest tokens, or mlx-lm's bool."""
    return (0 if found else None) if isinstance(found, bool) else found


class CompletionRequest(OpenAIRequest):
    """A request to go on with a plain text."""

    rules = oddities.COMPLETIONS
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]
    echo: bool | None = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(_wanted)] = None

    def ask(self) -> GenerationRequest:
        logprobs = tops(False, self.top_logprobs) or self.logprobs
        if self.echo and logprobs is not None:
            told = "echo repeats the prompt, whose log probabilities the server does not compute"
            raise BadRequest(f"{told}; leave out echo or logprobs", "echo")
        return self.request(
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            logprobs=logprobs,
            echo=bool(self.echo),
        )


# ---- answers ------------------------------------------------------------------------------------


class ChatAnswer(Gathered):
    prefix = "chatcmpl-"
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        told = super().call(call)
        called = self.toolbox.called(told["function"]["name"])
        if called.kind is not CUSTOM:
            return told
        text = CUSTOM.arguments(told["function"]["arguments"])
        return {"id": told["id"], "type": "custom", "custom": {"name": called.name, "input": text}}

    def begin(self) -> list[str]:
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})]

    def piece(self, piece: Delta) -> list[str]:
        delta = _reasoned(piece.reasoning) | ({"content": piece.content} if piece.content else {})
        if piece.tool_calls:
            first = len(self.calls) - len(piece.tool_calls)
            calls = enumerate(piece.tool_calls, first)
            delta["tool_calls"] = [{"index": index, **each} for index, each in calls]
        choice: dict[str, Any] = {"delta": delta}
        if self.wants_logprobs and piece.logprobs:
            choice["logprobs"] = {"content": logprobs_of([*piece.logprobs]), "refusal": None}
        return [self._chunk(choice)] if delta or len(choice) > 1 else []

    def end(self) -> list[str]:
        frames = [self._chunk(self.last() | {"finish_reason": self.finish_reason})]
        if self.request.counted:
            whole = self._whole(self.chunk_object, [])
            frames.append(frame(whole | {"usage": _usage(self)}))
        return [*frames, frame("[DONE]")]

    def fail(self, failed: Failure) -> list[str]:
        return [frame(openai_error(failed)[1]), frame("[DONE]")]

    def body(self) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None} | self.choice()
        return self._whole(self.object, [choice]) | {"usage": _usage(self)}

    def last(self) -> dict[str, Any]:
        """The choice of a stream's last chunk."""
        return {"delta": {}}

    def choice(self) -> dict[str, Any]:
        """The choice of a whole answer."""
        content = self.content if self.content or not self.calls else None
        message = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoned(self.reasoning) | ({"tool_calls": self.calls} if self.calls else {})
        choice: dict[str, Any] = {"message": message}
        if self.wants_logprobs:
            choice["logprobs"] = {"content": logprobs_of(self.logprobs), "refusal": None}
        return choice

    @property
    def finish_reason(self) -> str:
        return self.reason

    def _whole(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A body around the choices."""
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**body, "system_fingerprint": FINGERPRINT, "choices": choices}

    def _chunk(self, choice: dict[str, Any]) -> str:
        """A frame with this one choice."""
        choice = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
        body = self._whole(self.chunk_object, [choice])
        return frame(body | {"usage": None} if self.request.counted else body)


class CompletionAnswer(ChatAnswer):
    """A plain completion: reasoning is text like any other, and nothing calls a tool."""

    prefix = "cmpl-"
    object = chunk_object = "text_completion"
    text = ""

    def begin(self) -> list[str]:
        return []

    def piece(self, piece: Delta) -> list[str]:
        text = piece.reasoning + piece.content
        choice: dict[str, Any] = {"text": text}
        if self.wants_logprobs and piece.logprobs:
            choice["logprobs"] = _in_lists([*piece.logprobs], len(self.text))
        self.text += text
        return [self._chunk(choice)] if text or len(choice) > 1 else []

    def last(self) -> dict[str, Any]:
        return {"text": ""}

    def choice(self) -> dict[str, Any]:
        logprobs = {"logprobs": _in_lists(self.logprobs, 0)} if self.wants_logprobs else {}
        return {"text": self.text, **logprobs}

    @property
    def finish_reason(self) -> str:
        return "length" if self.reason == "length" else "stop"


def _reasoned(text: str) -> dict[str, Any]:
    """Reasoning under the names that most clients read, and that mlx-lm's server writes."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _usage(answer: Gathered) -> dict[str, Any]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "kvlingo": extension(usage),
    }


def _in_lists(tokens: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """Log probabilities in lists, as completions have them; ``offset``: where the text begins."""
    offsets, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        offsets.append(offset)
        offset += len(decoder.decode(token.text))
    return {
        "tokens": [_shown(token.text) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [{_shown(text): finite(p) for text, _, p in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _shown(token: bytes) -> str:
    """A token's text, or its bytes as OpenAI's completions write them if it is no whole text."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


API = Api(("/v1/chat/completions", "/chat/completions"), ChatRequest, ChatAnswer, openai_error)
COMPLETIONS = Api(
    ("/v1/completions", "/completions"), CompletionRequest, CompletionAnswer, openai_error
)
