"""What a model wrote in marks comes back: text as text, each call whole or as text, nothing lost.

The writers below put calls into the forms in which models write them, in words of their own.
"""

import copy
import importlib
import itertools
import json
import re
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
    "mistral, ids": lambda f, a: f"{f}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(a)}",
    # those that mlx-lm does not know
    "gpt-oss": lambda f, a: f"functions.{f} <|constrain|>json<|message|>{json.dumps(a)}",
    "gpt-oss, role": lambda f, a: f"{f}<|channel|>commentary<|message|>{json.dumps(a)}",
    "deepseek-v3": lambda f, a: (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{f}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
    ),
    "deepseek-v3.1": lambda f, a: (
        f"<｜tool▁call▁begin｜>{f}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"
    ),
    "granite-3": lambda f, a: json.dumps([{"name": f, "arguments": a}]),
    "phi-4": lambda f, a: json.dumps([{"name": f, "arguments": a}]),
    "llama-3": lambda f, a: json.dumps({"name": f, "parameters": a}),
    "command": lambda f, a: json.dumps([{"tool_call_id": "0", "tool_name": f, "parameters": a}]),
    "internlm": lambda f, a: json.dumps({"name": f, "parameters": a}),
    "nemotron": lambda f, a: json.dumps([{"name": f, "arguments": a}]),
    "hunyuan": lambda f, a: json.dumps([{"name": f, "arguments": a}]),
    "hermes": lambda f, a: "\n" + json.dumps({"name": f, "arguments": a}) + "\n",
}  # fmt: skip
WRITERS["seed"] = WRITERS["qwen3_coder"]
# The marks before and behind these calls, and a text of their models' templates.
MARKS = {
    "gpt-oss": ("<|channel|>commentary to=", "<|call|>"),
    "gpt-oss, role": (" to=functions.", "<|call|>"),
    "deepseek-v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek-v3.1": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "granite-3": ("<|tool_call|>", ""),
    "phi-4": ("<|tool_call|>", "<|/tool_call|>"),
    "llama-3": ("<|python_tag|>", ""),
    "command": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "internlm": ("<|action_start|><|plugin|>", "<|action_end|>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": ("<tool_calls>", "</tool_calls>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
}
OPEN = ("mistral", "mistral, ids", "granite-3", "llama-3")  # which have no mark behind calls
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {key: {"type": "string"} for key in "pq"}}}}
    for name in ("look", "write_file")
]  # fmt: skip


@pytest.fixture(scope="module")
def inner(families: Models) -> Any:
    """A tokenizer with think marks."""
    return families["qwen3"].tokenizer._tokenizer


def tokenizer_of(inner: Any, form: str, template: str | None = None) -> TokenizerWrapper:
    """A tokenizer of a model that writes this form; its marks are mlx-lm's, or a template tells."""
    if form in MARKS or template is not None:
        plain = copy.copy(inner)
        plain.chat_template = template or " and ".join(MARKS[form])
        return TokenizerWrapper(plain)
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{form.split(',')[0]}")
    return TokenizerWrapper(
        inner, tool_call_start=parser.tool_call_start, tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
    )  # fmt: skip


def marks_of(tokenizer: Any, form: str) -> tuple[str, str]:
    return MARKS.get(form) or (tokenizer.tool_call_start, tokenizer.tool_call_end)


def marked(tokenizer: Any, form: str, name: str, arguments: Arguments) -> str:
    return WRITERS[form](name, arguments).join(marks_of(tokenizer, form))


def without_channels(text: str) -> str:
    """What is told of a text that is no call: gpt-oss's marks of channels are none of it."""
    return re.sub(r"<\|call\|>|<\|channel\|>commentary<\|message\|>", "", text)


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
    start, end = marks_of(tokenizer, form)
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
@settings(max_examples=25, deadline=None)
@given(segments=SEGMENTS, cuts=st.lists(st.integers(0, 300), max_size=12))
def test_all_that_was_written_comes_back(
    form: str, segments: list[Any], cuts: list[int], inner: Any
) -> None:
    """However it is cut into pieces; with marks within arguments, and calls in the reasoning."""
    if form == "longcat":  # whose parser wants an argument
        segments = [s for s in segments if s[0] == "text" or (s[0] == "call" and s[2])]
    if form in OPEN:  # calls end where another one begins, or the answer
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
        assert (content, calls) in ((without_channels(text), []), ("", [planted])), text
        whole += bool(calls)
        text = f"<think>{text}</think>on"
        content, _, calls = found([divided(tokenizer, text)])
        assert content == "on" or marks_of(tokenizer, form)[0] in content or form in MARKS
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
        ("gpt-oss", "functions.look <|message|>{} and so on"),
        ("gpt-oss, role", "look with a word" + 99 * " more"),
        ("deepseek-v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```"),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{} and<｜tool▁call▁end｜>"),
        ("granite-3", '[{"name": "look", "arguments": {}}] and so on'),
        ("command", '[{"tool_name": "look", "parameters": {}}, 7]'),
        ("kimi_k2", "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"),
        ("minicpm5", '"look"><param name="p"><![CDATA[</function>]]></param>'),
        ("pythonic", "[look(at={1, 2})]"),
    ],
)  # fmt: skip
def test_what_a_parser_would_leave_out_or_make_up_is_told(
    form: str, written: str, inner: Any
) -> None:
    tokenizer = tokenizer_of(inner, form)
    text = written.join(marks_of(tokenizer, form))
    assert found([divided(tokenizer, text)]) == (without_channels(text), "", [])


ARG, OTHER = {"p": "</tool_call> <|call|> ; é"}, {"q": 'a "b"\nc'}
TWO = [["look", ARG], ["write_file", OTHER]]


@pytest.mark.parametrize(
    "form, written",
    [
        (form, between.join(WRITERS[form](*call) for call in TWO))  # type: ignore[arg-type]
        for form, between in [
            ("hermes", "\n"), ("json_tools", ", "), ("hunyuan", "\n"), ("granite-3", ""),
            ("llama-3", "; "), ("minimax_m2", ""), ("kimi_k2", ""), ("deepseek-v3", "\n"),
            ("deepseek-v3.1", ""), ("mistral, ids", ""),
        ]
    ],
)  # fmt: skip
def test_two_calls_between_two_marks(form: str, written: str, inner: Any) -> None:
    text = written.join(marks_of(tokenizer_of(inner, form), form))
    assert streamed(tokenizer_of(inner, form), f"So. {text}", [9, 30]) == ("So. ", "", TWO)


HARMONY = (
    "<|channel|>analysis<|message|>hm, functions.look to=functions.look?<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
    '<|start|>assistant{0}<|message|>{{"p": "<|end|>"}}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>So.<|return|>"
)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.look <|constrain|>json",
        "<|channel|>commentary to=look code",
        "<|channel|>analysis to=functions.look",
        " to=functions.look<|channel|>commentary <|constrain|>json",
        " to=functions.look<|channel|>commentary",
    ],
)
def test_channels_are_parts(header: str, inner: Any) -> None:
    """Of gpt-oss: the recipient stands in the role or in the channel."""
    tokenizer, text = tokenizer_of(inner, "gpt-oss"), HARMONY.format(header)
    told = "I look. So.", "hm, functions.look to=functions.look?", [["look", {"p": "<|end|>"}]]
    for cuts in ([], [40, 41, 90], range(len(text))):
        assert streamed(tokenizer, text, cuts) == told


@pytest.mark.parametrize(
    "text, told",
    [
        ('{"name": "look", "parameters": {"p": "a"}}', [["look", {"p": "a"}]]),
        ('\n{ "name":\n"look", "arguments": "{\\"p\\": 1}"} ', [["look", {"p": 1}]]),
        ('{"type": "function", "name": "look", "parameters": {}}', [["look", {}]]),
        ('{"type": "function", "function": {"name": "look", "arguments": {}}}', [["look", {}]]),
        ('[{"name": "look", "arguments": {"p": "}; {"}}]', [["look", {"p": "}; {"}]]),
        ('{"name": "look", "parameters": {}}; {"name": "look", "parameters": {"p": 2}}',
         [["look", {}], ["look", {"p": 2}]]),
        ('<think>hm</think>\n\n{"name": "look", "parameters": {}}', [["look", {}]]),
        ('```json\n{"name": "look", "arguments": {"p": "```"}}\n```', [["look", {"p": "```"}]]),
        ('<tools>\n{"name": "look", "arguments": {}}\n</tools>', [["look", {}]]),
        ('```python\nlook("a")\n```', None),
        ('```json\n{"name": "look", "arguments": {}}\n```\nThat is it.', None),
        ('{"name": "leave", "parameters": {}}', None),  # no such tool
        ('{"name": "look"}', None),
        ('{"name": "look", "parameters": {}, "colour": "red"}', None),
        ('{"name": "look", "parameters": {}} and so on', None),
        ('{"name": "look", "parameters": {}', None),
        ('{"name": "looking", "parameters": {}}', None),
        ('I call {"name": "look", "parameters": {}}', None),
        ('[1, {"name": "look", "parameters": {}}]', None),
        ('{"look": {"p": "a"}}', None),
        ("{}", None),
    ],
)  # fmt: skip
def test_an_answer_that_is_nothing_but_a_call(text: str, told: Any, inner: Any) -> None:
    """Without a mark, as Llama and small Qwen2.5 write: of a tool that there is, or text."""
    forms = (
        ("llama-3", None),
        ("llama-3", "a template without marks"),
        ("hermes", None),
        ("json_tools", None),
    )
    for form, template in forms:
        tokenizer = tokenizer_of(inner, form, template)
        for cuts in ([], range(len(text))):
            content, _, calls = streamed(tokenizer, text, cuts)
            assert (content.strip(), calls) == (("", told) if told else (text.strip(), []))
        assert found([divided(tokenizer, text)])[2] == []  # no tools were announced
    other = tokenizer_of(inner, "qwen3_coder")  # whose calls are no JSON
    assert found([AnswerReader(other, tools=TOOLS).whole(text)])[2] == []


def test_json_that_is_no_call_is_told_at_once(inner: Any) -> None:
    reader = AnswerReader(tokenizer_of(inner, "llama-3"), tools=TOOLS)
    taken: list[Any] = [reader.take(response(piece, None)) for piece in ('{"name": "A', "nn", '"')]
    assert found(taken)[0] == '{"name": "Ann"'


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

        if parse is not None:
            counted.__module__ = parse.__module__
            tokenizer._tool_parser = counted
        text = f"{marks_of(tokenizer, form)[0]}x" * 2000
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
