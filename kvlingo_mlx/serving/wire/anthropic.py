"""Anthropic's messages, and the counting of their tokens: what requests say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from kvlingo_mlx.serving.messages import Event, GenerationRequest, Message, TokenCount, Tool
from kvlingo_mlx.serving.wire import Answer, BadRequest, anthropic_error
from kvlingo_mlx.serving.wire.anthropic_answer import AnthropicAnswer
from kvlingo_mlx.serving.wire.content import (
    Described,
    Schema,
    Text,
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
from kvlingo_mlx.serving.wire.sampling import Effort, Positive, Sampled, Stop, template

_DIRECT = only("only the model calls tools", {"type": "direct"})

# ---- content ------------------------------------------------------------------------------------


class _Thinking(Body):
    rules: ClassVar[Rules] = {**CACHED, **ignored("signature")}
    type: Literal["thinking"]
    thinking: str


class _Redacted(Body):
    rules: ClassVar[Rules] = ignored("data")  # only the model that wrote it can read it
    type: Literal["redacted_thinking"]


class _ToolUse(Body):
    rules: ClassVar[Rules] = {
        **CACHED,
        "caller": _DIRECT,
        "toolset_name": only("name the tool alone"),
    }
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


_Texts = Annotated[list[Text], BeforeValidator(in_parts)]


class _ToolResult(Body):
    rules: ClassVar[Rules] = CACHED
    type: Literal["tool_result"]
    tool_use_id: Name
    content: _Texts = Field(default_factory=list)
    is_error: bool | None = None

    def told(self) -> Message:
        text = joined(self.content, "\n")
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


_UserPart = Annotated[Text | _ToolResult, Field(discriminator="type")]
_OwnPart = Annotated[Text | _Thinking | _Redacted | _ToolUse, Field(discriminator="type")]


class _User(Body):
    role: Literal["user"]
    content: Annotated[list[_UserPart], BeforeValidator(in_parts)]

    def told(self) -> list[Message]:
        """Tool results, each a message, and the texts between them, in order."""
        messages: list[Message] = []
        texts: list[Text] = []
        for part in self.content:
            if isinstance(part, Text):
                texts.append(part)
                continue
            messages += _said("user", texts) if texts else []
            messages.append(part.told())
            texts = []
        return messages + (_said("user", texts) if texts or not messages else [])


class _System(Body):
    role: Literal["system"]
    content: _Texts

    def told(self) -> list[Message]:
        return _said("system", self.content)


class _Assistant(Body):
    role: Literal["assistant"]
    content: Annotated[list[_OwnPart], BeforeValidator(in_parts)]

    def told(self) -> list[Message]:
        # What a model wrote in one go comes back in blocks, without a sign between them.
        thoughts = "".join(p.thinking for p in self.content if isinstance(p, _Thinking))
        calls = [
            call(p.id, p.name, json.dumps(p.input, ensure_ascii=False))
            for p in self.content
            if isinstance(p, _ToolUse)
        ]
        return [
            assistant(joined([p for p in self.content if isinstance(p, Text)]), thoughts, calls)
        ]


def _said(role: str, texts: list[Text]) -> list[Message]:
    """A message of several blocks, each of which begins a line; no empty one of the system."""
    text = joined(texts, "\n")
    return [{"role": role, "content": text}] if text or (role == "user") else []


# ---- tools, thinking, formats -------------------------------------------------------------------


class _Tool(Described):
    type: Literal["custom"] | None = None
    input_schema: dict[str, Any]

    def told(self) -> Tool:
        return self.announced(self.input_schema)


class _Choice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class _NamedChoice(Body):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class _ThinkingSetting(Body):
    rules: ClassVar[Rules] = ignored("budget_tokens")  # how long it thinks, a model decides
    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class _Format(Schema):
    type: Literal["json_schema"]


class _Output(Body):
    rules: ClassVar[Rules] = {"task_budget": only("give max_tokens")}
    effort: Effort | None = None
    format: _Format | None = None


class _Edit(Body):
    rules: ClassVar[Rules] = ignored("keep")  # as the chat template says
    type: Literal["clear_thinking_20251015"]


class _Edits(Body):
    """What may be asked to be taken out of the context: thinking, which a template does anyway."""

    edits: list[_Edit] = Field(default_factory=list)


# ---- requests -----------------------------------------------------------------------------------

ANTHROPIC: Rules = {
    **CACHED,
    **ignored("metadata user_profile_id workspace_id diagnostics betas"),
    "service_tier": only("all requests are served alike", "auto", "standard_only"),
    "speed": only("all requests are served alike", "standard"),
    "inference_geo": only("the server answers where it runs"),
    "container": only("the server runs no code; declare a function"),
    "mcp_servers": only("the server calls no other one; declare its functions as tools", []),
    "fallbacks": only("ask another model yourself", []),
    "fallback_credit_token": only("the server charges nothing"),
    "billing_policy": only("the server charges nothing"),
    "compaction": only("leave out of the messages what shall be forgotten"),
    "thread": only("the server keeps no requests; send the whole conversation each time"),
}


class _Prompt(Sampled):
    rules: ClassVar[Rules] = ANTHROPIC
    model: Name
    messages: Annotated[
        list[Annotated[_User | _Assistant | _System, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: _Texts = Field(default_factory=list)
    tools: list[_Tool] | None = None
    tool_choice: Annotated[_Choice | _NamedChoice | None, Field(discriminator="type")] = None
    thinking: _ThinkingSetting | None = None
    output_config: _Output | None = None
    output_format: _Format | None = None
    context_management: _Edits | None = None

    def told(self) -> tuple[Message, ...]:
        """The conversation in the form of OpenAI's chat."""
        messages = [part for message in self.messages for part in message.told()]
        return (*_said("system", self.system), *messages)

    def goes_on(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self.messages[-1]
        if not isinstance(last, _Assistant):
            return False
        if any(isinstance(part, _ToolUse) for part in last.content):
            raise BadRequest(
                "the last message calls a tool, expected a tool_result after it; add it",
                f"messages.{len(self.messages) - 1}.content",
            )
        return True

    def choice(self, tools: tuple[Tool, ...]) -> str:
        """``GenerationRequest.tool_choice``."""
        choice = self.tool_choice
        if isinstance(choice, _NamedChoice):
            return chosen(None, tools, choice.name)
        return chosen({"any": "required"}.get(choice.type, choice.type) if choice else None, tools)

    def arguments(self) -> dict[str, Any]:
        """The chat template's arguments."""
        given = dict(self.chat_template_kwargs or {})
        if self.thinking and self.thinking.type != "adaptive":
            given = {"enable_thinking": self.thinking.type == "enabled"} | given
        return template(self.output_config.effort if self.output_config else None, given)

    def ask(self) -> GenerationRequest:
        tools = tuple(tool.told() for tool in self.tools or [])
        asked = (self.output_config and self.output_config.format) or self.output_format
        alone = self.tool_choice and self.tool_choice.disable_parallel_tool_use
        return GenerationRequest(
            model=self.model,
            messages=self.told(),
            tools=tools,
            tool_choice=self.choice(tools),
            parallel_tool_calls=not alone,
            schema=asked.schema_ if asked else None,
            count=True,
            template=self.arguments(),
            prefill=self.goes_on(),
            **self.for_engine(),
        )

    def answer(self, ask: GenerationRequest) -> Answer:
        return _Count()


class _Request(_Prompt):
    max_tokens: Positive
    stop_sequences: Stop | None = None
    stream: bool | None = None

    def ask(self) -> GenerationRequest:
        stop = tuple(self.stop_sequences or ())
        return replace(super().ask(), count=False, max_tokens=self.max_tokens, stop=stop)

    def answer(self, ask: GenerationRequest) -> Answer:
        hidden = bool(self.thinking and self.thinking.display == "omitted")
        return AnthropicAnswer(ask, hidden)


class _Count:
    """The number of a prompt's tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def take(self, event: Event) -> list[str]:
        if isinstance(event, TokenCount):
            self.tokens = event.tokens
        return []

    def keep_alive(self) -> str:
        return ""

    def body(self) -> dict[str, Any]:
        return {"input_tokens": self.tokens}


API = Api(("/v1/messages",), _Request, anthropic_error)
COUNT = Api(("/v1/messages/count_tokens",), _Prompt, anthropic_error)
