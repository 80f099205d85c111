"""Reading JSON bodies strictly: what is not supported is refused by name."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.wire import BadRequest

DEEPEST = 64  # lists and objects within one another
MOST = 2**31 - 1
Name = Annotated[str, Field(min_length=1)]


# ---- fields that have no effect, or only with some values ---------------------------------------


@dataclass(frozen=True)
class Rule:
    """What is done with a field that we know and do not use.

    Attributes:
        why: Why it has no effect, or what to do instead.
        accepted: The values that are accepted; None for all. Null is always accepted.
    """

    why: str
    accepted: tuple[Any, ...] | None = ()

    def takes(self, value: Any) -> bool:
        if value is None or self.accepted is None:
            return True
        return any(type(value) is type(taken) and value == taken for taken in self.accepted)

    def refusal(self, path: str, value: Any) -> str:
        if not self.accepted:
            return f"{path} is not supported; {self.why}"
        expected = " or ".join(json.dumps(taken) for taken in self.accepted)
        return f"{path} is {shown(value)}, expected {expected}; {self.why}"


Rules = Mapping[str, Rule]


def harmless(why: str) -> Rule:
    """A field that changes nothing in an answer, whatever it says."""
    return Rule(why, None)


def only(why: str, *accepted: Any) -> Rule:
    """A field that is refused but for these values, which are what we do anyway."""
    return Rule(why, accepted)


def refused(why: str) -> Rule:
    """A field that we cannot honour."""
    return Rule(why)


CACHED = {"cache_control": harmless("the server keeps every conversation's cache by itself")}


class Body(BaseModel):
    """An object in a request: exact types, no unknown fields, and rules for known ones."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rules: ClassVar[Rules] = {}
    known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        fields = cls.model_fields.items()
        cls.known = frozenset(field.alias or name for name, field in fields)

    @model_validator(mode="before")
    @classmethod
    def _follow_rules(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        kept = {}
        for name, value in found.items():
            rule = cls.rules.get(name)
            if rule is not None and not rule.takes(value):
                raise PydanticCustomError("rule", "{name}", {"name": name, "rule": rule})
            # Clients that send an object of their library back send fields of null with it.
            if rule is None and (value is not None or name in cls.known):
                kept[name] = value
        return kept


# ---- reading ------------------------------------------------------------------------------------

Read = TypeVar("Read", bound=Body)


def read_body(kind: type[Read], body: Any) -> Read:
    """A parsed JSON body as this kind of request.

    Raises:
        BadRequest: It is not one.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {shown(body)}, expected a JSON object")
    if found := fault(body):
        raise BadRequest(f"the body holds {found}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _told(error.errors(include_url=False), body, kind) from None


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
            elif found := _number_fault(item):
                return found
        level = inner
    if level:
        return f"lists and objects nested more than {DEEPEST} deep; make it flatter"
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character; leave it out"
    return None


def _number_fault(value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"the number {value}, which is not JSON; give a finite one"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a whole number of more than 64 bits; give a smaller one"
    return None


def shown(value: Any) -> str:
    """A value in a message: itself if it is short, else what kind of value it is."""
    if isinstance(value, str | bool | int | float) and len(text := json.dumps(value)) <= 40:
        return text
    kinds = {str: "a long text", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a long number")


def _path(places: tuple[int | str, ...], body: Any) -> tuple[str, Any]:
    """Where an error is in the body, without the names of alternatives that pydantic adds."""
    names: list[str] = []
    here = body
    for place in places:
        inside = isinstance(here, dict) and place in here
        if inside or (isinstance(here, list) and isinstance(place, int) and place < len(here)):
            here = here[place]
            names.append(str(place)[:64])
    return ".".join(names), here


def _told(errors: list[ErrorDetails], body: Any, kind: type[Body]) -> BadRequest:
    """The first thing that is wrong, in one line; what is of a wrong kind counts first."""
    error = min(errors, key=lambda e: e["loc"][-1:] not in (("type",), ("role",)))
    path, here = _path(error["loc"], body)
    message, last = _TELLERS.get(error["type"], _unexpected)(error, path, kind)
    if last and (isinstance(here, dict) or not path):
        path = _within(path, last)
    return BadRequest(printable(message), printable(path) or None)


# The message, and the name of a field of the path's object that it is about.
Teller = Callable[[ErrorDetails, str, type[Body]], tuple[str, str]]


def _within(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last


def _by_rule(error: ErrorDetails, path: str, kind: type[Body]) -> tuple[str, str]:
    name, rule = error["ctx"]["name"], error["ctx"]["rule"]
    return rule.refusal(_within(path, name), error["input"][name]), name


def _missing(error: ErrorDetails, path: str, kind: type[Body]) -> tuple[str, str]:
    name = str(error["loc"][-1])
    return f"{_within(path, name)} is missing; add it to the request", name


def _unknown(error: ErrorDetails, path: str, kind: type[Body]) -> tuple[str, str]:
    near = difflib.get_close_matches(path, [*kind.model_fields, *kind.rules], 1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return (
        f"{path if path.strip() else repr(path)} is not a field that the server knows; {hint}",
        "",
    )


def _other_kind(error: ErrorDetails, path: str, kind: type[Body]) -> tuple[str, str]:
    name, tag = _discriminator(error), error["ctx"]["tag"]
    message = f"{_within(path, name)} is {shown(tag)}, expected {error['ctx']['expected_tags']}"
    return _with_reason(message, tag), name


def _no_kind(error: ErrorDetails, path: str, kind: type[Body]) -> tuple[str, str]:
    name = _discriminator(error)
    what = f"{path or 'the body'} is {shown(error['input'])}"
    return f"{what}, expected an object with {name}; add it", name


def _discriminator(error: ErrorDetails) -> str:
    """The field by which kinds are told apart."""
    return "role" if error["ctx"]["discriminator"] == "'role'" else "type"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "too_short": "at least {min_length}",
    "string_too_short": "a text that is not empty",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}


def _unexpected(error: ErrorDetails, path: str, kind: type[Body]) -> tuple[str, str]:
    known = _EXPECTED.get(error["type"])
    expected = known.format(**error.get("ctx", {})) if known else error["msg"]
    found = shown(error["input"])
    if error["type"] == "too_short":
        found = f"a list of {error['ctx']['actual_length']}"
    message = f"{path or 'the body'} is {found}, expected {expected}"
    return _with_reason(message, error["input"]), ""


def _with_reason(message: str, kind: Any) -> str:
    """Why something of this kind is refused, if we know it; dated kinds are one without a date."""
    why = UNSUPPORTED.get(re.sub(r"_2\d{7}$", "", kind)) if isinstance(kind, str) else None
    return f"{message}; {why}" if why else message


_TELLERS: dict[str, Teller] = {
    "rule": _by_rule,
    "missing": _missing,
    "extra_forbidden": _unknown,
    "union_tag_invalid": _other_kind,
    "union_tag_not_found": _no_kind,
}

_TEXT_ONLY = "the models here read text alone; leave this part out, or describe it in words"
_HOSTED = "the server runs no tools itself; declare a function, run it, and send its result"
_KEPT = "the server keeps no requests; send the whole conversation each time"
# Kinds of content, messages, items and tools that clients may send, by their name in the request.
UNSUPPORTED = {
    **dict.fromkeys(
        "image image_url input_image input_audio audio file input_file document video search_result"
        " container_upload tool_reference video_url".split(),
        _TEXT_ONLY,
    ),
    **dict.fromkeys(
        "web_search web_search_preview web_search_call web_fetch file_search file_search_call"
        " computer computer_use computer_use_preview computer_call computer_call_output mcp"
        " mcp_call mcp_list_tools mcp_approval_request mcp_approval_response mcp_toolset"
        " code_interpreter code_interpreter_call code_execution image_generation"
        " image_generation_call local_shell local_shell_call local_shell_call_output shell"
        " shell_call shell_call_output apply_patch apply_patch_call apply_patch_call_output bash"
        " text_editor memory tool_search tool_search_tool_regex tool_search_tool_bm25"
        " server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result"
        " advisor".split(),
        _HOSTED,
    ),
    **dict.fromkeys("item_reference compaction compaction_trigger".split(), _KEPT),
    **dict.fromkeys(
        "custom custom_tool_call custom_tool_call_output".split(),
        'tools take JSON; declare it with type "function"',
    ),
    "function": 'such messages are of an older API; use role "tool" and tool_call_id',
    "namespace": "declare each of its functions in tools",
    # Codex offers these two by default; a user of it can turn them off.
    "web_search": f'{_HOSTED}; in Codex, set web_search = "disabled"',
    "image_generation": f"{_HOSTED}; in Codex, set features.image_generation = false",
    "allowed_tools": "send only the tools that are allowed",
    "grammar": "give a JSON schema instead",
}
