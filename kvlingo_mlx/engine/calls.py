"""Read the tool calls that a model wrote, in any of the forms that mlx-lm's parsers know.

A call is read whole, or it is text. Each parser has its own idea of what it can leave out of a call
that is cut or broken; so what it found is held to the text here.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ID = 9  # letters and digits of a call's id; Mistral's templates take no other number
ToolCall = dict[str, Any]


class CallForm(NamedTuple):
    """A form of calls."""

    begins: tuple[str, ...] = ()  # what a call's text begins with; none where that is a name
    value: tuple[str, str] = ('"', '"')  # what a value stands between; marks in it are part of it
    each: bool = True  # whether each of several calls begins so; without a beginning there is one
    closed: bool = False  # whether the end mark must be there, since the parser takes a part, too

    def outside(self, text: str) -> tuple[str, bool]:
        """The text outside of values, and whether it ends within one."""
        begin, end = self.value
        if end == '"':
            text = text.replace("\\\\", "").replace('\\"', "")
        parts, at = list[str](), 0
        while (found := text.find(begin, at)) >= 0:
            parts.append(text[at:found])
            if (stop := text.find(end, found + len(begin))) < 0:
                return "".join(parts), True
            at = stop + len(end)
        return "".join([*parts, text[at:]]), False

    def hopeless(self, text: str) -> bool:
        """Whether no call can begin with a text."""
        begun = text.lstrip()
        return bool(self.begins) and not any(
            begun.startswith(begin) or begin.startswith(begun) for begin in self.begins
        )


# By the module of mlx-lm's parser; all other forms have values in quotation marks.
FORMS = {
    "json_tools": CallForm(("{", "["), each=False),
    "qwen3_coder": CallForm(("<function=",), ("<parameter=", "</parameter>")),
    "minimax_m2": CallForm(("<invoke name=",), ("<parameter name=", "</parameter>")),
    "muse_spark": CallForm(("<atem:invoke",), ("<atem:parameter", "</atem:parameter>"), True, True),
    "kimi_k2": CallForm(("<|tool_call_begin|>",)),
    "kimi_k3": CallForm(("<|open|>call",), ("<|open|>argument", "<|close|>argument")),
    "gemma4": CallForm(("call:",), ('<|"|>', '<|"|>'), each=False),
    "function_gemma": CallForm(("call:",), ("<escape>", "<escape>"), each=False),
    "glm47": CallForm((), ("<arg_value>", "</arg_value>"), closed=True),
    "longcat": CallForm((), ("<longcat_arg_value>", "</longcat_arg_value>"), closed=True),
    "minicpm5": CallForm((), ("<param name=", "</param>"), closed=True),
    "pythonic": CallForm(("[",), each=False),
}


def form_of(tokenizer: Any) -> CallForm:
    """The form in which a model writes its calls."""
    module = getattr(tokenizer.tool_parser, "__module__", "")
    return FORMS.get(module.rpartition(".")[2], CallForm(each=False))


def calls_in(
    tokenizer: Any, text: str, tools: Sequence[Mapping[str, Any]] | None
) -> list[ToolCall]:
    """The calls that a text between the marks of a call consists of; none if it is no call.

    They have OpenAI's form: ``{"id", "type": "function", "function": {"name", "arguments"}}``, with
    the arguments as the JSON text of an object. ``tools`` say which types arguments have; values
    that are not of these types are passed on as they are.
    """
    for known in (tools, None) if tools else (None,):
        try:
            return _read(tokenizer, text.strip(), known)
        except Exception:  # parsers of others fail in many ways at what is cut or is no call
            continue
    return []


def _read(tokenizer: Any, text: str, tools: Sequence[Mapping[str, Any]] | None) -> list[ToolCall]:
    form = form_of(tokenizer)
    try:
        parsed = tokenizer.tool_parser(text, tools)
    except json.JSONDecodeError:  # small models break lines within JSON's texts
        parsed = json.loads(text, strict=False)
    calls = [_formatted(call, text) for call in (parsed if isinstance(parsed, list) else [parsed])]
    begun = form.outside(text)[0].count(form.begins[0]) if form.begins else 1
    if form.each and begun != len(calls):  # some were left out, or two taken for one
        raise ValueError(f"{begun} calls begin, and {len(calls)} were found")
    if form.begins and not text.startswith(form.begins):
        raise ValueError("other text stands before the call")
    if not tokenizer.tool_call_end and text[-1] not in "}]":
        raise ValueError("other text stands behind the call")
    return calls


def _formatted(call: Mapping[str, Any], text: str) -> ToolCall:
    """A parsed call in OpenAI's form; any error if it is none."""
    if isinstance(call.get("function"), Mapping):
        call = {"id": call.get("id"), **call["function"]}
    name, arguments = call["name"], call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments:  # some models write a text that is their JSON
        arguments = json.loads(arguments, strict=False)
    arguments = {} if arguments in (None, "", []) else arguments
    if not (re.fullmatch(r"[^\s<>]+", name) and isinstance(arguments, dict)):
        raise ValueError("neither a name nor an object of arguments")
    if list(arguments) == ["raw"] and "raw" not in text:
        raise ValueError("GLM's parser makes a call of any text")
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    number = call.get("id")
    return {
        "id": number if number and isinstance(number, str) else uuid.uuid4().hex[:ID],
        "type": "function",
        "function": {"name": name, "arguments": told},
    }
