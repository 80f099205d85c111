"""OpenAI's chat completions, with the fields of mlx-lm's server."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from kvlingo_mlx.serving.messages import Delta, Failure, Finished, GenerationRequest, Message
from kvlingo_mlx.serving.wire import (
    Answer,
    BadRequest,
    frame,
    openai_error,
    openai_logprobs,
    openai_usage,
)
from kvlingo_mlx.serving.wire.answers import FINGERPRINT, Gathered
from kvlingo_mlx.serving.wire.content import (
    PARSED,
    Arguments,
    Function,
    Refusal,
    Schema,
    Text,
    Word,
    as_choice,
    assistant,
    call,
    chosen,
    in_parts,
    joined,
)
from kvlingo_mlx.serving.wire.reading import (
    CACHED,
    Api,
    Body,
    Name,
    Rules,
    ignored,
    only,
)
from kvlingo_mlx.serving.wire.sampling import Effort, Positive, Sampled, Stop, Tops, template

_OLD_TOOLS = "use tools and tool_choice"
_ONE = "a request gets one answer; send it again for another"
OPENAI: Rules = {
    **ignored("user safety_identifier prompt_cache_key prompt_cache_retention"),
    **ignored("prompt_cache_options"),
    "service_tier": only("all requests are served alike", "auto", "default"),
    "store": only("the server keeps no requests; leave it out", False),
    "moderation": only("the server has no such model"),
    "n": only(_ONE, 1),
}
MLX_LM: Rules = {
    **ignored("num_draft_tokens"),
    "draft_model": only("the server drafts with no other model", "default_model"),
    "adapters": only("fuse the adapter into a model, and serve that one"),
    "role_mapping": only("messages are written by the model's own chat template"),
}


# ---- requests -----------------------------------------------------------------------------------


class _Called(Body):
    rules: ClassVar[Rules] = PARSED
    name: Name
    arguments: Arguments


class _ToolCall(Body):
    rules: ClassVar[Rules] = {**PARSED, **ignored("index")}
    id: str = ""
    type: Literal["function"] = "function"
    function: _Called


_Texts = Annotated[list[Text], BeforeValidator(in_parts)]
_Part = Annotated[Text | Refusal, Field(discriminator="type")]


class _Instruction(Body):
    rules: ClassVar[Rules] = CACHED
    role: Literal["system", "developer", "user"]
    content: _Texts
    name: str | None = None

    def told(self) -> Message:
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": joined(self.content)}
        return message | ({"name": self.name} if self.name else {})


class _Assistant(Body):
    rules: ClassVar[Rules] = {
        **CACHED,
        **PARSED,
        **ignored("annotations"),
        "audio": only("the models here read text alone"),
        "function_call": only(_OLD_TOOLS),
    }
    role: Literal["assistant"]
    content: Annotated[list[_Part], BeforeValidator(in_parts)] = Field(default_factory=list)
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    name: str | None = None

    def told(self) -> Message:
        text = joined(self.content) or self.refusal or ""
        calls = [call(c.id, c.function.name, c.function.arguments) for c in self.tool_calls or []]
        message = assistant(text, self.reasoning_content or self.reasoning or "", calls)
        return {**message, **({"name": self.name} if self.name else {})}


class _Tool(Body):
    rules: ClassVar[Rules] = CACHED
    role: Literal["tool"]
    content: _Texts
    tool_call_id: str = ""
    name: str | None = None

    def told(self) -> Message:
        message = {"role": "tool", "content": joined(self.content)}
        message |= {"tool_call_id": self.tool_call_id}
        return message | ({"name": self.name} if self.name else {})


class _Declared(Body):
    rules: ClassVar[Rules] = CACHED
    type: Literal["function"]
    function: Function


class _Named(Body):
    name: Name


class _NamedTool(Body):
    type: Literal["function"]
    function: _Named


_Choice = Annotated[
    Word | _NamedTool | None, Field(discriminator="type"), BeforeValidator(as_choice)
]


class _Format(Body):
    type: Literal["text", "json_object"]


class _SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: Schema


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    rules: ClassVar[Rules] = ignored("include_obfuscation")
    include_usage: bool | None = None


class OpenAIRequest(Sampled):
    """What chat completions and completions have in common."""

    model: Name = "default_model"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    stop: Stop | None = None

    @property
    def counted(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class _Chat(OpenAIRequest):
    rules: ClassVar[Rules] = {
        **OPENAI,
        **MLX_LM,
        **ignored("metadata"),
        "functions": only(_OLD_TOOLS),
        "function_call": only(_OLD_TOOLS),
        "audio": only("the models here write text alone"),
        "modalities": only("the models here write text alone", ["text"]),
        "prediction": only("the server drafts from no text; leave it out"),
        "web_search_options": only("the server runs no tools itself; declare a function"),
        "verbosity": only("say in a message how long the answer should be", "medium"),
    }
    messages: Annotated[
        list[Annotated[_Instruction | _Assistant | _Tool, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    max_completion_tokens: Positive | None = None
    tools: list[_Declared] | None = None
    tool_choice: _Choice = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[_Format | _SchemaFormat | None, Field(discriminator="type")] = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def prefill(self) -> bool:
        """Whether the last message is to be gone on with."""
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise BadRequest(
                    "add_generation_prompt is false, expected true; give continue_final_message "
                    "to go on with the last message",
                    "add_generation_prompt",
                )
            return False
        if self.add_generation_prompt or self.messages[-1].role != "assistant":
            raise BadRequest(
                "continue_final_message needs a last message of role assistant, and no "
                "add_generation_prompt; change one of them",
                "continue_final_message",
            )
        return True

    def schema_asked(self) -> dict[str, Any] | None:
        """The schema of the answer; {} for any object."""
        asked = self.response_format
        if isinstance(asked, _SchemaFormat):
            return asked.json_schema.schema_
        return {} if asked and asked.type == "json_object" else None

    def ask(self) -> GenerationRequest:
        tools = tuple(tool.function.told() for tool in self.tools or [])
        choice = self.tool_choice
        named = choice.function.name if isinstance(choice, _NamedTool) else None
        word = choice.type if isinstance(choice, Word) else None
        return GenerationRequest(
            model=self.model,
            messages=tuple(message.told() for message in self.messages),
            tools=tools,
            tool_choice=chosen(word, tools, named),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            schema=self.schema_asked(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(self.stop or ()),
            logprobs=tops(self.logprobs, self.top_logprobs),
            template=template(self.reasoning_effort, self.chat_template_kwargs),
            prefill=self.prefill(),
            **self.for_engine(),
        )

    def answer(self, ask: GenerationRequest) -> Answer:
        return _Answer(ask, "chatcmpl-", self.counted)


def tops(wanted: bool | None, top: int | None) -> int | None:
    """As mlx-lm's server has it: the likeliest tokens may be asked for alone."""
    if top is not None and top > 0:
        return top
    return 0 if wanted else None


# ---- answers ------------------------------------------------------------------------------------


class OpenAIAnswer(Gathered):
    """What answers of chat completions and completions have in common."""

    object = chunk_object = ""

    def __init__(self, ask: GenerationRequest, prefix: str, counted: bool) -> None:
        super().__init__(ask, prefix)
        self.counted = counted

    def whole(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A body around the choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def chunk(self, choice: dict[str, Any], reason: str | None = None) -> str:
        """A frame with this one choice."""
        choice = {"index": 0, "logprobs": None, "finish_reason": reason, **choice}
        body = self.whole(self.chunk_object, [choice])
        return frame(body | {"usage": None} if self.counted else body)

    def last(self, choice: dict[str, Any], reason: str) -> list[str]:
        """The frames that end a stream."""
        frames = [self.chunk(choice, reason)]
        if self.counted:
            whole = self.whole(self.chunk_object, [])
            frames.append(frame(whole | {"usage": openai_usage(self.usage)}))
        return [*frames, frame("[DONE]")]

    def fail(self, failed: Failure) -> list[str]:
        return [frame(openai_error(failed)[1]), frame("[DONE]")]


class _Answer(OpenAIAnswer):
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[str]:
        return [self.chunk({"delta": {"role": "assistant", "content": ""}})]

    def piece(self, piece: Delta) -> list[str]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta |= _reasoned(piece.reasoning)
        if piece.content:
            delta["content"] = piece.content
        if count := len(piece.tool_calls):
            first = len(self.calls) - count
            calls = self.calls[first:]
            delta["tool_calls"] = [{"index": first + i, **c} for i, c in enumerate(calls)]
        choice: dict[str, Any] = {"delta": delta}
        if self.wants_logprobs and piece.logprobs:
            choice["logprobs"] = {"content": openai_logprobs([*piece.logprobs]), "refusal": None}
        return [self.chunk(choice)] if delta or "logprobs" in choice else []

    def end(self, ended: Finished) -> list[str]:
        return self.last({"delta": {}}, ended.reason)

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        content = self.content if self.content or not self.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message |= _reasoned(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.reason}
        if self.wants_logprobs:
            choice["logprobs"] = {"content": openai_logprobs(self.logprobs), "refusal": None}
        return self.whole(self.object, [choice]) | {"usage": openai_usage(self.usage)}


def _reasoned(text: str) -> dict[str, str]:
    """Reasoning under the names that most clients read, and that mlx-lm's server writes."""
    return {"reasoning_content": text, "reasoning": text}


API = Api(("/v1/chat/completions", "/chat/completions"), _Chat, openai_error)
