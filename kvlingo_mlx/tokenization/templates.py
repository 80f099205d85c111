"""Fit a history to a model's chat template.

A conversation keeps structured messages; its models' templates take them in different forms. Every
rendering goes through :func:`rendered`, so this is the one place where a history changes its form.
What a template takes is found by trying it (``probes``). It depends on no message's text, so that a
longer history begins as a shorter one did, and caches are kept.
"""

import bisect
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvlingo_mlx.tokenization.chat_messages import json_object
from kvlingo_mlx.tokenization.probes import (
    GO_ON,
    PROBES,
    REFUSALS,
    Message,
    TemplateNeeds,
    announces_tools,
    marked,
    one_of,
    think_marks,
)
from kvlingo_mlx.tokenization.renderings import with_joined_parts

EMPTY = "(nothing)"  # of a message that a template does not take without words
NO_RESULT = "(no result)"  # of a call that was interrupted
# In which form a history is tried: whether its texts alone, and with marks of the tokenizer's own.
ATTEMPTS = (False, True), (False, False), (True, False)


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
    needs = TemplateNeeds(tokenizer, bool(given.get("tools")))
    opens = bool(given.get("add_generation_prompt"))
    refusal: Exception | None = None
    for tools in _forms_of(needs, given.get("tools")):
        given = {**given, "tools": tools} if "tools" in given else given
        needs = TemplateNeeds(tokenizer, bool(tools))
        for strict, marks in ATTEMPTS:
            told = messages if marks else without_marks(tokenizer, messages)
            fitted = fit_to_template(tokenizer, told, tools=bool(tools), strict=strict, opens=opens)
            if strict:
                fitted = _bare(needs, fitted)
            try:
                return tokenizer.apply_chat_template(needs.shaped(fitted), **given)
            except REFUSALS as error:
                refusal = refusal or error
    wrong = _wrong(needs, messages, given.get("tools") or ())
    raise ValueError(
        f"the chat template of {name} says {str(refusal)!r:.200}, and does not take {wrong}, or "
        "give a prompt of plain text"
    )


def _forms_of(needs: TemplateNeeds, tools: Sequence[Any] | None) -> Iterator[Sequence[Any] | None]:
    """The tools as they are; then, where a template refuses one, this told in its description."""
    if not tools or not announces_tools(needs.tokenizer):  # some refuse what they cannot tell
        yield None
        return
    yield tools
    mended = [tool if needs.tells_of(tool) else _described(tool) for tool in tools]
    if mended != list(tools):
        yield mended


def _described(tool: Mapping[str, Any]) -> Message:
    """A tool with all fields that templates join into texts; its description has its parameters."""
    function = tool.get("function", tool)
    told = json.dumps(function.get("parameters") or {}, ensure_ascii=False, default=str)
    text = f"{function.get('description') or ''}\nParameters, as JSON schema: {told}".strip()
    none = {"type": "object", "properties": {}, "required": []}
    plain = {"name": str(function.get("name")), "description": text, "parameters": none}
    return {"type": "function", "function": plain}


def _bare(needs: TemplateNeeds, messages: Iterable[Message]) -> list[Message]:
    """The messages' roles and texts, and no other field that a template may refuse."""
    keys = ["role", "content", *(["reasoning_content"] if needs.takes("reasoning") else [])]
    return [{key: m[key].strip() or EMPTY for key in keys if key in m} for m in messages]


def _wrong(
    needs: TemplateNeeds, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> str:
    """What a template takes in no form, and what to change."""
    for tool in tools:
        if not needs.tells_of(tool):
            return f"the tool {tool['function']['name']!r}; rename it or leave it out"

    def refused(count: int) -> bool:
        told = without_marks(needs.tokenizer, messages[:count])
        fitted = fit_to_template(needs.tokenizer, told, strict=True)
        return not needs.text_of(_bare(needs, fitted))

    if not messages or not refused(len(messages)):
        return "these switches; leave them out"
    number = bisect.bisect_left(range(len(messages)), True, lo=1, key=refused)
    role = messages[number - 1].get("role")
    return f"message {number} of {len(messages)}, of role {role!r}; change it or leave it out"


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
            what = f"an empty {message['role']}"
            what = what if what in PROBES else "an empty assistant"
            message["content"] = "" if message.get("tool_calls") or needs.takes(what) else EMPTY
    given = list(_with_names(needs, given))
    if not needs.takes("several answers"):
        given = _with_joined_answers(given)
    given = [_with_marks(needs, message) for message in given]
    forms = list(_with_results(needs, given))
    fitted = _in_turn(needs, _in_roles(needs, forms, "system"), opens)
    if fitted and fitted[-1]["role"] != "user":  # some show instructions in a last one alone
        fitted = _in_turn(needs, _in_roles(needs, forms, "system, no user last"), opens)
    return needs.led(fitted)


# ---- texts --------------------------------------------------------------------------------------


def _with_names(needs: TemplateNeeds, messages: Iterable[Message]) -> Iterator[Message]:
    """The messages, users' names in their texts if the template does not show them.

    A name stands where another user begins to speak. So a lone user's is told once, and the texts
    of a longer history begin as those of a shorter one.
    """
    speaker = None
    for message in messages:
        name, role = message.get("name"), message["role"]
        if role != "tool" and not needs.takes("names"):
            message = {key: value for key, value in message.items() if key != "name"}
        if role == "user" and "name" not in message:
            before, speaker = speaker, name if str(name).lower() != role else None
            if speaker and speaker != before:
                message["content"] = f"{speaker}: {message['content']}"
        yield message


def _with_marks(needs: TemplateNeeds, message: Message) -> Message:
    """A message; in an answer's text a space is put into each mark of thoughts, if the template
    would cut the text there.

    A thought with which the text begins stays one.
    """
    content, (start, end) = message["content"], think_marks(needs.tokenizer)
    inner = {start, end, re.sub(r"(?<=>)\w+$", "", start)}  # Gemma's begins with a mark and a word
    if message["role"] != "assistant" or not any(mark in content for mark in inner):
        return message
    if needs.takes("marks in an answer"):
        return message
    start, end = map(re.escape, (start, end))
    thought = re.match(  # the prompt may have opened it
        rf"(?s)\s*{start}.*?{end}|(?:(?!{start}|{end}).)*\n{end}(?=\n\n)", content
    )
    stop = thought.end() if thought else 0
    return {**message, "content": content[:stop] + _spaced(content[stop:], inner)}


def _spaced(text: str, marks: Iterable[str]) -> str:
    """A text with a space in each mark in it."""
    return one_of(marks).sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text)


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
        answer = {"role": "assistant", "content": ""}
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
        answer = {"role": "assistant", "content": ""}


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
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    arguments = json_object(function.get("arguments")) if isinstance(function, Mapping) else None
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


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
    copies = with_joined_parts(messages)
    for message, key in itertools.product(copies, ("content", "reasoning_content")):
        if isinstance(message.get(key), str):
            message[key] = _spaced(message[key], marks)
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

    Some templates have another name for it. gpt-oss's refuses it beside both a text and calls;
    there it is left out.
    """
    reasoning = answer.get("reasoning_content")
    if not isinstance(reasoning, str) or not reasoning:
        return answer
    spoken = answer["content"] and answer.get("tool_calls")
    kept = {key: value for key, value in answer.items() if key != "reasoning_content"}
    if spoken and needs.takes("spoken-call") and not needs.takes("pondered-call"):
        return kept
    if needs.takes("reasoning"):
        return answer
    if needs.takes("thinking"):
        return {**answer, "thinking": reasoning}
    thinks = getattr(needs.tokenizer, "has_thinking", False)  # a bare tokenizer does not know
    if not thinks or not needs.takes("marked reasoning"):
        return answer
    return {**kept, "content": marked(needs.tokenizer, reasoning.strip(), answer["content"])}


# ---- roles --------------------------------------------------------------------------------------


def _in_roles(needs: TemplateNeeds, messages: Iterable[Message], first: str) -> Iterator[Message]:
    """The messages in roles that the template takes at their places; ``first``: if it takes that,
    the first instructions are a system's message.
    """
    leading = True
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
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
