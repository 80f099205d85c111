"""Read the tool calls that a model wrote, in any of the forms that models write.

A call is read whole, or it is text. Each of mlx-lm's parsers has its own idea of what it can leave
out of a call that is cut or broken; so what it found is held to the text here.
"""

import importlib
import json
import re
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

LONGEST = 300  # characters in which the beginning of a call is seen
BETWEEN = " \n\r\t,;"  # calls in JSON
ARGUMENTS = {"arguments", "parameters"}
# How calls without a mark begin, before the tool's name, but for white space.
BEGINS = (
    '{"name":%s', '{"type":"function","name":%s', '{"type":"function","function":{"name":%s',
    '{"function":{"name":%s', '[{"name":%s',
)  # fmt: skip
# What Qwen2.5's models put around them, as others do around code.
WRAPS = {"```json": "```", "```": "```", "<tools>": "</tools>"}
ID = 9  # letters and digits of a call's id; Mistral's templates take no other number
ToolCall = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Parser = Callable[[str, Any], Any]  # a text and the tools to one call or several, or any error


_DECODER = json.JSONDecoder(strict=False)  # small models break lines within JSON's texts


def _in_json(text: str, tools: Tools = None) -> list[Any]:
    """Calls that are JSON objects, in lists or one after another."""
    found, at = list[Any](), 0
    while at < len(text):
        value, at = _DECODER.raw_decode(text, at)
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in BETWEEN:
            at += 1
    return found


def _headed(head: str, tail: str = "") -> Parser:
    """A parser of calls of a ``head`` with a group that is the name, JSON, and a ``tail``."""
    heads, tails = re.compile(head), re.compile(tail)

    def parse(text: str, tools: Tools = None) -> list[Any]:
        found, at = list[Any](), 0
        while at < len(text):
            begun = _there(heads, text, at)
            arguments, at = _DECODER.raw_decode(text, begun.end())
            found.append({"name": begun[1], "arguments": arguments})
            at = _there(tails, text, at).end()
        return found

    return parse


def _there(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    if (found := pattern.match(text, at)) is None:
        raise ValueError("other text stands around a call")
    return found


_mistral_headed = _headed(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\s?\[ARGS\]\s?")


def _mistral(text: str, tools: Tools = None) -> list[Any]:
    """Mistral's calls, of which the older are JSON; mlx-lm takes an id for a name."""
    return (_in_json if text.startswith("[") else _mistral_headed)(text, tools)


def _bare(text: str, tools: Tools) -> list[Any]:
    """Calls in JSON of tools that there are, with arguments; any error if it is anything else."""
    for opening, closing in WRAPS.items():
        if text.startswith(opening):
            text = text.removeprefix(opening).removesuffix(closing).strip()
    found, names = _in_json(text), _names(tools)
    for call in found:
        function = call.get("function")
        given = function if isinstance(function, Mapping) else call
        if given["name"] not in names or not ARGUMENTS & given.keys():
            raise ValueError("JSON that is no call")
        if not {*call, *given} <= {"type", "id", "function", "name"} | ARGUMENTS:
            raise ValueError("JSON that is more than a call")
    return found


def _names(tools: Tools) -> list[str]:
    return [str(tool.get("function", tool).get("name")) for tool in tools or ()]


def _qwen3_coder(text: str, tools: Tools = None) -> Any:
    return importlib.import_module("mlx_lm.tool_parsers.qwen3_coder").parse_tool_call(text, tools)


class CallForm(NamedTuple):
    """A form of calls."""

    begins: tuple[str, ...] = ()  # what a call's text begins with; none where that is a name
    value: tuple[str, str] = ('"', '"')  # what a value stands between; marks in it are part of it
    each: bool = True  # whether each of several calls begins so; without a beginning there is one
    closed: bool = False  # whether the end mark must be there, since the parser takes a part, too
    parse: Parser = _in_json
    starts: tuple[str, ...] = ()  # the marks before calls; mlx-lm's tokenizers know theirs
    end: str = ""  # the mark behind calls
    marks: Mapping[str, str] = {}  # an answer's other marks, and the state behind each
    within: str = ""  # the mark behind a call's name, before which all others are part of it
    bare: bool = False  # whether there is no mark, and calls are all of an answer
    wraps: tuple[str, ...] = ()  # what may stand before what a call begins with

    @property
    def in_json(self) -> bool:
        """Whether a call is a JSON object of a name and arguments."""
        return self.bare or self.parse is _in_json

    def outside(self, text: str) -> tuple[str, bool]:
        """The text outside of values, and whether it ends within one."""
        begin, end = self.value
        if self.within not in text:
            return text, True
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
        begun = "".join(text[:LONGEST].split())
        begins = ["".join(begin.split()) for begin in self.begins or [begun]]
        if len(text) > LONGEST and self.within not in text[:LONGEST]:
            return True
        for wrap in self.wraps:
            if wrap.startswith(begun):
                return False
            begun = begun.removeprefix(wrap)
        return not any(begun.startswith(begin) or begin.startswith(begun) for begin in begins)


# By the module of mlx-lm's parser, which reads all but the first two; all other forms have values
# in quotation marks.
FORMS = {
    "json_tools": CallForm(("{", "["), each=False),
    "mistral": CallForm(each=False, parse=_mistral),
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
JSON = FORMS["json_tools"]
# Of gpt-oss's answers, the marks beside those of calls, and the state behind each.
HARMONY = dict.fromkeys(
    ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>",
     "<|channel|>commentary<|message|>", "<|start|>assistant", "<|end|>", "<|return|>", "<|call|>"),
    "normal",
) | {"<|channel|>analysis<|message|>": "reasoning"}  # fmt: skip
# Where mlx-lm knows of no form, by a text that the vocabulary or the chat template has.
OTHERS = {
    "<|call|>": CallForm(  # gpt-oss
        each=False, parse=_headed(
            r"(?:functions\.)?([\w.-]+) ?(?:<\|channel\|>\w+ ?)?"
            r"(?:<\|constrain\|>)?\w* ?<\|message\|>"
        ),
        starts=("<|channel|>commentary to=", "<|channel|>analysis to=", " to=functions."),
        end="<|call|>", within="<|message|>", marks=HARMONY,
    ),
    "<｜tool▁calls▁begin｜>": CallForm(  # DeepSeek V3, V3.1, R1
        ("<｜tool▁call▁begin｜>",), each=False, parse=_headed(
            r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)"
            r"(?:\n```json\n|<｜tool▁sep｜>)", r"(?:\n```)?<｜tool▁call▁end｜>\n?",
        ), starts=("<｜tool▁calls▁begin｜>",), end="<｜tool▁calls▁end｜>",
    ),
    "<seed:tool_call>": FORMS["qwen3_coder"]._replace(
        parse=_qwen3_coder, starts=("<seed:tool_call>",), end="</seed:tool_call>"
    ),
    "<|/tool_call|>": JSON._replace(starts=("<|tool_call|>",), end="<|/tool_call|>"),  # Phi 4
    **{
        start: JSON._replace(starts=(start,), end=end, bare="python" in start)
        for start, end in (
            ("<|python_tag|>", ""),  # Llama 3
            ("<|tool_call|>", ""),  # Granite 3
            ("<|START_ACTION|>", "<|END_ACTION|>"),  # Command
            ("<|action_start|><|plugin|>", "<|action_end|>"),  # InternLM
            ("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron
            ("<tool_calls>", "</tool_calls>"),  # Hunyuan
            ("<tool_call>", "</tool_call>"),  # Hermes, SmolLM3, EXAONE, Falcon
        )
    },
}  # fmt: skip
_found: weakref.WeakKeyDictionary[Any, CallForm] = weakref.WeakKeyDictionary()


def form_of(tokenizer: Any) -> CallForm:
    """The form in which a model writes its calls."""
    if tokenizer.has_tool_calling:
        module = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
        form = FORMS.get(module, CallForm(each=False))
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end or ""
        parse = form.parse if module in ("json_tools", "mistral") else tokenizer.tool_parser
        return form._replace(starts=(start,), end=end, parse=parse)
    if tokenizer not in _found:
        known, template = tokenizer.get_added_vocab(), str(tokenizer.chat_template)
        rows = (form for sign, form in OTHERS.items() if sign in known or sign in template)
        _found[tokenizer] = next(rows, CallForm(bare=True))
    return _found[tokenizer]


def bare_form(tokenizer: Any, tools: Tools) -> CallForm | None:
    """The form of an answer that is nothing but calls in JSON, without the marks for them.

    Models that have no marks write so, and small ones that forget theirs. Since other answers may
    be JSON, too, only tools that there are can be called.
    """
    if not tools or not form_of(tokenizer).in_json:
        return None
    begins = [begin % json.dumps(name) for name in _names(tools) for begin in BEGINS]
    return CallForm(tuple(begins), each=False, parse=_bare, wraps=tuple(WRAPS))


def calls_in(form: CallForm, text: str, tools: Tools) -> list[ToolCall]:
    """The calls that a text between the marks of a call consists of; none if it is no call.

    They have OpenAI's form: ``{"id", "type": "function", "function": {"name", "arguments"}}``, with
    the arguments as the JSON text of an object. ``tools`` say which types arguments have; values
    that are not of these types are passed on as they are.
    """
    for known in (tools, None) if tools else (None,):
        try:
            return _read(form, text.strip(), known)
        except Exception:  # parsers of others fail in many ways at what is cut or is no call
            continue
    return []


def _read(form: CallForm, text: str, tools: Tools) -> list[ToolCall]:
    parsed = form.parse(text, tools)
    calls = [_formatted(call, text) for call in (parsed if isinstance(parsed, list) else [parsed])]
    begun = form.outside(text)[0].count(form.begins[0]) if form.begins else 1
    if form.each and begun != len(calls):  # some were left out, or two taken for one
        raise ValueError(f"{begun} calls begin, and {len(calls)} were found")
    if form.hopeless(text):
        raise ValueError("other text stands before the call")
    if not form.end and text[-1] not in "}]" and not form.wraps:
        raise ValueError("other text stands behind the call")
    return calls


def _formatted(call: Mapping[str, Any], text: str) -> ToolCall:
    """A parsed call in OpenAI's form; any error if it is none."""
    if isinstance(call.get("function"), Mapping):
        call = {"id": call.get("id"), **call["function"]}
    name, arguments = call.get("name") or call["tool_name"], call.get("arguments")
    arguments = call.get("parameters") if arguments is None else arguments
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
