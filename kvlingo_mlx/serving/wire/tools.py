"""The tools that a client declares: what a model is shown of them, and how a call is told back.

A model calls functions alone. So each kind of tools that a client runs is shown as a function, and
a call of it is told in the form of its kind: both are a row of ``KINDS``. Functions in a namespace,
in which Codex wraps those of each MCP server, are shown under a name of both. Tools of any other
kind are run by a provider; these are left out.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvlingo_mlx.serving.messages import Tool
from kvlingo_mlx.serving.wire import BadRequest, shown
from kvlingo_mlx.serving.wire.forms import unread
from kvlingo_mlx.serving.wire.oddities import TOOL
from kvlingo_mlx.tokenization.chat_messages import joined, json_object, kind_of

WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
SCHEMAS = ("parameters", "input_schema", "inputSchema")  # names of a function's schema

# ---- kinds --------------------------------------------------------------------------------------


class ToolKind(NamedTuple):
    """A kind of tools that a client runs.

    Attributes:
        description: What a model is told of it, where the declaration has no description.
        schema: Its parameters, where the declaration has none: names with "*" if they are needed,
            and what is not a text behind "=", a row of ``TYPES`` or the values that there are.
        item: The kind of a response's item that tells a call.
        field: Where the arguments stand in it.
        more: What else stands in it.
        fixed: What else stands within the arguments.
    """

    description: str = ""
    schema: str = ""
    item: str = "function_call"
    field: str = "arguments"
    more: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters as JSON schema."""
        rows = [row.partition("=") for row in self.schema.split()]
        types = {n.rstrip("*"): TYPES.get(t, {**TEXT, "enum": t.split("|")}) for n, _, t in rows}
        needed = [name[:-1] for name, _, _ in rows if name.endswith("*")]
        return {"type": "object", "properties": types} | ({"required": needed} if needed else {})

    def arguments(self, text: str) -> Any:
        """A call's arguments as the item has them; ``text`` is the JSON of an object."""
        if self.item == "function_call":
            return text
        given = json_object(text) or {}
        if self.field == "input":
            values = [given["input"]] if "input" in given else [*given.values()]
            return values[0] if len(values) == 1 and isinstance(values[0], str) else text
        lists = [n for n, kind in self.parameters["properties"].items() if kind is TYPES["texts"]]
        listed = {n: [given[n]] for n in lists if isinstance(given.get(n), str)}
        return {**self.fixed, **given, **listed}


TEXT = {"type": "string"}
TYPES = {
    "": TEXT,
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "switch": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "wholes": {"type": "array", "items": {"type": "integer"}},
}
_RUN = "Runs commands on the user's machine, and tells what they printed."
_EDIT = (
    "Looks at files and changes them: view a path (perhaps the lines of view_range), create a path "
    "with file_text, str_replace the only place of old_str by new_str, or insert insert_text "
    "behind insert_line."
)
_FILES = "path file_text old_str new_str insert_line=whole insert_text view_range=wholes"
FUNCTION = ToolKind()
CUSTOM = ToolKind("", "input*", "custom_tool_call", "input")
KINDS = {
    "custom": CUSTOM,
    # OpenAI's
    "local_shell": ToolKind(
        _RUN, "command*=texts working_directory timeout_ms=whole",
        "local_shell_call", "action", fixed={"type": "exec", "env": {}},
    ),
    "shell": ToolKind(
        _RUN, "commands*=texts timeout_ms=whole max_output_length=whole", "shell_call", "action"
    ),
    "apply_patch": ToolKind(
        "Creates, updates or deletes the file at path. diff has the lines of a new file, each "
        "behind a +, or, behind a line of @@ for each place, lines that begin with a space (kept), "
        "a - (taken out) or a + (put in).",
        "type*=create_file|update_file|delete_file path* diff", "apply_patch_call", "operation",
    ),
    "tool_search": ToolKind(
        "Searches for further tools; those that it finds can be called from then on.",
        "query* limit=whole", "tool_search_call", more={"execution": "client"},
    ),
    # Anthropic's
    "bash": ToolKind(f"{_RUN} It stays open till restart.", "command restart=switch"),
    "text_editor": ToolKind(_EDIT, f"command*=view|create|str_replace|insert {_FILES}"),
    "memory": ToolKind(
        f"{_EDIT} Or delete a path, or rename old_path to new_path. The files below /memories stay "
        "from one conversation to the next; view it first.",
        f"command*=view|create|str_replace|insert|delete|rename {_FILES} old_path new_path",
    ),
    "computer": ToolKind(
        "Uses the screen, the mouse and the keyboard. Places are [x, y] in pixels; text is what is "
        "typed, or keys such as ctrl+s; duration is in seconds.",
        "action*=screenshot|left_click|right_click|middle_click|double_click|triple_click|"
        "mouse_move|left_click_drag|left_mouse_down|left_mouse_up|scroll|type|key|hold_key|"
        "cursor_position|wait|zoom coordinate=wholes start_coordinate=wholes region=wholes text "
        "scroll_direction=up|down|left|right scroll_amount=whole duration=number",
    ),
}  # fmt: skip


class Called(NamedTuple):
    """How a call of a tool is told: under the name that its client gave it, and as which kind."""

    name: str
    kind: ToolKind = FUNCTION
    namespace: str | None = None


# ---- the tools of a request ---------------------------------------------------------------------


class Toolbox:
    """The tools of a request.

    Attributes:
        tools: What a model is shown, in the form of OpenAI's chat; ``strict`` only where it is
            true.
        left_out: Kinds of the tools that only a provider runs.

    Args:
        declared: The tools.
        added: Lists of tools that a conversation adds; of one name, the last one counts.
        found: Lists of tools that searches found. The results of these show them, so that the
            prompt's start stays as it was.

    Raises:
        BadRequest: A declared one has no known form, or two have one name.
    """

    def __init__(
        self, declared: list[Any], added: Sequence[list[Any]] = (), found: Sequence[list[Any]] = ()
    ) -> None:
        self.left_out = list[str]()
        self._called = dict[str, Called]()
        tools = self._read(declared)
        for tool in itertools.chain.from_iterable(added):
            tools |= self._past(tool)
        self.tools = tuple(tools.values())
        for tool in itertools.chain.from_iterable(found):
            self._past(tool)

    def _past(self, tool: Any) -> dict[str, Tool]:
        """A tool that a conversation holds; one of no known form, nobody can mend there."""
        try:
            return self._read([tool])
        except BadRequest:
            self.left_out.append(kind_of(tool) or "unknown")
            return {}

    def _read(self, listed: list[Any]) -> dict[str, Tool]:
        """The tools of a list by the names under which they are shown."""
        tools = dict[str, Tool]()
        for given, path, namespace in _unfolded(listed):
            if (kind := _kind_of(given)) is None:
                self.left_out.append(kind_of(given))
                continue
            function = _function(given, kind, path)
            called = Called(function["name"], kind, namespace)
            name = joined(namespace, called.name)
            made = {"type": "function", "function": {**function, "name": name}}
            if tools.get(name, made) != made:
                message = f"several tools are called {shown(name)}, expected one; rename them"
                raise BadRequest(message, "tools")
            tools[name] = made
            self._called[name] = called
        return tools

    def called(self, name: str) -> Called:
        """How a call of this name is told; a model may leave a namespace out."""
        bare = [called for called in self._called.values() if called.name == name]
        return self._called.get(name) or (bare[0] if len(bare) == 1 else Called(name))

    # ---- choices -----------------------------------------------------------------------------

    def choose(self, found: Any) -> tuple[tuple[Tool, ...], str]:
        """The tools that may be called, and ``GenerationRequest.tool_choice``: "auto", "none",
        "required", or the name of a tool.

        Raises:
            BadRequest: A call is demanded of a tool that is not there.
        """
        kind = found if isinstance(found, str) else kind_of(found)
        if kind == "allowed_tools":
            return self._allowed(found)
        if kind in WORDS:
            if (word := WORDS[kind]) == "required" and not self.tools:
                message = "tool_choice demands a call, but the client has no tools; add one"
                raise BadRequest(message, "tool_choice")
            return self.tools, word
        return self.tools, "auto" if found is None else self._named(found, "tool_choice")

    def _allowed(self, found: Mapping[str, Any]) -> tuple[tuple[Tool, ...], str]:
        inner = found.get("allowed_tools", found)
        listed = inner.get("tools") if isinstance(inner, dict) else None
        mode = WORDS.get(str(inner.get("mode") or "auto")) if isinstance(inner, dict) else None
        if not isinstance(listed, list) or mode is None:
            expected = "a mode, auto or required, and a list of tools"
            raise unread(found, "tool_choice", expected)
        own = [each for each in listed if kind_of(each) not in self.left_out]
        names = {self._named(each, "tool_choice.tools") for each in own}
        tools = tuple(tool for tool in self.tools if tool["function"]["name"] in names)
        return tools, mode if tools else "none"

    def _named(self, choice: Any, param: str) -> str:
        """The name under which a model is shown a tool that is chosen."""
        given = {"name": choice} if isinstance(choice, str) else choice
        inner = _inner(given)
        name = inner.get("name", kind_of(given))
        whole = joined(inner.get("namespace"), name) if isinstance(name, str) else ""
        if whole not in self._called:
            whole = {called.name: n for n, called in self._called.items()}.get(whole, "")
        if whole and whole not in WORDS:
            return whole
        if not name or (isinstance(choice, str) and not whole):
            raise unread(choice, param, "auto, none, required, or the name of a tool")
        why = "which is also a choice; rename it" if whole else "which is not in tools; add it"
        if name in self.left_out or kind_of(given) in self.left_out:
            why = "which only a provider runs; name a tool of the client"
        raise BadRequest(f"{param} names {shown(name)}, {why}", param)


def _inner(found: Any) -> dict[str, Any]:
    """What is declared or chosen, which OpenAI's chat has within a field of its kind."""
    given = found if isinstance(found, dict) else {}
    fields = (f for f in ("function", "custom") if isinstance(given.get(f), dict))
    return next(({**given[f], "type": f} for f in fields), given)


def tools_in(item: Any) -> list[Any]:
    found = item.get("tools")
    return found if isinstance(found, list) else []


def searched(item: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a search for tools, with a text of those that it found."""
    try:
        found = [tool["function"] for tool in Toolbox(tools_in(item)).tools]
    except BadRequest:
        found = tools_in(item)
    text = "\n".join(json.dumps(function, ensure_ascii=False) for function in found)
    return {"output": "No tool was found.", **item, **({"output": text} if text else {})}


def _unfolded(listed: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str, str | None]]:
    """What is declared, where it stands, and its namespace, whose first tool tells of it."""
    for number, tool in enumerate(listed):
        if kind_of(tool) != "namespace":
            yield _inner(tool), f"tools.{number}", None
            continue
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("tools"), list):
            raise unread(tool, f"tools.{number}", "a namespace with its name and tools")
        about = [tool.get("description")]
        for place, given in enumerate(map(_inner, tool["tools"])):
            texts = [t for t in (*about, given.get("description")) if isinstance(t, str) and t]
            about = []
            given = {**given, "description": "\n\n".join(texts)}
            yield given, f"tools.{number}.tools.{place}", tool["name"]


def _function(given: dict[str, Any], kind: ToolKind, path: str) -> dict[str, Any]:
    """The function that a model is shown."""
    name = given.get("name") or ("" if kind in (FUNCTION, CUSTOM) else kind_of(given))
    schema = json_object(next((given[n] for n in SCHEMAS if given.get(n)), {}))
    if not (isinstance(name, str) and name) or schema is None:
        raise unread(given, path, "a function with its name and parameters")
    for field, rule in TOOL.items():
        if rule and given.get(field) is not None and (why := rule.refusal(given[field])):
            raise BadRequest(f"{path}.{field} {why}", f"{path}.{field}")
    function: dict[str, Any] = {"name": name}
    if text := "\n".join(_told(given, kind)):
        function["description"] = text
    function["parameters"] = {"type": "object", "properties": {}, **(schema or kind.parameters)}
    if given.get("strict") is True:
        function["strict"] = True
    return function


def _kind_of(given: Mapping[str, Any]) -> ToolKind | None:
    """The kind of a tool; None if only a provider runs it. What has a schema is a function."""
    named, place = kind_of(given), given.get("environment")
    if named == "tool_search":
        return KINDS[named] if given.get("execution") == "client" else None
    if named in ("", "function") or any(given.get(n) is not None for n in SCHEMAS):
        return FUNCTION
    if isinstance(place, dict) and place.get("type") != "local":  # a shell of the provider
        return None
    return KINDS.get(named)


def _told(given: Mapping[str, Any], kind: ToolKind) -> Iterator[str]:
    """What a model is told of a tool: what its description says, and what its settings do."""
    described = given.get("description")
    if text := described if isinstance(described, str) and described else kind.description:
        yield text
    form = given.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) else {}
    if kind is CUSTOM and isinstance(grammar, dict) and grammar.get("definition"):
        yield f"Its input follows this grammar ({grammar.get('syntax')}):\n{grammar['definition']}"
    if kind is CUSTOM:
        yield "The argument input is the text that it takes."
    numbers = [f"{n}: {v}" for n, v in given.items() if type(v) is int and kind is not FUNCTION]
    if numbers:
        yield ", ".join(numbers)
    if examples := given.get("input_examples"):
        yield f"Examples of its input: {json.dumps(examples, ensure_ascii=False)}"
