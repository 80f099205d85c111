"""What messages and tools are made of in several APIs: texts in parts, tool calls, schemas."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.messages import Message, Tool
from kvlingo_mlx.serving.wire import BadRequest
from kvlingo_mlx.serving.wire.reading import CACHED, Body, Name, Rules, fault, ignored, only, shown

CHOICES = ("auto", "none", "required")


# ---- texts --------------------------------------------------------------------------------------


# Clients' own libraries add these to answers that they have parsed, and send them back.
PARSED = ignored("parsed parsed_output parsed_arguments provider_specific_fields")


class Text(Body):
    """A part of a content that is text."""

    rules: ClassVar[Rules] = {**CACHED, **PARSED, **ignored("annotations citations logprobs")}
    type: Literal["text", "input_text", "output_text"]
    text: str


class Refusal(Body):
    """A part of an earlier answer that says why there is none."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def in_parts(found: Any) -> Any:
    """A text as one part, null as none; any list as it is."""
    if isinstance(found, str):
        return [{"type": "text", "text": found}]
    if found is None or isinstance(found, list):
        return found or []
    raise PydanticCustomError("expected", "a text or a list of parts")


def joined(parts: list[Any], between: str = "") -> str:
    """The texts of parts that have one."""
    return between.join(part.text for part in parts)


# ---- tool calls ---------------------------------------------------------------------------------


def _arguments(found: Any) -> Any:
    """A call's arguments as the JSON text that they came as, once that is one of an object."""
    if isinstance(found, dict):
        return json.dumps(found, ensure_ascii=False)
    if not isinstance(found, str):
        return found
    try:
        value = json.loads(found or "{}")
    except (ValueError, RecursionError):
        raise PydanticCustomError("expected", "the JSON text of an object") from None
    if not isinstance(value, dict) or fault(value):
        raise PydanticCustomError("expected", "the JSON text of an object")
    return found or "{}"


Arguments = Annotated[str, BeforeValidator(_arguments)]


def call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in the form of OpenAI's chat."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def assistant(text: str, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    """A model's message in the form of OpenAI's chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


# ---- tools --------------------------------------------------------------------------------------


class Described(Body):
    """A tool: what it is called, and what it does."""

    rules: ClassVar[Rules] = {
        **CACHED,
        **ignored("output_schema eager_input_streaming"),
        "defer_loading": only("all tools are shown to the model", False),
        "async": only("a call is answered by the client", False),
        "allowed_callers": only("only the model calls tools", ["direct"], []),
        "input_examples": only("put the examples into the description", []),
    }
    name: Name
    description: str | None = None
    strict: bool | None = None

    def announced(self, parameters: dict[str, Any] | None) -> Tool:
        """The tool in the form of OpenAI's chat; ``strict`` only where it is true."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = parameters or {"type": "object", "properties": {}}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class Function(Described):
    """A tool, and what it takes."""

    parameters: dict[str, Any] | None = None

    def told(self) -> Tool:
        """The tool in the form of OpenAI's chat."""
        return self.announced(self.parameters)


class Schema(Body):
    """A JSON schema that the answer must fit."""

    rules: ClassVar[Rules] = ignored("description strict")  # an answer is always held to it
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class Word(Body):
    """A choice of tools in a word."""

    type: Literal["auto", "none", "required"]


def as_choice(found: Any) -> Any:
    """A word as the object that says the same."""
    return {"type": found} if isinstance(found, str) else found


def chosen(choice: str | None, tools: tuple[Tool, ...], named: str | None = None) -> str:
    """``GenerationRequest.tool_choice``: a word of CHOICES, or the name of one of these tools.

    Raises:
        BadRequest: A call is demanded of a tool that is not there.
    """
    names = [tool["function"]["name"] for tool in tools]
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    message, param = None, "tool_choice"
    if count > 1:
        message = f"{count} tools are called {shown(name)}, expected one; rename them"
        param = "tools"
    elif named in CHOICES:
        message = f"tool_choice names {shown(named)}, which is also a choice; rename the tool"
    elif named is not None and named not in names:
        message = f"tool_choice names {shown(named)}, which is not in tools; add it there"
    elif choice == "required" and not tools:
        message = "tool_choice demands a call, but there are no tools; add one"
    if message is not None:
        raise BadRequest(printable(message), param)
    return named or choice or "auto"
