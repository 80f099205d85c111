"""Reading JSON bodies strictly: what is not supported is refused by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvlingo_mlx.errors import printable
from kvlingo_mlx.serving.messages import Failure, GenerationRequest
from kvlingo_mlx.serving.wire import Answer, BadRequest, Incoming, shown
from kvlingo_mlx.serving.wire.forms import sendable
from kvlingo_mlx.serving.wire.oddities import UNSUPPORTED, Rules

LONGEST = 600  # characters of a refusal
Name = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """An object in a request: exact types, no unknown fields, and rules for known ones.

    Null is as if the field were not there.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    rules: ClassVar[Rules] = {}

    @model_validator(mode="before")
    @classmethod
    def _follow_rules(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        fields = cls.model_fields
        needed = {name for name in found.keys() & fields.keys() if fields[name].is_required()}
        kept = {name: v for name, v in found.items() if v is not None or name in needed}
        for name in kept.keys() & cls.rules.keys():
            rule, value = cls.rules[name], kept.pop(name)
            if rule is not None and (why := rule.refusal(value)):
                raise PydanticCustomError("rule", "{why}", {"field": name, "why": why})
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
            BadRequest: It is not a request of this API, or asks for what the server cannot do.
        """
        request = read_body(self.request, body)
        ask = request.ask()
        return Incoming(ask, bool(getattr(request, "stream", False)), request.answer(ask))


Read = TypeVar("Read", bound=Body)


def read_body(kind: type[Read], body: Any) -> Read:
    """A parsed JSON body as this kind of request; raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {shown(body)}, expected a JSON object")
    if not sendable(body):
        raise BadRequest("the body holds what JSON in UTF-8 cannot, or is nested too deeply")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False), body, kind) from None


def _refusal(errors: list[ErrorDetails], body: Any, kind: type[Body]) -> BadRequest:
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
    return BadRequest(printable(text)[:LONGEST], printable(path) or None)
