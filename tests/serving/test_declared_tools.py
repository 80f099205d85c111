"""Tools that are no plain functions, as Codex and Claude's clients declare them, over many turns.

Each model writes one call; what its client gets, sends back and is read of it is by the published
clients' own types. A kind that is told wrongly, or comes back as another text, fails.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.engines import SEEN, Seen
from tests.support.real_templates import CALL, FOLDER, IM, THINK, Writer, write_real
from tests.support.serving import running

PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "1"\n+x = "2 \\n"\n*** End Patch\n'
DIFF = "@@\n-a\n+b\n"
# What models write: the name that they are shown, and the arguments.
JSON_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "searches": ("mcp__docs__search", {"query": "fjord", "limit": 2}),
    "forgets the server": ("search", {"query": "fjord", "limit": 2}),
    "edits": ("edit", {"input": PATCH}),
    "edits in its way": ("edit", {"patch": PATCH}),
    "runs": ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 9}),
    "runs a text": ("local_shell", {"command": "ls"}),
    "runs two": ("shell", {"commands": ["ls", "pwd"]}),
    "patches": ("apply_patch", {"type": "update_file", "path": "a.py", "diff": DIFF}),
    "seeks": ("tool_search", {"query": "mail"}),
    "found": ("mcp__mail__send", {"to": "Ann"}),
    "executes": ("exec", {"input": "await run('x')\n"}),
    "bash": ("bash", {"command": "ls"}),
    "views": ("str_replace_based_edit_tool",
              {"command": "view", "path": "/a", "view_range": [1, 2]}),
    "recalls": ("memory", {"command": "view", "path": "/memories"}),
    "clicks": ("computer", {"action": "left_click", "coordinate": [3, 4]}),
}  # fmt: skip
TAG_CALLS = ("searches", "edits", "runs", "views")  # also by models that write tags
# Of these the call, too, is the one that was written; others are put right, or spelled anew.
EXACT = JSON_CALLS.keys() - {"forgets the server", "edits in its way", "runs a text"}


def in_tags(name: str, arguments: dict[str, Any]) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"\n<function={name}>\n{inner}</function>\n"


def callers() -> Iterator[Writer]:
    def made(name: str, family: str, *pieces: str) -> Writer:
        template = (FOLDER / f"{family}.jinja").read_text()
        marks = (*IM, *CALL, *THINK)
        return Writer(name, "<|im_end|>", marks, "", template=template, pieces=pieces)

    for name, (tool, arguments) in JSON_CALLS.items():
        text = f"\n{json.dumps({'name': tool, 'arguments': arguments})}\n"
        yield made(name, "qwen2.5", "<tool_call>", text, "</tool_call>")
    for name in TAG_CALLS:
        tagged = in_tags(*JSON_CALLS[name])
        pieces = ("so", "</think>", "<tool_call>", tagged, "</tool_call>")
        yield made(f"{name} in tags", "qwen3.5", *pieces)
    again = '\n{"name": "now", "arguments": {}}\n'
    yield made("goes on", "qwen2.5", "<tool_call>", again, "</tool_call>", "\n", "<tool_call>")


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    models = {c.name: str(write_real(root / c.name, c)) for c in callers()}
    with running(root, SEEN, models=models, keep_conversations=False) as server:
        yield server.url


def function(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {n: {"type": t} for n, t in properties.items()}}
    return {"type": "function", "name": name, "description": f"Does {name}.", "parameters": schema}


def namespace(name: str, *tools: Any) -> dict[str, Any]:
    about = f"All of {name}."
    return {"type": "namespace", "name": name, "description": about, "tools": [*tools]}


# ---- Codex ---------------------------------------------------------------------------------------

MAIL = namespace("mcp__mail__", function("send", to="string"))
CODEX = [
    function("update_plan", plan="string"),
    namespace("mcp__docs__", function("search", query="string", limit="integer"), function("read")),
    namespace("mcp__files", function("read")),
    {"type": "custom", "name": "edit", "description": "A FREEFORM tool.",
     "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.",
     "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "of_tomorrow", "servers": ["s"]},
]  # fmt: skip
ADDED = {"type": "additional_tools", "role": "developer", "tools": [
    namespace("functions", {"type": "custom", "name": "exec", "description": "Runs JavaScript."})
]}  # fmt: skip
SHOWN = [
    "update_plan", "mcp__docs__search", "mcp__docs__read", "mcp__files__read", "edit",
    "local_shell", "shell", "apply_patch", "tool_search", "exec",
]  # fmt: skip
SEARCH = {"type": "function_call", "name": "search", "namespace": "mcp__docs__"}
EDIT = {"type": "custom_tool_call", "name": "edit", "input": PATCH}
RUN = {"type": "exec", "env": {}, "command": ["ls", "-l"], "timeout_ms": 9}
# What the client is told of them.
TOLD: dict[str, dict[str, Any]] = {
    "searches": SEARCH, "searches in tags": SEARCH, "forgets the server": SEARCH,
    "edits": EDIT, "edits in tags": EDIT, "edits in its way": EDIT,
    "runs": {"type": "local_shell_call", "action": RUN},
    "runs in tags": {"type": "local_shell_call", "action": RUN},
    "runs a text": {"type": "local_shell_call",
                    "action": {"type": "exec", "env": {}, "command": ["ls"]}},
    "runs two": {"type": "shell_call", "action": {"commands": ["ls", "pwd"]}},
    "patches": {"type": "apply_patch_call", "operation": JSON_CALLS["patches"][1]},
    "seeks": {"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}},
    "found": {"type": "function_call", "name": "send", "namespace": "mcp__mail__"},
    "executes": {"type": "custom_tool_call", "name": "exec", "namespace": "functions",
                 "input": JSON_CALLS["executes"][1]["input"]},
}  # fmt: skip
OUTPUTS: dict[str, dict[str, Any]] = {
    "tool_search_call": {"type": "tool_search_output", "execution": "client", "tools": [MAIL]},
    "shell_call": {"output": [{"stdout": "FACT", "stderr": "", "outcome": {"type": "exit"}}]},
}


def result(item: dict[str, Any], fact: str) -> dict[str, Any]:
    kind, identity = item["type"], item["call_id"]
    plain: dict[str, Any] = {"type": f"{kind}_output", "call_id": identity, "output": fact}
    if kind == "local_shell_call":
        plain = {"type": f"{kind}_output", "id": identity, "output": fact}
    made: dict[str, Any] = json.loads(
        json.dumps(plain | OUTPUTS.get(kind, {})).replace("FACT", fact)
    )
    return made


def streamed(client: Any, model: str, history: list[Any]) -> tuple[dict[str, Any], Any, Any]:
    """The call as the client's types dump it, its pieces put together, and the counts."""
    with client.responses.with_streaming_response.create(
        model=model, input=history, stream=True, instructions="You are an agent.", tools=CODEX,
        tool_choice="auto", parallel_tool_calls=False, store=False, max_output_tokens=40,
        include=["reasoning.encrypted_content"], reasoning={"effort": "medium", "summary": "auto"},
        prompt_cache_key="k", extra_body={"client_metadata": {"a": "b"}},
    ) as raw:  # fmt: skip
        left_out = "web_search, image_generation, shell, of_tomorrow"
        assert raw.headers["x-kvlingo-left-out"] == left_out
        events = list(raw.parse())
    last = events[-1].response
    pieces = "".join(
        e.delta for e in events if e.type.endswith(("_input.delta", "arguments.delta"))
    )
    (call,) = (item for item in last.output if item.type.endswith("_call"))
    (done,) = (e.item for e in events if e.type == "response.output_item.done" and e.item == call)
    assert done.status == "completed"
    dumped = [item.model_dump(exclude_unset=True, by_alias=True) for item in last.output]
    history += dumped
    return dumped[-1], pieces, last.usage


def test_codex_over_many_turns(url: str) -> None:
    """Each kind is called twice in a row: nothing of the first time is read again."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    history: list[Any] = [ADDED, {"role": "user", "content": [{"type": "input_text", "text": "?"}]}]
    facts = list[str]()
    for number, (model, told) in enumerate(TOLD.items()):
        held = 0
        for again in (0, 1):
            item, pieces, usage = streamed(client, model, history)
            where = (model, again)
            assert told.items() <= item.items(), (where, item)
            assert ("namespace" in item) == ("namespace" in told), where
            for field in ("arguments", "input"):
                if field in item and isinstance(item[field], str):
                    assert item[field] == pieces, where
            assert usage.input_tokens_details.cached_tokens >= held - 1, where
            held = usage.input_tokens + (usage.output_tokens if model in EXACT else 0)
            facts.append(f"fact{number}{again}")
            history.append(result(item, facts[-1]))
    facts.append("fact of another agent")
    spoken = [{"type": "input_text", "text": facts[-1]}]
    agent = {"type": "agent_message", "author": "a", "recipient": "b", "content": spoken}
    history += [{"role": "user", "content": "Well?"}, agent]
    streamed(client, "runs", history)
    ask = Seen.asks[-1]
    assert [tool["function"]["name"] for tool in ask.tools] == SHOWN
    text = json.dumps(ask.messages)
    assert all(fact in text for fact in facts if fact not in facts[22:24])  # of a search
    assert text.count("mcp__mail__send") >= 3 and "All of mcp__mail__" in text
    shown = {tool["function"]["name"]: tool["function"] for tool in ask.tools}
    assert "All of mcp__docs__." in shown["mcp__docs__search"]["description"]
    assert "Begin Patch" in shown["edit"]["description"]
    assert shown["local_shell"]["parameters"]["properties"]["command"]["type"] == "array"


# ---- chat and messages ---------------------------------------------------------------------------


def test_chat_has_custom_tools(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    custom = {"type": "custom", "custom": {"name": "edit", "description": "d"}}
    asked: dict[str, Any] = {"model": "edits", "tools": [custom], "max_tokens": 40}
    hi = {"role": "user", "content": "?"}
    first = client.chat.completions.create(messages=[hi], **asked)
    (call,) = first.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "edit", PATCH)
    assert first.choices[0].finish_reason == "tool_calls"
    said = [hi, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "r"}]
    usage = client.chat.completions.create(messages=said, **asked).usage
    held = first.usage.prompt_tokens + first.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= held - 1
    chunks = list(client.chat.completions.create(messages=[hi], stream=True, **asked))
    (told,) = (c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls)
    assert told[0].custom["input"] == PATCH


CLAUDE = [
    {"name": "Task", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True,
     "input_examples": [{"a": "first example"}], "allowed_callers": ["direct", "code_execution"]},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 77},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "computer_20251124", "name": "computer", "display_width_px": 640,
     "display_height_px": 480},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "s"},
]  # fmt: skip


def test_claudes_tools_over_many_turns(url: str) -> None:
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    history: list[Any] = [{"role": "user", "content": "?"}]
    edits = [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}]
    for model in ("bash", "views", "views in tags", "recalls", "clicks"):
        held = 0
        for again in (0, 1):
            asked: dict[str, Any] = {"model": model, "messages": history, "tools": CLAUDE}
            more = {"context_management": {"edits": [*edits, {"type": "compact_20260112"}]}}
            count = claude.messages.count_tokens(**asked, extra_body={"max_tokens": 9, **more})
            with claude.messages.stream(**asked, max_tokens=40, extra_body=more) as stream:
                answer = stream.get_final_message()
                left_out = stream.response.headers["x-kvlingo-left-out"]
            assert left_out.startswith("web_search, web_fetch, code_execution, tool_search_tool")
            use = answer.content[-1]
            name, arguments = JSON_CALLS[model.removesuffix(" in tags")]
            assert (use.type, use.name, use.input) == ("tool_use", name, arguments), (model, again)
            cached = answer.usage.cache_read_input_tokens
            assert count.input_tokens == answer.usage.input_tokens + cached
            assert cached >= held - 1, (model, again)
            held = count.input_tokens + (answer.usage.output_tokens if model in EXACT else 0)
            told = {
                "type": "tool_result",
                "tool_use_id": use.id,
                "content": f"fact {model} {again}",
            }
            history += [{"role": "assistant", "content": answer.content},
                        {"role": "user", "content": [told]}]  # fmt: skip
    shown = {tool["function"]["name"]: tool["function"] for tool in Seen.asks[-1].tools}
    assert shown.keys() == {
        "Task",
        *(JSON_CALLS[m][0] for m in ("bash", "views", "recalls", "clicks")),
    }
    editor = shown["str_replace_based_edit_tool"]
    assert {"view", "insert"} < {*editor["parameters"]["properties"]["command"]["enum"]}
    assert "77" in editor["description"] and "640" in shown["computer"]["description"]
    assert "first example" in shown["Task"]["description"]
    with pytest.raises(anthropic.BadRequestError, match="which only a provider runs"):
        claude.messages.create(
            **asked, max_tokens=4, tool_choice={"type": "tool", "name": "web_search"}
        )


# ---- choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_only_allowed_tools_are_shown(url: str, api: str) -> None:
    tools = [function("now"), function("then"), namespace("mcp__a", function("look")), *CODEX[3:9]]
    listed: list[Any] = [{"type": "function", "name": "now"}, {"type": "custom", "name": "edit"},
                         {"type": "function", "name": "mcp__a__look"}, {"type": "shell"},
                         {"type": "web_search"}]  # fmt: skip
    allowed: dict[str, Any] = {"mode": "auto", "tools": listed}
    body: dict[str, Any] = {"model": "goes on", "tools": tools, "max_output_tokens": 30}
    path, choice = "responses", {"type": "allowed_tools", **allowed}
    body["input"] = "?"
    if api == "chat":
        path, choice = "chat/completions", {"type": "allowed_tools", "allowed_tools": allowed}
        body = {"model": "goes on", "tools": tools, "max_tokens": 30,
                "messages": [{"role": "user", "content": "?"}]}  # fmt: skip

    def ask() -> Any:
        return httpx.post(f"{url}/v1/{path}", json={**body, "tool_choice": choice}, timeout=60)

    assert ask().is_success and Seen.asks[-1].tool_choice == "auto"
    names = [tool["function"]["name"] for tool in Seen.asks[-1].tools]
    assert names == ["now", "mcp__a__look", "edit", "shell"]
    allowed["mode"] = choice["mode"] = "required"
    assert ask().is_success and Seen.asks[-1].tool_choice == "required"
    body["tools"].append({"type": "function", "name": "web_search", "parameters": {}})
    listed[:] = [{"type": "function", "name": "web_search"}]  # the client's, not the provider's
    assert ask().is_success
    assert [tool["function"]["name"] for tool in Seen.asks[-1].tools] == ["web_search"]
    listed[:] = [{"type": "function", "name": "never"}]
    refused = ask()
    assert refused.status_code == 400 and "never" in refused.json()["error"]["message"]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_several_calls_may_be_demanded(url: str, parallel: bool, choice: Any) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}}]  # fmt: skip
    answer = client.chat.completions.create(
        model="goes on", messages=[{"role": "user", "content": "?"}], tools=tools, max_tokens=20,
        tool_choice=choice, parallel_tool_calls=parallel,
    )  # fmt: skip
    calls = answer.choices[0].message.tool_calls
    several = parallel and choice == "required"  # a named tool is called once
    assert len(calls) >= 3 if several else len(calls) == 1
    assert {(call.function.name, call.function.arguments) for call in calls} == {("now", "{}")}
