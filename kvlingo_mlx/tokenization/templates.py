"""Fit a history to a model's chat template.

A conversation keeps structured messages; its models' templates take them in different forms. Every
rendering goes through :func:`fit_to_template`, so this is the one place where a history changes its
form. What a template takes is found by trying it (``PROBES``), not by its family's name. It depends
on no message's text, so that a longer history begins as a shorter one did, and caches are kept.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from kvlingo_mlx.tokenization.renderings import with_joined_parts

Message = dict[str, Any]
# What a template's own code may raise about messages.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
GO_ON = {"role": "user", "content": "Go on."}  # stands where a template wants a user's message
EMPTY = "(nothing)"  # of a message that a template does not take without words
NO_RESULT = "(no result)"  # of a call that was interrupted
OWN_ID, FOREIGN_ID = "a1b2c3d4e", "call_0f1e-2d3c_4b5a6978a1b2c3d4"
ANNOUNCED = "kvlingo_looks"
TOOL = {
    "type": "function",
    "function": {
        "name": ANNOUNCED,
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}

# Histories by what a template that renders all their messages takes, in a word a message: a role,
# or a key of KINDS.
PROBES = {
    "tools": ["user"],
    "ids": ["user call tool"],
    "system": ["system user"],
    "system, no user last": ["system user assistant"],
    "several systems": ["system system user"],
    "late system": ["user assistant system user system"],
    "several users": ["user user"],
    "an empty answer": ["user empty user"],
    "several answers": ["user assistant assistant user"],
    "no user first": ["assistant user", "system"],
    "an answer last": ["user assistant"],
    "reasoning": ["user reasoning"],
    "marked reasoning": ["user marked user"],
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


KINDS: Mapping[str, Callable[[str, Any], Message]] = {
    "tool": lambda word, _: _result(word),
    "other-tool": lambda word, _: _result(word, OWN_ID[::-1]),
    "foreign-tool": lambda word, _: _result(word, FOREIGN_ID),
    "empty": lambda word, _: _answer(),
    "reasoning": lambda word, _: _answer(content="yes", reasoning_content=word),
    "marked": lambda word, tokenizer: _answer(content=_marked(tokenizer, word, "yes")),
    "call": lambda word, _: _answer(tool_calls=[_call(word)]),
    "spoken-call": lambda word, _: _answer(content=word, tool_calls=[_call("look")]),
    "pondered-call": lambda word, _: KINDS["spoken-call"](word, _) | {"reasoning_content": "so"},
    "calls": lambda word, _: _answer(tool_calls=[_call("look"), _call(word, OWN_ID[::-1])]),
    "foreign-call": lambda word, _: _answer(tool_calls=[_call(word, FOREIGN_ID)]),
    "text-call": lambda word, _: _answer(tool_calls=[_call("look", OWN_ID, f"{{{word}")]),
}
STRICT = ("system", "system, no user last", "reasoning", "marked reasoning")  # are tried always
# By tokenizer, what its template has been found to take, without and with tools.
_found: weakref.WeakKeyDictionary[Any, dict[tuple[str, bool], bool]] = weakref.WeakKeyDictionary()


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
            return what.startswith("system") or what == "an empty answer"
        if self._strict and what not in STRICT:
            return False
        known = _found.setdefault(self.tokenizer, {})
        key = what, self._tools
        if key not in known:
            known[key] = self._tried(what)
        return known[key]

    def _tried(self, what: str) -> bool:
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
        words = ".*".join(f"kvlingo{n}n" for n, kind in enumerate(kinds) if kind != "empty")
        return re.search(words, self._text(kinds), re.DOTALL) is not None

    def _text(self, kinds: Sequence[str], **switches: Any) -> str:
        messages = []
        for number, kind in enumerate(kinds):
            word = f"kvlingo{number}n"
            plain = {"role": kind, "content": word}
            messages.append(KINDS[kind](word, self.tokenizer) if kind in KINDS else plain)
        if self._tools:
            switches["tools"] = [TOOL]
        given = {"tokenize": False, "add_generation_prompt": True, **switches}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **given))
        except REFUSALS:
            return ""


def announces_tools(tokenizer: Any) -> bool:
    """Whether a model's chat template tells it of tools."""
    return TemplateNeeds(tokenizer, tools=True).takes("tools")


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], name: str, **given: Any) -> Any:
    """What a chat template makes of messages, fitted to it.

    Args:
        tokenizer: A model's, whose template it is.
        messages: A history of any shape.
        name: What errors call the model.
        given: Options of ``apply_chat_template``, and the template's own. Tools that it does not
            tell of are left out.

    Raises:
        ValueError: The template takes them in no form.
    """
    if given.get("tools") and not announces_tools(tokenizer):  # some refuse what they cannot tell
        given = {**given, "tools": None}
    tools, opens = bool(given.get("tools")), bool(given.get("add_generation_prompt"))
    refusals = []
    for strict, marks in ((False, True), (False, False), (True, False)):
        told = messages if marks else without_marks(tokenizer, messages)
        fitted = fit_to_template(tokenizer, told, tools=tools, strict=strict, opens=opens)
        try:
            return tokenizer.apply_chat_template(fitted, **given)
        except REFUSALS as error:
            refusals.append(error)
    raise ValueError(
        f"the chat template of {name} does not take these messages ({refusals[0]}), nor "
        f"their texts alone ({refusals[-1]}); give other messages, or a prompt of plain text"
    )


def fit_to_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: bool = False,
    strict: bool = False,
    opens: bool = True,
) -> list[Message]:
    """Copies of the messages in the form that a model's chat template takes.

    Nothing is left out. What a template does not take is joined with the message before it, split,
    or told as text in its place: late instructions in a user's message, calls in the answer that
    made them, their results in a user's message.

    Args:
        tokenizer: A model's, whose template it is; as in :class:`TemplateNeeds`.
        messages: A history of any shape.
        tools: Whether tools are announced.
        strict: Whether to use no form but a user's and an assistant's texts in turn.
        opens: Whether an answer is to follow them.

    Raises:
        ValueError: A part of a content is not text.
    """
    needs = TemplateNeeds(tokenizer, tools, strict=strict)
    given = with_joined_parts(messages)
    for message in given:
        if message.get("content") in (None, ""):
            filled = message.get("tool_calls") or needs.takes("an empty answer")
            message["content"] = "" if filled else EMPTY
    if not needs.takes("several answers"):
        given = _with_joined_answers(given)
    forms = list(_with_results(needs, given))
    fitted = _in_turn(needs, _in_roles(needs, forms, "system"), opens)
    if fitted and fitted[-1]["role"] != "user":  # some show instructions in a last one alone
        fitted = _in_turn(needs, _in_roles(needs, forms, "system, no user last"), opens)
    return fitted


# ---- calls and their results --------------------------------------------------------------------


def _with_results(needs: TemplateNeeds, messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, each answer that calls tools with the results that follow it."""
    at, numbers = 0, itertools.count()
    while at < len(messages):
        message, at = messages[at], at + 1
        if message["role"] == "assistant":
            message = _with_reasoning(needs, message)
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = [_identified(call, next(numbers)) for call in message["tool_calls"]]
            results = _matched(calls, messages[at:])
            at += len(results)
            unanswered = dict.fromkeys(n for n in range(len(calls)) if n not in results)
            yield from _exchange(needs, message, calls, results | unanswered)
        else:
            yield _alone(needs, message) if message["role"] == "tool" else message


def _identified(call: Any, number: int) -> Message:
    """A call in OpenAI's form, with an id, its arguments an object if they can be."""
    call = with_object(call) if isinstance(call, Mapping) else {"function": {"name": str(call)}}
    function = call.get("function", call)
    identity = str(call.get("id") or "") or _digest(f"call {number}")
    return {"type": "function", **call, "function": dict(function), "id": identity}


def _matched(calls: Sequence[Message], follow: Iterable[Message]) -> dict[int, Message]:
    """The results that follow an answer, by the number of their call, up to one of no call."""
    results: dict[int, Message] = {}
    free = dict[str, int]()
    for number, call in enumerate(calls):
        free.setdefault(call["id"], number)
    for result in itertools.takewhile(lambda message: message["role"] == "tool", follow):
        identity = result.get("tool_call_id") or next(iter(free), None)
        if identity not in free:
            break
        results[free.pop(identity)] = result
    return results


def _exchange(
    needs: TemplateNeeds,
    answer: Message,
    calls: Sequence[Message],
    results: Mapping[int, Message | None],
) -> Iterator[Message]:
    """An answer that calls tools, and the results of its calls."""
    spoken = bool(answer["content"]) and not needs.takes("a call with content")
    if not needs.takes("calls") or (spoken and not needs.takes("an answer before a call")):
        yield _as_text(needs.tokenizer, answer, calls)
        yield from (_told(r, calls[n]["function"].get("name")) for n, r in results.items() if r)
        return
    if spoken:
        yield {key: value for key, value in answer.items() if key != "tool_calls"}
        answer = _answer()
    together = [list(results)] if needs.takes("several calls") else [[n] for n in results]
    for numbers in together:
        fitted = {number: _fitted(needs, calls[number]) for number in sorted(numbers)}
        yield {**answer, "tool_calls": list(fitted.values())}
        for number in numbers:
            call, result = fitted[number], results[number]
            if result is None and needs.takes("a call without result"):
                continue
            named = {"name": call["function"].get("name"), "content": NO_RESULT, **(result or {})}
            yield {**named, "role": "tool", "tool_call_id": call["id"]}
        answer = _answer()


def _fitted(needs: TemplateNeeds, call: Message) -> Message:
    """A call with an id and arguments that the template takes."""
    function = call["function"]
    arguments = function.get("arguments", {})
    if not isinstance(arguments, dict) and not (
        isinstance(arguments, str) and needs.takes("text as arguments")
    ):
        arguments = {} if arguments in (None, "") else {"arguments": arguments}
    function = {**function, "arguments": arguments}
    return {**call, "id": _id(needs, call["id"]), "function": function}


def _id(needs: TemplateNeeds, identity: str) -> str:
    """A call's id in a form that the template takes: as it is, or nine letters and digits."""
    if needs.takes("any id") or re.fullmatch("[A-Za-z0-9]{9}", identity):
        return identity
    return _digest(identity)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def with_object(call: Any) -> Any:
    """A tool call whose arguments are an object, if they are the JSON text of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


# ---- as text ------------------------------------------------------------------------------------


def _as_text(tokenizer: Any, answer: Message, calls: Iterable[Message]) -> Message:
    """An answer with its calls as text: JSON, between the tokenizer's marks if it has any."""
    start = getattr(tokenizer, "tool_call_start", None)
    end = getattr(tokenizer, "tool_call_end", None) or ""
    texts = [json.dumps(call["function"], ensure_ascii=False, default=str) for call in calls]
    marked = [f"{start}\n{text}\n{end}" if start else text for text in texts]
    kept = {key: value for key, value in answer.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [answer["content"], *marked]))}


def without_marks(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages; a mark of the tokenizer's own in a text has a space in it.

    Some templates refuse a text that holds one of their marks.
    """
    marks = [mark for mark in tokenizer.get_added_vocab() if len(mark) > 2]
    found = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
    copies = with_joined_parts(messages)
    for message, key in itertools.product(copies, ("content", "reasoning_content")):
        if isinstance(message.get(key), str):
            message[key] = found.sub(lambda m: f"{m[0][0]} {m[0][1:]}", message[key])
    return copies


def _told(result: Message, name: Any = None) -> Message:
    """A tool's result as a user's message."""
    of = f" of {name}" if (name := name or result.get("name")) else ""
    return {"role": "user", "content": f"Result{of}:\n{result['content']}"}


def _alone(needs: TemplateNeeds, result: Message) -> Message:
    """A result that no call stands before."""
    if not needs.takes("a result alone"):
        return _told(result)
    return {**result, "tool_call_id": _id(needs, str(result.get("tool_call_id") or ""))}


def _with_reasoning(needs: TemplateNeeds, answer: Message) -> Message:
    """An answer with its reasoning in its content, where only there it would be rendered.

    gpt-oss's template refuses reasoning beside both a text and calls; there it is left out.
    """
    reasoning = answer.get("reasoning_content")
    spoken = reasoning and answer["content"] and answer.get("tool_calls")
    kept = {key: value for key, value in answer.items() if key != "reasoning_content"}
    if spoken and needs.takes("spoken-call") and not needs.takes("pondered-call"):
        return kept
    thinks = getattr(needs.tokenizer, "has_thinking", False)  # a bare tokenizer does not know
    if not isinstance(reasoning, str) or not reasoning or not thinks:
        return answer
    if needs.takes("reasoning") or not needs.takes("marked reasoning"):
        return answer
    return {**kept, "content": _marked(needs.tokenizer, reasoning.strip(), answer["content"])}


def _marked(tokenizer: Any, reasoning: str, content: str) -> str:
    return f"{tokenizer.think_start}\n{reasoning}\n{tokenizer.think_end}\n\n{content}"


# ---- roles --------------------------------------------------------------------------------------


def _in_roles(needs: TemplateNeeds, messages: Iterable[Message], first: str) -> Iterator[Message]:
    """The messages in roles that the template takes at their places; ``first``: if it takes that,
    the first instructions are a system's message.
    """
    leading = True
    for message in messages:
        role = message["role"]
        if role == "developer":
            role = "system"
        leading &= role == "system"
        if role in ("user", "assistant", "tool"):
            yield message
        elif needs.takes(first if leading else "late system" if role == "system" else role):
            yield {**message, "role": role}
        else:
            content = message["content"]
            told = f"<system-reminder>\n{content}\n</system-reminder>"
            yield {"role": "user", "content": content if leading else told}


# What a template must take where a message follows one of a role.
FOLLOWS = {
    ("system", "system"): "several systems",
    ("user", "user"): "several users",
    ("tool", "user"): "a user after a result",
    ("assistant", "assistant"): "several answers",
}


def _in_turn(needs: TemplateNeeds, messages: Iterable[Message], opens: bool) -> list[Message]:
    """The messages in an order of roles that the template takes."""
    fitted: list[Message] = []
    for message in messages:
        before = fitted[-1]["role"] if fitted else "system"
        role = message["role"]
        if before == "system" and role in ("assistant", "tool") and _first(fitted):
            fitted += [] if needs.takes("no user first") else [dict(GO_ON)]
        rule = _rule(needs, fitted, message)
        if rule is None or needs.takes(rule):
            fitted.append(message)
        elif rule == "an answer before a call":
            fitted += [dict(GO_ON), message]
        else:
            fitted[-1] = _joined(fitted[-1], message)
    last = fitted[-1]["role"] if fitted else "system"
    if last == "system" and _first(fitted) and not needs.takes("no user first"):
        fitted.append(dict(GO_ON))
    if opens and last == "assistant" and not needs.takes("an answer last"):
        fitted.append(dict(GO_ON))
    return fitted


def _rule(needs: TemplateNeeds, fitted: Sequence[Message], message: Message) -> str | None:
    """What the template must take so that a message can follow these."""
    before = fitted[-1] if fitted else {"role": ""}
    rule = FOLLOWS.get((before["role"], message["role"]))
    if rule == "several systems" and not _first(fitted):
        return "late system"
    if rule == "a user after a result" and not needs.takes("calls"):
        return "a result alone"
    if rule == "several answers" and before.get("tool_calls"):
        return None
    if rule == "several answers" and message.get("tool_calls"):
        return "an answer before a call"
    return rule


def _with_joined_answers(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else {"role": ""}
        if before["role"] == message["role"] == "assistant" and not before.get("tool_calls"):
            joined[-1] = _joined(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _first(fitted: Sequence[Message]) -> bool:
    """Whether there has been nothing but instructions."""
    return all(message["role"] == "system" for message in fitted)


def _joined(one: Message, other: Message) -> Message:
    """Two messages as one, with the role of the first."""
    made = dict(one)
    for key in ("reasoning_content", "content"):
        texts = [each[key] for each in (one, other) if each.get(key)]
        if texts:
            made[key] = "\n\n".join(map(str, texts))
    if calls := [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]:
        made["tool_calls"] = calls
    return made
