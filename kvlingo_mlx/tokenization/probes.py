"""What a model's chat template takes, found by trying it, not by its family's name.

A probe is a history of few messages, each with a word of its own. A template that takes such a
history renders all of its words, in their order.
"""

import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]
# What a template's own code may raise about messages.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
GO_ON = {"role": "user", "content": "Go on."}  # stands where a template wants a user's message
# What may have to stand in front of every history.
LEADS: tuple[list[Message], ...] = ([], [SYSTEM], [GO_ON, {"role": "assistant", "content": "Yes."}])
OWN_ID, FOREIGN_ID = "a1b2c3d4e", "call_0f1e-2d3c_4b5a6978a1b2c3d4"
ANNOUNCED = "kvlingo_looks"
PLACE = {"type": "string", "description": "A place."}
TOOL = {
    "type": "function",
    "function": {
        "name": ANNOUNCED,
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": PLACE}},
    },
}

# Histories by what a template that renders all their messages takes, in a word a message: a role,
# or a key of KINDS.
PROBES = {
    "tools": ["user"],
    "ids": ["user call tool"],
    "names": ["named"],
    "system": ["system user"],
    "system, no user last": ["system user assistant"],
    "several systems": ["system system user"],
    "late system": ["user assistant system user system"],
    "several users": ["user user"],
    "an empty system": ["empty-system user"],
    "an empty user": ["empty-user assistant user"],
    "an empty assistant": ["user empty-assistant user"],
    "an empty tool": ["user call empty-tool assistant user"],
    "several answers": ["user assistant assistant user"],
    "no user first": ["assistant user", "system"],
    "an answer last": ["user assistant"],
    "marks in an answer": ["user closed user", "user opened user"],
    "reasoning": ["user reasoning"],
    "marked reasoning": ["user marked user"],
    "thinking": ["user thinking-call tool"],
    "calls": ["user call tool assistant user"],
    "a call with content": ["user spoken-call tool assistant user"],
    "an answer before a call": ["user assistant call tool assistant user"],
    "several calls": ["user calls tool other-tool assistant user"],
    "a call without result": ["user call user assistant user"],
    "a result alone": ["user assistant tool user assistant user", "user assistant tool assistant"],
    "a user after a result": ["user call tool user assistant user"],
    "any id": ["user foreign-call foreign-tool"],
    "text as arguments": ["user text-call tool"],
}


def _call(name: str, identity: str = OWN_ID, arguments: Any = None) -> Message:
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": identity, "type": "function", "function": function}


def _answer(**more: Any) -> Message:
    return {"role": "assistant", "content": "", **more}


def _result(content: str, identity: str = OWN_ID) -> Message:
    return {"role": "tool", "name": "look", "tool_call_id": identity, "content": content}


def think_marks(tokenizer: Any) -> tuple[str, str]:
    """The marks of a thought: the tokenizer's, else those that most templates look for."""
    start = getattr(tokenizer, "think_start", None)
    return (start, tokenizer.think_end) if start else ("<think>", "</think>")


def marked(tokenizer: Any, reasoning: str, content: str) -> str:
    """A content with a thought in it."""
    start, end = think_marks(tokenizer)
    return f"{start}\n{reasoning}\n{end}\n\n{content}"


def one_of(marks: Iterable[str]) -> re.Pattern[str]:
    """The longest of some marks, wherever one begins; without marks, nothing."""
    ordered = sorted(filter(None, marks), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


KINDS: Mapping[str, Callable[[str, Any], Message]] = {
    "tool": lambda word, _: _result(word),
    "other-tool": lambda word, _: _result(word, OWN_ID[::-1]),
    "foreign-tool": lambda word, _: _result(word, FOREIGN_ID),
    "named": lambda word, _: {"role": "user", "content": "yes", "name": word},
    "empty-tool": lambda word, _: _result(""),
    "reasoning": lambda word, _: _answer(content="yes", reasoning_content=word),
    "marked": lambda word, tokenizer: _answer(content=marked(tokenizer, word, "yes")),
    "closed": lambda word, tokenizer: _answer(content=f"{word} {think_marks(tokenizer)[1]} yes"),
    "opened": lambda word, tokenizer: _answer(content=f"yes {think_marks(tokenizer)[0]} {word}"),
    "call": lambda word, _: _answer(tool_calls=[_call(word)]),
    "spoken-call": lambda word, _: _answer(content=word, tool_calls=[_call("look")]),
    "thinking-call": lambda word, _: _answer(thinking=word, tool_calls=[_call("look")]),
    "pondered-call": lambda word, _: (
        KINDS["spoken-call"](word, _) | {"reasoning_content": "so", "thinking": "so"}
    ),
    "calls": lambda word, _: _answer(tool_calls=[_call("look"), _call(word, OWN_ID[::-1])]),
    "foreign-call": lambda word, _: _answer(tool_calls=[_call(word, FOREIGN_ID)]),
    "text-call": lambda word, _: _answer(tool_calls=[_call("look", OWN_ID, f"{{{word}")]),
}
STRICT = ("system", "system, no user last", "reasoning", "marked reasoning")  # are tried always
# By tokenizer, what its template has been found to take, without and with tools.
_found: weakref.WeakKeyDictionary[Any, dict[tuple[str, bool], Any]] = weakref.WeakKeyDictionary()


class TemplateNeeds:
    """What a model's chat template takes.

    Args:
        tokenizer: The model's; None for a template that takes instructions in front, no more.
        tools: Whether tools are announced, in whose absence some templates leave out calls.
        strict: Whether to take for granted that it wants a user's and an assistant's texts in turn.
    """

    def __init__(self, tokenizer: Any, tools: bool = False, *, strict: bool = False) -> None:
        self.tokenizer, self._tools, self._strict = tokenizer, tools, strict

    def takes(self, what: str) -> bool:
        """Whether the template takes a kind of history: a key of PROBES, or a role."""
        if self.tokenizer is None:
            return what.startswith(("system", "an empty", "marks"))
        if self._strict and what not in STRICT:
            return False
        return bool(self._known(what))

    def led(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with what the template wants in front of any, mostly nothing."""
        if self.tokenizer is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [*map(dict, self._known("lead")), *messages]

    def shaped(self, messages: Sequence[Message], parts: bool | None = None) -> list[Message]:
        """The messages, each text a list of one part if the template reads ``parts`` alone."""
        if not (self._known("parts") if parts is None else parts):
            return list(messages)
        return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]

    def text_of(
        self, messages: Sequence[Message], parts: bool | None = None, **switches: Any
    ) -> str:
        """What the template makes of messages as they are; "" if it refuses them."""
        if self._tools:
            switches = {"tools": [TOOL], **switches}
        given = {"tokenize": False, "add_generation_prompt": True, **switches}
        try:
            return str(self.tokenizer.apply_chat_template(self.shaped(messages, parts), **given))
        except REFUSALS:
            return ""

    def tells_of(self, tool: Mapping[str, Any]) -> bool:
        """Whether the template tells of a tool, in the form in which it is given."""
        return str(tool.get("function", tool).get("name")) in self._text(["user"], tools=[tool])

    def _known(self, what: str) -> Any:
        known = _found.setdefault(self.tokenizer, {})
        key = what, self._tools
        if key not in known:
            known[key] = self._tried(what)
        return known[key]

    def _tried(self, what: str) -> Any:
        if what in ("parts", "lead"):
            user = {"role": "user", "content": "kvlingo0n"}
            forms = itertools.product((False, True), LEADS)
            told = (f for f in forms if user["content"] in self.text_of([*f[1], user], f[0]))
            return next(told, (False, ()))[what == "lead"]
        probes = PROBES.get(what, [f"user assistant {what} user"])
        if not all(self._renders(probe.split()) for probe in probes):
            return False
        if what == "an answer last":  # the next one needs a header of its own
            bare = self._text(probes[0].split(), add_generation_prompt=False)
            return bare != self._text(probes[0].split())
        named = {"tools": ANNOUNCED, "ids": OWN_ID}.get(what, "")  # what it tells of, too
        return named in self._text(probes[0].split())

    def _renders(self, kinds: Sequence[str]) -> bool:
        """Whether all of a probe's messages are in the prompt, in their order."""
        told = (n for n, kind in enumerate(kinds) if not kind.startswith("empty-"))
        words = ".*".join(f"kvlingo{n}n" for n in told)
        return re.search(words, self._text(kinds), re.DOTALL) is not None

    def _text(self, kinds: Sequence[str], **switches: Any) -> str:
        messages = []
        for number, kind in enumerate(kinds):
            word, role = f"kvlingo{number}n", kind.removeprefix("empty-")
            plain = {"role": role, "content": word if role == kind else ""}
            messages.append(KINDS[kind](word, self.tokenizer) if kind in KINDS else plain)
        return self.text_of(self.led(messages), **switches)


def announces_tools(tokenizer: Any) -> bool:
    """Whether a model's chat template tells it of tools."""
    return TemplateNeeds(tokenizer, tools=True).takes("tools")
