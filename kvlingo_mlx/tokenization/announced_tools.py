"""Tools in the forms in which a model's chat template tells of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.tokenization.probes import TemplateNeeds, announces_tools

Tool = dict[str, Any]


def forms_of(needs: TemplateNeeds, tools: Sequence[Any] | None) -> Iterator[list[Tool] | None]:
    """The tools as a template may take them, the fullest form first; None: it tells of none.

    Where it cannot do without a tool's descriptions and types, these are filled in. A tool that it
    does not take then is told of by its name and a text.
    """
    if not tools or not announces_tools(needs.tokenizer):  # some refuse what they cannot tell
        yield None
        return
    first = list(tools) if needs.takes("bare tools") else list(map(_completed, tools))
    yield first
    mended = [tool if needs.tells_of(tool) else _described(tool) for tool in first]
    if mended != first:
        yield mended


def _completed(tool: Mapping[str, Any]) -> Tool:
    """A tool with all fields that templates join into texts."""
    function = dict(tool.get("function", tool))
    function["description"] = function.get("description") or str(function.get("name"))
    function["parameters"] = _schema(function.get("parameters"))
    return {"type": "function", **tool, "function": function}


def _schema(found: Any) -> dict[str, Any]:
    """An object's schema, its properties each with a type and a description in words."""
    given: dict[str, Any] = found if isinstance(found, dict) else {}
    listed = given.get("properties")
    properties = listed.items() if isinstance(listed, dict) else ()
    told = {name: _property(name, inner) for name, inner in properties}
    required = given.get("required") or []
    return {"type": "object", **given, "properties": told, "required": required}


def _property(name: str, found: Any) -> dict[str, Any]:
    given: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
    if "properties" in given:
        given = _schema(given)
    return {**given, "type": _type(given), "description": str(given.get("description") or name)}


def _type(schema: Mapping[str, Any]) -> str:
    """A schema's type, or types, as a text."""
    found = schema.get("type")
    if isinstance(found, list):
        return " | ".join(map(str, found))
    several = schema.get("anyOf") or schema.get("oneOf")
    if not found and isinstance(several, list):
        return " | ".join(_type(each) for each in several if isinstance(each, dict))
    return str(found or "any")


def _described(tool: Mapping[str, Any]) -> Tool:
    """A tool whose parameters are told in its description alone."""
    function = _completed(tool)["function"]
    told = json.dumps(function["parameters"], ensure_ascii=False, default=str)
    text = f"{function['description']}\nParameters, as JSON schema: {told}"
    plain = {"name": function["name"], "description": text, "parameters": _schema(None)}
    return {"type": "function", "function": plain}
