"""Reading JSON bodies strictly: what is not supported is refused by name."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.messages import Failure, GenerationRequest
from kvlingo_mlx.serving.wire import Answer, BadRequest, Incoming

DEEPEST = 64  # lists and objects within one another
Name = Annotated[str, Field(min_length=1)]


# ---- fields that have no effect, or only with some values ---------------------------------------


@dataclass(frozen=True)
class Only:
    """A field that is refused but for these values, which are what we do anyway, or null."""

    why: str
    values: tuple[Any, ...]

    def refusal(self, path: str, value: Any) -> str | None:
        if any(type(value) is type(taken) and value == taken for taken in self.values):
            return None
        if not self.values:
            return f"{path} is not supported; {self.why}"
        expected = " or ".join(map(json.dumps, self.values))
        return f"{path} is {shown(value)}, expected {expected}; {self.why}"


Rules = Mapping[str, Only | None]  # None: the field changes nothing, whatever it says


def only(why: str, *values: Any) -> Only:
    """A field that may have these values alone; without any, one that we cannot honour."""
    return Only(why, values)


def ignored(names: str) -> Rules:
    """Fields that change nothing in an answer."""
    return dict.fromkeys(names.split())


CACHED = ignored("cache_control")  # the server keeps every conversation's cache by itself


class Body(BaseModel):
    """An object in a request: exact types, no unknown fields, and rules for known ones.

    Null is as if the field were not there.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    rules: ClassVar[Rules] = {}
    required: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        fields = cls.model_fields.items()
        cls.required = frozenset(f.alias or name for name, f in fields if f.is_required())

    @model_validator(mode="before")
    @classmethod
    def _follow_rules(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        kept = {name: v for name, v in found.items() if v is not None or name in cls.required}
        for name in kept.keys() & cls.rules.keys():
            rule, value = cls.rules[name], kept.pop(name)
            if rule is not None and (why := rule.refusal("{path}", value)):
                raise PydanticCustomError("rule", "{name}", {"name": name, "why": why})
        return kept


class RequestBody(Body):
    """The body of a request."""

    def ask(self) -> GenerationRequest:
        """The request for the engine."""
        raise NotImplementedError

    def answer(self, ask: GenerationRequest) -> Answer:
        """What is to become its answer."""
        raise NotImplementedError


@dataclass(frozen=True)
class Api:
    """An API: where it is asked, what requests are, and how it tells of a failure."""

    paths: tuple[str, ...]
    request: type[RequestBody]
    error: Callable[[Failure], tuple[int, dict[str, Any]]]  # status and body

    def read(self, body: Any) -> Incoming:
        """What a parsed JSON body of any shape asks for.

        Raises:
            BadRequest: It is not a request of this API, or asks for what we cannot do.
        """
        request = read_body(self.request, body)
        ask = request.ask()
        return Incoming(ask, bool(getattr(request, "stream", False)), request.answer(ask))


# ---- reading ------------------------------------------------------------------------------------

Read = TypeVar("Read", bound=Body)


def read_body(kind: type[Read], body: Any) -> Read:
    """A parsed JSON body as this kind of request; raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {shown(body)}, expected a JSON object")
    if found := fault(body):
        raise BadRequest(f"the body holds {found}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False), body, kind) from None


def fault(value: Any) -> str | None:
    """What no tokenizer or JSON can hold, or what is nested too deeply; None if all is well."""
    texts: list[str] = []
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                texts.append(item)
            elif isinstance(item, dict):
                texts += item
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, float) and not math.isfinite(item):
                return f"the number {item}, which is not JSON; give a finite one"
            elif isinstance(item, int) and item.bit_length() > 64:
                return "a whole number of more than 64 bits; give a smaller one"
        level = inner
    if level:
        return f"lists and objects nested more than {DEEPEST} deep; make it flatter"
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character; leave it out"
    return None


def shown(value: Any) -> str:
    """A value in a message: itself if it is short, else what kind of value it is."""
    if isinstance(value, str | bool | int | float) and len(text := json.dumps(value)) <= 40:
        return text
    kinds = {str: "a long text", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a long number")


def _refusal(errors: list[ErrorDetails], body: Any, kind: type[Body]) -> BadRequest:
    """The first thing that is wrong, in one line; what is of a wrong kind counts first."""
    error = min(errors, key=lambda e: e["loc"][-1:] not in (("type",), ("role",)))
    place, here = _place(error["loc"], body)
    name = _field(error)
    path = f"{place}.{name}" if place and name else place or name
    message = printable(_message(error, path, kind))
    inside = isinstance(here, dict) or not place
    return BadRequest(message, printable(path if inside else place) or None)


def _place(places: tuple[int | str, ...], body: Any) -> tuple[str, Any]:
    """Where an error is in the body, without the names of alternatives that pydantic adds."""
    names: list[str] = []
    here = body
    for place in places:
        inside = isinstance(here, dict) and place in here
        if inside or (isinstance(here, list) and isinstance(place, int) and place < len(here)):
            here = here[place]
            names.append(str(place)[:64])
    return ".".join(names), here


def _field(error: ErrorDetails) -> str:
    """The field of the place's object that an error is about, where it is about one."""
    context = error.get("ctx", {})
    if error["type"] == "rule":
        return str(context["name"])
    if error["type"] == "missing":
        return str(error["loc"][-1])
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return "role" if context["discriminator"] == "'role'" else "type"
    return ""


def _message(error: ErrorDetails, path: str, kind: type[Body]) -> str:
    context, what = error.get("ctx", {}), path or "the body"
    match error["type"]:
        case "rule":
            return str(context["why"]).replace("{path}", path)
        case "missing" | "union_tag_not_found":
            return f"{what} is missing; add it to the request"
        case "extra_forbidden":
            near = difflib.get_close_matches(path, [*kind.model_fields, *kind.rules], 1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            what = path if path.strip() else repr(path)
            return f"{what} is not a field that the server knows; {hint}"
        case "union_tag_invalid":
            found, expected = context["tag"], context["expected_tags"]
        case "too_short":
            found, expected = None, f"at least {context['min_length']} in it"
        case "expected":
            found, expected = error["input"], error["msg"]
        case _:
            found = error["input"]
            expected = error["msg"].removeprefix("Input should be ").removeprefix("String should ")
    message = f"{what} is {'empty' if found is None else shown(found)}, expected {expected}"
    why = UNSUPPORTED.get(re.sub(r"_2\d{7}$", "", found)) if isinstance(found, str) else None
    return f"{message}; {why}" if why else message


# ---- kinds of content, messages, items and tools that clients may send, and why they are refused

_TEXT_ONLY = "the models here read text alone; leave this part out, or describe it in words"
_HOSTED = "the server runs no tools itself; declare a function, run it, and send its result"
_KEPT = "the server keeps no requests; send the whole conversation each time"
_JSON_TOOLS = 'tools take JSON; declare it with type "function"'
_NAMES = {
    _TEXT_ONLY: """
        image image_url input_image input_audio audio file input_file document video search_result
        container_upload tool_reference video_url""",
    _HOSTED: """
        web_search_preview web_search_call web_fetch file_search file_search_call computer
        computer_use computer_use_preview computer_call computer_call_output mcp mcp_call
        mcp_list_tools mcp_approval_request mcp_approval_response mcp_toolset code_interpreter
        code_interpreter_call code_execution image_generation_call local_shell local_shell_call
        local_shell_call_output shell shell_call shell_call_output apply_patch apply_patch_call
        apply_patch_call_output bash text_editor memory tool_search tool_search_tool_regex
        tool_search_tool_bm25 server_tool_use web_search_tool_result web_fetch_tool_result
        code_execution_tool_result advisor""",
    _KEPT: "item_reference compaction compaction_trigger",
    _JSON_TOOLS: "custom custom_tool_call custom_tool_call_output",
}
UNSUPPORTED = {
    **{name: why for why, names in _NAMES.items() for name in names.split()},
    "function": 'such messages are of an older API; use role "tool" and tool_call_id',
    "namespace": "declare each of its functions in tools",
    # Codex offers these two by default; a user of it can turn them off.
    "web_search": f'{_HOSTED}; in Codex, set web_search = "disabled"',
    "image_generation": f"{_HOSTED}; in Codex, set features.image_generation = false",
    "allowed_tools": "send only the tools that are allowed",
    "grammar": "give a JSON schema instead",
}
