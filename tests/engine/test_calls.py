"""What a model wrote in marks comes back: text as text, each call whole or as text, nothing lost.

The writers below put calls into the forms in which models write them, in words of their own.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvlingo_mlx.engine.answers import AnswerReader, Parts, divided
from tests.support.fixtures import Models
from tests.support.responses import response

Arguments = dict[str, str]
# How a form writes a call between its marks; each value is a text.
WRITERS: dict[str, Callable[[str, Arguments], str]] = {
    "json_tools": lambda f, a: "\n" + json.dumps({"name": f, "arguments": a}) + "\n",
    "qwen3_coder": lambda f, a: "".join(
        [f"\n<function={f}>", *(f"\n<parameter={k}>\n{v}\n</parameter>" for k, v in a.items()),
         "\n</function>\n"]
    ),
    "glm47": lambda f, a: f"{f}\n" + "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in a.items()
    ),
    "longcat": lambda f, a: f"{f}\n" + "".join(
        f"<longcat_arg_key>{k}</longcat_arg_key>\n<longcat_arg_value>{v}</longcat_arg_value>\n"
        for k, v in a.items()
    ),
    "gemma4": lambda f, a: (
        f"call:{f}{{" + ",".join(f'{k}:<|"|>{v}<|"|>' for k, v in a.items()) + "}"
    ),
    "minimax_m2": lambda f, a: "".join(
        [f'\n<invoke name="{f}">', *(f'\n<parameter name="{k}">{v}</parameter>'
                                     for k, v in a.items()), "\n</invoke>\n"]
    ),
    "minicpm5": lambda f, a: f'"{f}">' + "".join(
        f'<param name="{k}"><![CDATA[{v}]]></param>' for k, v in a.items()
    ),
    "kimi_k2": lambda f, a: (
        f"<|tool_call_begin|>functions.{f}:0<|tool_call_argument_begin|>{json.dumps(a)}"
        "<|tool_call_end|>"
    ),
    "kimi_k3": lambda f, a: f'<|open|>call tool="{f}" index="1"<|sep|>' + "".join(
        f'<|open|>argument key="{k}" type="string"<|sep|>{v}<|close|>argument<|sep|>'
        for k, v in a.items()
    ) + "<|close|>call<|sep|>",
    "pythonic": lambda f, a: (
        f"[{f}(" + ", ".join(f"{k}={json.dumps(v)}" for k, v in a.items()) + ")]"
    ),
    "mistral": lambda f, a: f"{f}[ARGS]{json.dumps(a)}",
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {key: {"type": "string"} for key in "pq"}}}}
    for name in ("look", "write_file")
]  # fmt: skip


@pytest.fixture(scope="module")
def inner(families: Models) -> Any:
    """A tokenizer with think marks."""
    return families["qwen3"].tokenizer._tokenizer


def tokenizer_of(inner: Any, form: str) -> TokenizerWrapper:
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{form}")
    return TokenizerWrapper(
        inner, tool_call_start=parser.tool_call_start, tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
    )  # fmt: skip


def marked(tokenizer: Any, form: str, name: str, arguments: Arguments) -> str:
    written = WRITERS[form](name, arguments)
    return f"{tokenizer.tool_call_start}{written}{tokenizer.tool_call_end}"


def found(parts: Sequence[Parts]) -> tuple[str, str, list[Any]]:
    """Content, reasoning and calls of all pieces."""
    calls = [call["function"] for part in parts for call in part.tool_calls]
    return (
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        [[call["name"], json.loads(call["arguments"])] for call in calls],
    )


def streamed(tokenizer: Any, text: str, cuts: Sequence[int]) -> tuple[str, str, list[Any]]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    reader = AnswerReader(tokenizer, tools=TOOLS)
    told: list[Any] = [reader.take(response(piece, None)) for piece in pieces]
    assert "".join(each.text for each in told) == text
    return found([*told, reader.take(response("", "stop"))])


# Of values and texts; the marks of the form that is tried are put in for the first two.
FRAGMENTS = ["START", "END", "<think", "</think>", "a", '"', "\\", "{", "}", "é\n", "call:", "</"]
VALUES = st.lists(st.sampled_from(FRAGMENTS), max_size=5).map(lambda f: f"v{''.join(f)}v")
CALLS = st.tuples(
    st.just("call"), st.sampled_from(["look", "write_file"]),
    st.dictionaries(st.sampled_from("pq"), VALUES, max_size=2),
)  # fmt: skip
# A text may hold marks that begin no call.
TEXTS = st.lists(st.sampled_from(["START is it", "a ", "<too", "\n", "}", "é"]), max_size=4).map(
    lambda f: ("text", f"x{''.join(f)}.")
)
SEGMENTS = st.lists(
    CALLS | TEXTS | st.tuples(st.just("thought"), st.lists(CALLS | TEXTS, max_size=3)), max_size=5
)


def write(tokenizer: Any, form: str, segments: Sequence[Any], place: int) -> tuple[str, list[Any]]:
    """The segments as a model writes them; what they are is added to parts, by ``place``."""
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    text, parts = "", list[Any]()

    def spelled(value: str) -> str:
        if form == "minicpm5":  # whose parser ends a call at any such mark
            value = value.replace("END", "")
        return value.replace("START", start).replace("END", end)

    for segment in segments:
        if segment[0] == "call":
            arguments = {key: spelled(value) for key, value in segment[2].items()}
            text += marked(tokenizer, form, segment[1], arguments)
            parts.append((2, [segment[1], arguments]))
        elif segment[0] == "text":
            text += spelled(segment[1])
            parts.append((place, spelled(segment[1])))
        else:
            inside, told = write(tokenizer, form, segment[1], 1)
            text += f"<think>{inside}</think>"
            parts += told
    return text, parts


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=60, deadline=None)
@given(segments=SEGMENTS, cuts=st.lists(st.integers(0, 300), max_size=12))
def test_all_that_was_written_comes_back(
    form: str, segments: list[Any], cuts: list[int], inner: Any
) -> None:
    """However it is cut into pieces; with marks within arguments, and calls in the reasoning."""
    if form == "longcat":  # whose parser wants an argument
        segments = [s for s in segments if s[0] == "text" or (s[0] == "call" and s[2])]
    if form == "mistral":  # whose calls end where another one begins, or the answer
        segments = sorted((s for s in segments if s[0] != "thought"), key=lambda s: s[0] == "call")
    tokenizer = tokenizer_of(inner, form)
    text, parts = write(tokenizer, form, segments, 0)
    expected = tuple(
        "".join(part for place, part in parts if place == n) for n in range(2)
    ), [part for place, part in parts if place == 2]  # fmt: skip
    at_once = found([AnswerReader(tokenizer, tools=TOOLS).whole(text)])
    assert (at_once[:2], at_once[2]) == expected
    assert streamed(tokenizer, text, cuts) == at_once
    assert streamed(tokenizer, text, range(len(text))) == at_once


@pytest.mark.parametrize("form", WRITERS)
def test_a_call_that_is_cut_is_whole_or_text(form: str, inner: Any) -> None:
    tokenizer = tokenizer_of(inner, form)
    planted = ["write_file", {"p": 'some "text"', "q": "of two\nlines"}]
    written = marked(tokenizer, form, planted[0], planted[1])
    whole = 0
    for length in range(len(written) + 1):
        text = written[:length]
        content, _, calls = found([divided(tokenizer, text)])
        assert (content, calls) in ((text, []), ("", [planted])), text
        whole += bool(calls)
        text = f"<think>{text}</think>on"
        content, _, calls = found([divided(tokenizer, text)])
        assert content == "on" or tokenizer.tool_call_start in content
        assert calls in ([], [planted])
    assert 0 < whole < len(written) // 2


@pytest.mark.parametrize(
    "written, arguments",
    [
        ('"arguments": {"at": 1}', {"at": 1}),
        ('"arguments": "{\\"at\\": 1}"', {"at": 1}),  # a text of the JSON
        ('"parameters": {"at": 1}', {"at": 1}),
        ('"arguments": null', {}),
        ('"arguments": ""', {}),
        ('"arguments": "at 1"', None),
        ('"arguments": "{\\"at\\": 1"', None),
        ('"arguments": [1]', None),
        ('"arguments": 1', None),
        ('"arguments": {"at": NaN}', None),
        (f'"arguments": {"[" * 9999}', None),
    ],
)
def test_arguments_are_an_object_or_the_call_is_text(
    written: str, arguments: Any, inner: Any
) -> None:
    tokenizer = tokenizer_of(inner, "json_tools")
    text = f'<tool_call>{{"name": "look", {written}}}</tool_call>'
    content, _, calls = found([divided(tokenizer, text)])
    expected = (text, []) if arguments is None else ("", [["look", arguments]])
    assert (content, calls) == expected


@pytest.mark.parametrize(
    "form, written",
    [
        ("glm47", "is how a call begins"),
        ("qwen3_coder", "<function=look></function><function=look></function>"),
        ("qwen3_coder", "I look: <function=look></function>"),
        ("minimax_m2", '<invoke name="look"></invoke><invoke name="look">'),
        ("kimi_k3", '<|open|>call tool="look"<|sep|><|close|>call<|sep|><|open|>call tool="'),
        ("mistral", "look[ARGS]{} and so on"),
        ("kimi_k2", "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"),
        ("minicpm5", '"look"><param name="p"><![CDATA[</function>]]></param>'),
        ("pythonic", "[look(at={1, 2})]"),
    ],
)  # fmt: skip
def test_what_a_parser_would_leave_out_or_make_up_is_told(
    form: str, written: str, inner: Any
) -> None:
    tokenizer = tokenizer_of(inner, form)
    text = f"{tokenizer.tool_call_start}{written}{tokenizer.tool_call_end}"
    assert found([divided(tokenizer, text)]) == (text, "", [])


def test_types_that_a_value_is_not_of_do_not_lose_the_call(inner: Any) -> None:
    number = {"name": "look", "parameters": {"properties": {"p": {"type": "integer"}}}}
    tokenizer = tokenizer_of(inner, "qwen3_coder")
    for value, expected in (("3", 3), ("three", "three")):
        text = marked(tokenizer, "qwen3_coder", "look", {"p": value})
        reader = AnswerReader(tokenizer, tools=[{"type": "function", "function": number}])
        assert found([reader.whole(text)])[2] == [["look", {"p": expected}]]


def test_many_marks_cost_no_more_than_as_many_letters(inner: Any) -> None:
    """What a model is made to repeat is divided in one pass or in few."""
    looked = 0
    for form in WRITERS:
        tokenizer = tokenizer_of(inner, form)
        parse = tokenizer.tool_parser

        def counted(text: str, tools: Any, parse: Any = parse) -> Any:
            nonlocal looked
            looked += 1
            return parse(text, tools)

        counted.__module__ = parse.__module__
        tokenizer._tool_parser = counted
        text = f"{tokenizer.tool_call_start}x" * 2000
        assert found([divided(tokenizer, text)]) == (text, "", [])
    assert looked <= 100 * len(WRITERS)


def test_no_stop_text_cuts_a_call(inner: Any) -> None:
    tokenizer = tokenizer_of(inner, "json_tools")
    call = marked(tokenizer, "json_tools", "look", {"p": "a stop b"})
    for text, told in ((f"x{call}y", ("xy", 1)), (f"x stop{call}", ("x ", 0)),
                       (f"{call}y stop", ("y ", 1))):  # fmt: skip
        reader = AnswerReader(tokenizer, stop=["stop"])
        taken: Any = [reader.take(response(letter, None)) for letter in text]
        if not any(each.stop_text for each in taken):
            taken.append(reader.take(response("", "stop")))
        ended = next((n for n, each in enumerate(taken, 1) if each.stop_text), len(taken))
        content, _, calls = found(taken[:ended])
        assert (content, len(calls)) == told
