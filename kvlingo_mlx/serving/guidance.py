"""Answers that must fit a grammar: JSON of a schema, or a tool call. llguidance says what fits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.engine.answer import LAST
from kvlingo_mlx.engine.calls import CallForm, form_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.serving.messages import GenerationRequest
from kvlingo_mlx.tokenization.probes import announces_tools, think_marks

NEEDED = (
    "response_format and a demanded tool call need llguidance, which is not installed where the "
    "server runs; install it there (pip install llguidance), or ask for JSON in words"
)

# What is kept of a schema that llguidance refuses, and dropped: of that the model alone is told.
TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
DROPPED = ("pattern", "patternProperties", "multipleOf")
LINES = r"/\n\n?/"  # between a trace, a text and calls
# Without white space that a grammar would allow: a small model can go on with it for ever.
# Of a schema's keywords that llguidance does not know, the model alone is told.
COMPACT = {"x-guidance": {"whitespace_flexible": False, "lenient": True}}
# Tool calls have that of chat templates, in which models have seen all others.
SPACED = {"x-guidance": COMPACT["x-guidance"] | {"item_separator": ", ", "key_separator": ": "}}


def guided(ask: GenerationRequest, model: LanguageModel) -> list[Any]:
    """The logits processor that keeps an answer to what a request demands; none if it does not.

    Raises:
        ValueError: llguidance is not installed, the schema is not one that it supports, or the
            model is told of no tools.
    """
    demanded = ask.tool_choice not in ("auto", "none") and bool(ask.tools)
    if ask.schema is None and not demanded:
        return []
    try:
        import llguidance
    except ImportError:
        raise ValueError(NEEDED) from None
    mended = replace(ask, schema=_mended(ask.schema), tools=_mended(list(ask.tools)))
    for each in (ask, mended):
        grammar = (_call_grammar if demanded else _text_grammar)(each, model)
        matcher = llguidance.LLMatcher(_tokenizer(model), grammar)
        if not matcher.is_error():
            return [_Guide(matcher, model)]
    what = "the parameters of a tool are" if demanded else "response_format's schema is"
    raise ValueError(f"{what} refused: {' '.join(matcher.get_error().split()):.200}")


def _text_grammar(ask: GenerationRequest, model: LanguageModel) -> str:
    """The grammar of a text that fits the schema, or, where tools may be called, of free calls."""
    text, tokenizer = _json(ask.schema, COMPACT), model.tokenizer
    form = form_of(tokenizer)
    if not ask.tools or ask.tool_choice == "none" or not announces_tools(tokenizer):
        return f"start: {text}"
    functions = [tool["function"] for tool in ask.tools]
    call = _bodies(form, functions) if form.bare else _free_call(tokenizer, form)
    calls = f"call (LINES? call)*)\nLINES: {LINES}\ncall: {call}\n"
    return f"start: LINES? (text | {calls}text: {text}\n"


def _free_call(tokenizer: Any, form: CallForm) -> str:
    """Anything between a model's marks of a call."""
    start, end = _marked(tokenizer, form.starts[0]), form.end
    ids = tokenizer.encode(end, add_special_tokens=False) if end else []
    # A mark of several tokens cannot be seen in a free text, which goes on to the answer's end;
    # gpt-oss's ends the answer itself.
    seen = len(ids) == 1 and ids[0] not in tokenizer.eos_token_ids
    return f"{start} " + (f"<[^{ids[0]}]>* <[{ids[0]}]>" if seen else "<[*]>*")


def _bodies(form: CallForm, functions: Sequence[Mapping[str, Any]]) -> str:
    """Calls of any of some functions in JSON."""
    found, key = list[str](), "parameters" if form.bare else "arguments"
    for function in functions:
        begun = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
        found.append(f'{begun} {_json(function.get("parameters"), SPACED)} "}}"')
    return " | ".join(found)


def _call_grammar(ask: GenerationRequest, model: LanguageModel) -> str:
    """The grammar of a call of the demanded tool, or of any, and of more if several may be made.

    Each tool's parameters are a schema of their own, in which references find their definitions.
    """
    tokenizer, form = model.tokenizer, form_of(model.tokenizer)
    if not announces_tools(tokenizer):
        raise ValueError(
            f"tool_choice is {ask.tool_choice!r}, but the chat template of {model.name} tells of "
            "no tools, so that no call can be demanded of it; give 'auto'"
        )
    names = {tool["function"]["name"]: tool["function"] for tool in ask.tools}
    wanted = list(names) if ask.tool_choice == "required" else [ask.tool_choice]
    if not set(wanted) <= set(names):
        raise ValueError(
            f"tool_choice names {ask.tool_choice!r}, but the tools are {', '.join(names)}"
        )
    several = ask.parallel_tool_calls and ask.tool_choice == "required"
    more = " (LINES? call)*" if several else ""
    head = f"call{more}\nLINES: {LINES}\ncall:"
    if not form.in_json:  # only the tools that are wanted are announced
        return f"start: LINES? {head} {_free_call(tokenizer, form)}\n"
    marks = [_marked(tokenizer, mark) for mark in (*form.starts[:1], form.end) if mark]
    call = "body" if form.bare else ' "\\n" '.join([marks[0], "body", *marks[1:]])
    return f"start: {head} {call}\nbody: {_bodies(form, [names[name] for name in wanted])}\n"


def _json(schema: Mapping[str, Any] | None, options: Mapping[str, Any]) -> str:
    """JSON of a schema in a grammar; none or an empty one: any object."""
    return f"%json {json.dumps({**(schema or {'type': 'object'}), **options})}"


def _mended(found: Any, refs: frozenset[str] = frozenset({"#"})) -> Any:
    """What holds schemas, without what is refused in any; ``refs``: what they may refer to."""
    if isinstance(found, list):
        return [_mended(each, refs) for each in found]
    if not isinstance(found, dict):
        return found
    for defined in ("$defs", "definitions"):
        if isinstance(found.get(defined), dict):
            refs |= {f"#/{defined}/{name}" for name in found[defined]}
    taken = {"type": TYPES, "$ref": refs, **dict.fromkeys(DROPPED, ())}

    def kept(name: str, value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        of_property = isinstance(value, dict) and name != "patternProperties"
        return name not in taken or of_property or all(str(v) in taken[name] for v in values)

    return {name: _mended(value, refs) for name, value in found.items() if kept(name, value)}


def _marked(tokenizer: Any, mark: str) -> str:
    """A mark in a grammar: its tokens if one of them is no text, else its text."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    if len(ids) > 1 and not {*ids} & {*tokenizer.get_added_vocab().values()}:
        return json.dumps(mark)
    return " ".join(f"<[{token}]>" for token in ids)


def _tokenizer(model: LanguageModel) -> Any:
    """llguidance's form of a model's tokenizer, which takes about a second to make."""
    from llguidance.hf import from_tokenizer

    size, stops = int(model.facts["vocab_size"]), tuple(sorted(model.tokenizer.eos_token_ids))
    key = model.tokenizer_fingerprint, size, stops
    if key not in _made:
        _made[key] = from_tokenizer(model.tokenizer._tokenizer, size, list(stops))
    return _made[key]


_made: dict[tuple[str, int, tuple[int, ...]], Any] = {}


class _Guide:
    """Rules out the tokens that would leave the grammar, once a reasoning trace has ended.

    Attributes:
        opened: Whether the prompt opens a reasoning trace.
    """

    def __init__(self, matcher: Any, model: LanguageModel) -> None:
        self._matcher, self._model, self.opened = matcher, model, False
        self._begun: int | None = None  # tokens before those that the grammar is for
        self._seen = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        ids: Any = tokens.tolist()
        if self._begun is None and not self._begins(ids):
            return logits
        fresh, self._seen = ids[self._seen :], len(ids)
        if fresh and not self._matcher.is_stopped():
            self._matcher.consume_tokens(fresh)
        if self._matcher.is_stopped():
            stops = sorted(self._model.tokenizer.eos_token_ids)
            return _only(np.isin(np.arange(logits.shape[-1]), stops), logits)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[-1]].astype(bool)
        return _only(allowed, logits)

    def _begins(self, ids: list[int]) -> bool:
        """Whether the grammar holds from here on; a reasoning trace comes before it."""
        if not self._seen:
            self._seen, waits = len(ids), self.opened
        else:
            last = self._model.tokenizer.decode(ids[max(self._seen, len(ids) - LAST) :])
            waits = think_marks(self._model.tokenizer)[1] not in last
        if not waits:
            self._begun = self._seen = len(ids)
        return not waits


def _only(allowed: np.ndarray, logits: mx.array) -> mx.array:
    padded = np.zeros(logits.shape[-1], bool)
    padded[: len(allowed)] = allowed
    return mx.where(mx.array(padded), logits, -float("inf"))
