"""OpenAI's responses: what requests say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from kvlingo_mlx.serving.messages import GenerationRequest, Message
from kvlingo_mlx.serving.wire import Answer, openai_error
from kvlingo_mlx.serving.wire.chat import OPENAI, tops
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
from kvlingo_mlx.serving.wire.reading import Api, Body, Name, Rules, ignored, only
from kvlingo_mlx.serving.wire.responses_answer import ResponsesAnswer
from kvlingo_mlx.serving.wire.sampling import Effort, Positive, Sampled, Tops, template

_KEPT = "the server keeps no responses; send the whole conversation as input"

# ---- items --------------------------------------------------------------------------------------

_ITEM = ignored("id status")
_Part = Annotated[Text | Refusal, Field(discriminator="type")]
_Parts = Annotated[list[_Part], BeforeValidator(in_parts)]


class _Message(Body):
    rules: ClassVar[Rules] = {**_ITEM, **ignored("phase")}
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: _Parts


class _Call(Body):
    rules: ClassVar[Rules] = {
        **_ITEM,
        **PARSED,
        "caller": only("only the model calls tools", {"type": "direct"}),
        "namespace": only("name the tool alone"),
    }
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Arguments


class _Output(Body):
    rules: ClassVar[Rules] = {
        **_ITEM,
        **ignored("name"),
        "caller": only("only the model calls tools", {"type": "direct"}),
    }
    type: Literal["function_call_output"]
    call_id: Name
    output: _Parts


class _Thought(Body):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class _Reasoning(Body):
    rules: ClassVar[Rules] = {**_ITEM, **ignored("encrypted_content")}
    type: Literal["reasoning"]
    summary: list[_Thought] = Field(default_factory=list)
    content: list[_Thought] | None = None


def _kind(item: Any) -> str | None:
    """What an item is; messages may leave their type out."""
    if isinstance(item, dict):
        kind = item.get("type", "message" if "role" in item else None)
        return kind if isinstance(kind, str) else None
    return getattr(item, "type", None)


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]


def _in_items(found: Any) -> Any:
    return [{"role": "user", "content": found}] if isinstance(found, str) else found


def told(items: Iterable[_Item]) -> list[Message]:
    """Items as messages: reasoning, text and calls of one answer are one message."""
    messages: list[Message] = []
    answer: list[_Item] = []
    for item in items:
        if isinstance(item, _Output):
            content = joined(item.output)
            answer = _finish(answer, messages)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, _Message) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            answer = _finish(answer, messages)
            messages.append({"role": role, "content": joined(item.content)})
        else:
            if _begins(item, answer):
                answer = _finish(answer, messages)
            answer.append(item)
    _finish(answer, messages)
    return messages


def _begins(item: _Item, answer: list[_Item]) -> bool:
    """Whether an item of a model begins another answer than these."""
    if isinstance(item, _Reasoning):
        return any(not isinstance(part, _Reasoning) for part in answer)
    return isinstance(item, _Message) and any(isinstance(part, _Message) for part in answer)


def _finish(answer: list[_Item], messages: list[Message]) -> list[_Item]:
    """Add the answer's message, and begin an empty one."""
    if answer:
        thoughts = (p.content or p.summary for p in answer if isinstance(p, _Reasoning))
        texts = (joined(p.content) for p in answer if isinstance(p, _Message))
        calls = [call(p.call_id, p.name, p.arguments) for p in answer if isinstance(p, _Call)]
        reasoning = "".join(thought.text for part in thoughts for thought in part)
        messages.append(assistant("".join(texts), reasoning, calls))
    return []


# ---- requests -----------------------------------------------------------------------------------


class _Tool(Function):
    type: Literal["function"]


class _NamedTool(Body):
    type: Literal["function"]
    name: Name


_Choice = Annotated[
    Word | _NamedTool | None, Field(discriminator="type"), BeforeValidator(as_choice)
]


class _Plain(Body):
    type: Literal["text", "json_object"]


class _Schema(Schema):
    type: Literal["json_schema"]


class _TextSetting(Body):
    rules: ClassVar[Rules] = {
        "verbosity": only("say in a message how long the answer should be", "medium"),
    }
    format: Annotated[_Plain | _Schema | None, Field(discriminator="type")] = None


class _ReasoningSetting(Body):
    rules: ClassVar[Rules] = {
        **ignored("summary generate_summary"),
        "context": only("the chat template says which reasoning is shown", "auto"),
        "mode": only("models have one mode here", "standard"),
    }
    effort: Effort | None = None


class _StreamOptions(Body):
    rules: ClassVar[Rules] = ignored("include_obfuscation")


class _Request(Sampled):
    rules: ClassVar[Rules] = {
        **OPENAI,
        **ignored("client_metadata max_tool_calls"),
        "previous_response_id": only(_KEPT),
        "conversation": only(_KEPT),
        "prompt": only("the server keeps no prompts; send instructions and input"),
        "background": only("an answer is sent as it is made", False),
        "background_options": only("an answer is sent as it is made"),
        "context_management": only("leave out of the input what shall be forgotten", []),
        "truncation": only("a conversation that is too long is refused", "disabled"),
        "access_programs": only("the server has no such programs"),
        "image": only("the models here write text alone"),
    }
    model: Name
    input: Annotated[Annotated[list[_Item], Field(min_length=1)], BeforeValidator(_in_items)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice = None
    parallel_tool_calls: bool | None = None
    text: _TextSetting | None = None
    reasoning: _ReasoningSetting | None = None
    top_logprobs: Tops | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = (
        None
    )

    def told(self) -> tuple[Message, ...]:
        """The conversation in the form of OpenAI's chat."""
        first: list[Message] = []
        if self.instructions:
            first = [{"role": "system", "content": self.instructions}]
        return (*first, *told(self.input))

    def schema_asked(self) -> dict[str, Any] | None:
        """The schema of the answer; {} for any object."""
        asked = self.text.format if self.text else None
        if isinstance(asked, _Schema):
            return asked.schema_
        return {} if asked and asked.type == "json_object" else None

    def ask(self) -> GenerationRequest:
        tools = tuple(tool.told() for tool in self.tools or [])
        choice = self.tool_choice
        named = choice.name if isinstance(choice, _NamedTool) else None
        word = choice.type if isinstance(choice, Word) else None
        effort = self.reasoning.effort if self.reasoning else None
        wanted = "message.output_text.logprobs" in (self.include or [])
        return GenerationRequest(
            model=self.model,
            messages=self.told(),
            tools=tools,
            tool_choice=chosen(word, tools, named),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            schema=self.schema_asked(),
            max_tokens=self.max_output_tokens,
            logprobs=tops(wanted, self.top_logprobs),
            template=template(effort, self.chat_template_kwargs),
            **self.for_engine(),
        )

    def answer(self, ask: GenerationRequest) -> Answer:
        return ResponsesAnswer(ask, self.echoed())

    def _choice_echoed(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, _NamedTool):
            return choice.model_dump()
        return choice.type if choice else "auto"

    def echoed(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        asked = self.model_dump(
            mode="json",
            by_alias=True,
            include={"instructions", "max_output_tokens", "tools", "text"},
        )
        asked["text"] = {"format": (asked["text"] or {}).get("format") or {"type": "text"}}
        return asked | {
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None},
            "temperature": self.temperature,
            "tool_choice": self._choice_echoed(),
            "tools": asked["tools"] or [],
            "top_p": self.top_p,
        }


API = Api(("/v1/responses", "/responses"), _Request, openai_error)
