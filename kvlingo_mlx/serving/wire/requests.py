"""What requests of all APIs have in common, and how JSON becomes one: strictly, by name."""

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvlingo_mlx.serving.messages import MOST, Failure, GenerationRequest, Message, Sampling
from kvlingo_mlx.serving.wire import BadRequest, oddities, shown
from kvlingo_mlx.serving.wire.answers import Gathered
from kvlingo_mlx.serving.wire.forms import schema_of, sendable
from kvlingo_mlx.serving.wire.oddities import UNSUPPORTED, Rules, meaning
from kvlingo_mlx.serving.wire.tools import Toolbox

LONGEST = 600  # characters of a refusal
Name = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """An object in a request: exact types, no unknown fields, and rules for known ones.

    Null is as if the field were not there.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    rules: ClassVar[Rules] = {}
    aliases: ClassVar[Mapping[str, str]] = {}  # other servers' names of fields

    @model_validator(mode="before")
    @classmethod
    def _follow_rules(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        fields = cls.model_fields
        needed = {name for name in found.keys() & fields.keys() if fields[name].is_required()}
        named = {cls.aliases[name]: found[name] for name in found.keys() & cls.aliases.keys()}
        own = {name: value for name, value in found.items() if name not in cls.aliases}
        meant = {name: meaning(name, value) for name, value in {**named, **own}.items()}
        kept = {name: v for name, v in meant.items() if v is not None or name in needed}
        for name in kept.keys() & cls.rules.keys():
            rule, value = cls.rules[name], kept.pop(name)
            if rule is not None and (why := rule.refusal(value)):
                raise PydanticCustomError("rule", "{why}", {"field": name, "why": why})
        return kept


def _to_list(found: Any) -> Any:
    listed = [found] if isinstance(found, str) else found
    return [t for t in listed if t not in ("", None)] if isinstance(listed, list) else listed


def _template(found: Any) -> Any:
    if isinstance(found, dict) and (own := sorted(found.keys() & set(_TEMPLATE_OWN))):
        raise PydanticCustomError("template", "{name} is set by the server", {"name": own[0]})
    return found


_TEMPLATE_OWN = """
    messages conversation tools documents chat_template add_generation_prompt tokenize padding
    continue_final_message truncation max_length return_tensors return_dict tokenizer_kwargs
    return_assistant_tokens_mask
""".split()
Positive = Annotated[int, Field(ge=1, le=MOST)]
# Each is looked for at every token.
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = Annotated[list[StopText], Field(max_length=64), BeforeValidator(_to_list)]
Tops = Annotated[int, Field(ge=-1, le=20)]  # -1 is mlx-lm's "none"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(Body):
    """How a model reasons, as OpenAI's responses and OpenRouter have it."""

    rules = oddities.REASONING_SETTING
    effort: Effort | None = None
    enabled: bool | None = None


SWITCHED = {"enabled": True, "disabled": False}  # otherwise the model decides


class Thinking(Body):
    """How a model reasons, as Anthropic has it."""

    rules = oddities.THINKING_SETTING
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class Extension(Body):
    """``kvlingo``: what only this server has."""

    strategy: Literal["translate", "reread"] | None = None  # None: as the server's policy says
    pin: bool = False  # whether the conversation stays in memory


class Sampled(Sampling, Body):
    """What requests of all APIs have in common."""

    model: Name
    stream: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template)] = None
    kvlingo: Extension = Extension()

    def ask(self) -> GenerationRequest:
        """The request for the engine."""
        raise NotImplementedError

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        return Toolbox([])

    def request(self, **own: Any) -> GenerationRequest:
        """The request for the engine, of which the API gives the rest."""
        sampling = {name: getattr(self, name) for name in Sampling.model_fields}
        return GenerationRequest(
            model=self.model,
            sampling=Sampling.model_construct(**sampling),
            strategy=self.kvlingo.strategy,
            pin=self.kvlingo.pin,
            **own,
        )


class Conversing(Sampled):
    """What requests that give a whole conversation have in common."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        return Toolbox(self.tools or [])

    @property
    def effort(self) -> str | None:
        """How much the model reasons."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    def template(self) -> dict[str, Any]:
        """Arguments of the chat template, of which those that it calls so itself count most."""
        switches = (
            self.enable_thinking,
            SWITCHED.get(self.thinking.type) if self.thinking else None,
            self.reasoning.enabled if self.reasoning else None,
            False if self.effort == "none" else None,
        )
        thinks = next((switch for switch in switches if switch is not None), None)
        asked = {"reasoning_effort": self.effort, "enable_thinking": thinks}
        given = {name: value for name, value in asked.items() if value is not None}
        return given | (self.chat_template_kwargs or {})

    def conversation(self) -> tuple[Message, ...]:
        """The messages in the form of OpenAI's chat."""
        raise NotImplementedError

    def goes_on(self, messages: tuple[Message, ...]) -> bool:
        """Whether the last of all messages is the beginning of the answer."""
        return False

    def converse(self, form: tuple[str, Any], **own: Any) -> GenerationRequest:
        """The request for the engine.

        Args:
            form: What the answer must be, after the name of its field.
            own: What else there is of the request.
        """
        tools, choice = self.toolbox.choose(self.tool_choice)
        messages = self.conversation()
        goes_on = self.goes_on(messages)
        return self.request(
            messages=messages[:-1] if goes_on else messages,
            begun=messages[-1]["content"] if goes_on else "",
            tools=tools,
            tool_choice=choice,
            schema=schema_of(form[1], form[0]),
            template=self.template(),
            **{"parallel_tool_calls": self.parallel_tool_calls is not False, **own},
        )


@dataclass(frozen=True)
class Api:
    """An API: where it is asked, what requests and answers are, and how it tells of a failure."""

    paths: tuple[str, ...]
    request: type[Sampled]
    answer: type[Gathered]
    error: Callable[[Failure], tuple[int, dict[str, Any]]]  # status and body
    streamed: tuple[str, ...] = ()  # kinds of failures that a stream tells, whose status is 200

    def read(self, body: Any) -> Gathered:
        """What a parsed JSON body of any shape asks for, and is to become its answer.

        Raises:
            BadRequest: It is not a request of this API, or asks for what the server cannot do.
        """
        if not isinstance(body, dict):
            raise BadRequest(f"the body is {shown(body)}, expected a JSON object")
        if not sendable(body):
            raise BadRequest("the body holds what JSON in UTF-8 cannot, or is nested too deeply")
        try:
            request = self.request.model_validate(body)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False), self.request) from None
        return self.answer(request)


def _refusal(errors: list[ErrorDetails], kind: type[Body]) -> BadRequest:
    """The first thing that is wrong, by pydantic's words; what is of a wrong kind counts first."""
    error = min(errors, key=lambda e: e["loc"][-1:] != ("type",))
    names = [str(place)[:64] for place in error["loc"]]
    if error["type"] == "rule":
        names.append(error["ctx"]["field"])
    path, found, message = ".".join(names), error["input"], error["msg"]
    if error["type"] == "rule":
        text = f"{path} {message}"
    elif error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path, [*kind.model_fields, *kind.rules], 1)
        text = f"{path!r}: {message}; {f'did you mean {near[0]}?' if near else 'leave it out'}"
    elif error["type"] == "missing":
        text = f"{path}: {message}"
    else:
        text = f"{path} is {shown(found)}: {message}"
    if isinstance(found, str) and (name := re.sub(r"_2\d{7}$", "", found)) in UNSUPPORTED:
        text += f"; {UNSUPPORTED[name]}"
    return BadRequest(text[:LONGEST], path)
