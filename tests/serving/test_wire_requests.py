"""What requests of each API ask for, and what is refused."""

import json
from typing import Any

import pytest

from kvlingo_mlx.serving.messages import Failure, GenerationRequest, Sampling
from kvlingo_mlx.serving.wire import BadRequest, anthropic, chat, responses
from kvlingo_mlx.serving.wire.oddities import UNSUPPORTED
from tests.support.wire_app import CALL, TOOL
from tests.support.wire_bodies import CHAT, COMPLETION, MESSAGES, RESPONSES, SAMPLED, SCHEMA

HI = [{"role": "user", "content": "hi"}]
SHORT: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (chat.API, {"model": "m", "messages": HI}),
    "completions": (chat.COMPLETIONS, {"model": "m", "prompt": "hi"}),
    "messages": (anthropic.API, {"model": "m", "messages": HI, "max_tokens": 5}),
    "responses": (responses.API, {"model": "m", "input": "hi"}),
}
CHATS = [name for name in SHORT if name != "completions"]
REQUESTS: dict[str, Any] = {name: api.request for name, (api, _) in SHORT.items()}
TOOL_CALL = {"type": "function", "function": TOOL}


def ask(api: str, **fields: Any) -> GenerationRequest:
    reader, body = SHORT[api]
    return reader.read({**body, **fields}).ask


def said(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def refusal(api: str, **fields: Any) -> Failure:
    with pytest.raises(BadRequest) as refused:
        ask(api, **fields)
    return refused.value.failed


def test_a_full_chat_request() -> None:
    read = chat.API.read(CHAT)
    assert read.stream and read.ask == GenerationRequest(
        model="large",
        messages=(
            {"role": "system", "content": "Be kind.", "name": "boss"},
            {"role": "user", "content": "Hej!"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "Hm.",
                "tool_calls": [CALL],
            },
            {"role": "tool", "content": "9", "tool_call_id": "call_1", "name": "weather"},
        ),
        begun="It is",
        tools=({"type": "function", "function": {**TOOL, "strict": True}},),
        tool_choice="weather",
        parallel_tool_calls=False,
        schema=SCHEMA,
        max_tokens=20,
        stop=("END", "\n\n"),
        sampling=Sampling(**{**SAMPLED, "logit_bias": {42: -1.5}}),
        logprobs=3,
        template={"reasoning_effort": "low", "enable_thinking": False},
        strategy="reread",
        pin=True,
    )


def test_a_full_completion_request() -> None:
    read = chat.COMPLETIONS.read(COMPLETION)
    assert not read.stream and read.ask == GenerationRequest(
        model="large",
        prompt=(1, 2, 3),
        max_tokens=5,
        stop=("END",),
        sampling=Sampling(**{**SAMPLED, "logit_bias": {42: -1.5}}),
        logprobs=2,
        pin=True,
    )


def test_a_full_messages_request() -> None:
    told = anthropic.API.read(MESSAGES).ask
    called = {"id": "t1", "type": "function"}
    called["function"] = {"name": "weather", "arguments": '{"city": "Malmö"}'}
    assert told.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hej"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [called],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: 9"},
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Be brief."},
    )
    function = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
    assert told.tools == ({"type": "function", "function": function},)
    assert (told.tool_choice, told.parallel_tool_calls, told.schema) == ("weather", False, SCHEMA)
    assert told.template == {"reasoning_effort": "high", "enable_thinking": False}
    assert told.begun == "It is" and told.max_tokens == 30 and told.stop == ("END",)


def test_a_full_responses_request() -> None:
    told = responses.API.read(RESPONSES).ask
    assert told.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hej"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {**CALL, "function": {"name": "weather", "arguments": '{"city": "Malmö"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "9"},
    )
    assert (told.tool_choice, told.schema, told.logprobs) == ("weather", SCHEMA, 2)
    assert told.template == {"reasoning_effort": "medium", "enable_thinking": False}


@pytest.mark.parametrize("api", SHORT)
def test_null_is_as_if_it_were_not_there(api: str) -> None:
    reader, body = SHORT[api]
    fields = REQUESTS[api].model_fields.items()
    optional = [name for name, field in fields if not field.is_required()]
    nulls: dict[str, Any] = dict.fromkeys([*optional, *REQUESTS[api].rules, "of_tomorrow"])
    assert len(nulls) > 25
    assert reader.read({**nulls, **body}).ask == reader.read(body).ask


def test_answers_of_one_go_are_one_message() -> None:
    """Reasoning, text and calls come as items of their own; the next reasoning begins anew."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    said = {"role": "assistant", "content": "t"}
    other = call | {"call_id": "d"}
    items = [thought, said, call, other, call, thought, call, said, said]  # one of them twice
    told = ask("responses", input=items).messages
    assert told is not None
    empty = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    whole = {"role": "assistant", "content": "t", "reasoning_content": "s"}
    assert told == (
        whole | {"tool_calls": [empty, empty | {"id": "d"}]},
        whole | {"tool_calls": [empty]},
        {"role": "assistant", "content": "t"},
    )


def test_each_block_of_a_system_prompt_is_a_line() -> None:
    """So that a line which changes with every request can be told from the rest."""
    blocks = [{"type": "text", "text": t} for t in ("x-anthropic-billing-header: 1", "You are")]
    told = ask("messages", system=blocks).messages
    assert told is not None and told[0]["content"] == "x-anthropic-billing-header: 1\nYou are"
    assert ask("messages", system="").messages == tuple(HI)


@pytest.mark.parametrize("api", CHATS)
def test_choices_of_tools(api: str) -> None:
    tool: dict[str, Any] = TOOL_CALL
    words = {"auto": "auto", "none": "none", "required": "required"}
    if api == "messages":
        tool = {"name": "weather", "input_schema": SCHEMA}
        words = {"auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}
    if api == "responses":
        tool = {"type": "function", **TOOL}
    for meant, word in words.items():
        assert ask(api, tools=[tool], tool_choice=word).tool_choice == meant
    assert "no tools" in refusal(api, tool_choice=words["required"]).message
    assert len(ask(api, tools=[tool, tool]).tools) == 1
    other = {
        **tool,
        **({"function": TOOL | {"description": "x"}} if api == "chat" else {"description": "x"}),
    }
    assert refusal(api, tools=[tool, other]).param == "tools"
    named: dict[str, Any] = {"type": "tool" if api == "messages" else "function", "name": "rain"}
    if api == "chat":
        named = {"type": "function", "function": {"name": "rain"}}
    assert "is not in tools" in refusal(api, tools=[tool], tool_choice=named).message


def test_thinking_is_switched_by_the_template() -> None:
    assert ask("messages", thinking={"type": "disabled"}).template == {"enable_thinking": False}
    assert ask("messages", thinking={"type": "adaptive"}).template == {}
    assert ask("chat", reasoning_effort="none").template == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    given = {"reasoning_effort": "high"}
    assert ask("chat", reasoning_effort="low", chat_template_kwargs=given).template == given
    for api in CHATS:
        for off in (
            {"enable_thinking": False},
            {"thinking": {"type": "disabled"}},
            {"reasoning": {"enabled": False, "exclude": True}},
        ):
            assert ask(api, **off).template == {"enable_thinking": False}
        assert ask(api, reasoning={"effort": "low", "max_tokens": 9}).template == {
            "reasoning_effort": "low"
        }
        for usual in ("", "auto", "default"):
            assert ask(api, reasoning_effort=usual).template == {}


def test_what_changes_no_answer_is_taken() -> None:
    """In the spellings of those who send it with every request."""
    for fields in (
        {"stop": ["", None, "x"]},
        {"tool_choice": ""},
        {"response_format": {}},
        {"response_format": {"type": "text"}},
        {"response_format": "text"},
        {"functions": [], "function_call": "auto"},
        {"prediction": {"type": "content", "content": "x"}, "cache_control": {"type": "ephemeral"}},
        {"include_reasoning": True, "usage": {"include": True}, "transforms": ["middle-out"]},
        {"num_ctx": 4096, "mirostat": 0, "mirostat_tau": 5},
    ):
        stop = {"stop": ["x"]} if "stop" in fields else {}
        assert ask("chat", **fields) == ask("chat", **stop), fields
    assert ask("completions", suffix="") == ask("completions")
    assert ask("completions", echo=True).echo
    kept = [{"type": "compaction", "compact_threshold": 9}]
    assert ask("responses", context_management=kept) == ask("responses")
    assert ask("messages", context_management={"edits": [{"type": "of_tomorrow"}]}) == ask(
        "messages"
    )
    text = json.dumps(SCHEMA)
    for form in (
        {"type": "json_schema", "json_schema": {"schema": text}},
        {"type": "json_object", "schema": SCHEMA},
    ):
        assert ask("chat", response_format=form).schema == SCHEMA
    schema = {"type": "json_schema", "schema": SCHEMA}
    assert ask("messages", output_format=schema).schema == SCHEMA
    for form in ("json_object", {"type": "json_object"}):
        assert ask("chat", response_format=form).schema == {}
    assert ask("responses", text={"format": form}).schema == {}
    for tool in (
        {"function": {"name": "look", "parameters": text}},
        {"type": "function", "name": "look", "parameters": SCHEMA},
        {"type": "custom", "name": "look", "input_schema": SCHEMA},
        {"name": "look", "inputSchema": SCHEMA},
    ):
        (made,) = ask("chat", tools=[tool]).tools
        assert made["function"] == {"name": "look", "parameters": SCHEMA}
    bare = ask("chat", tools=[{"type": "function", "function": {"name": "a", "parameters": []}}])
    assert bare.tools[0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_what_was_said_before_may_hold_anything_else() -> None:
    """Only what a model can be given is read of it; every form is read in every API."""
    odd = {"from_another": ["vendor"], "refusal": None, "audio": {"id": 1}}
    parts = [
        {"type": "thinking", "thinking": "s", "signature": "x", **odd},
        {"type": "text", "text": "t", "annotations": [], **odd},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    flat = {"role": "assistant", "content": "t", "reasoning": "s", "tool_calls": [call], **odd}
    whole = {"role": "assistant", "content": "t", "reasoning_content": "s", "tool_calls": [call]}
    for api, field in (("chat", "messages"), ("messages", "messages"), ("responses", "input")):
        for message in (flat, {"role": "assistant", "content": parts, **odd}):
            history = [*HI, message, {**HI[0], **odd}]
            assert ask(api, **{field: history}).messages == (*HI, whole, *HI)
    assert ask("chat", messages=[{"role": "user"}]).messages == ({**HI[0], "content": ""},)


TEXT = {"type": "text", "text": "t"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
SHOWN = "[an image, which this model cannot see]"


def past(*items: Any, api: str = "chat") -> list[dict[str, Any]]:
    """What is made of items before a question."""
    told = ask(api, **{"input" if api == "responses" else "messages": [*items, *HI]}).messages
    assert told is not None and told[-1] == HI[0]
    return [dict(message) for message in told[:-1]]


def test_calls_of_the_past_are_carried() -> None:
    """Whatever their arguments are: the text of an object where they are one, however encoded."""
    for found, text in (
        ('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), (json.dumps('{"a": 1}'), '{"a": 1}'),
        (None, "{}"), ("", "{}"), ("{", "{"), ('{"a": "Hel', '{"a": "Hel'), ([1], "[1]"), (5, "5"),
        ("5", "5"), ('"x"', '"x"'), ('{"a": "\\ud83d"}', '{"a": "\ufffd"}'),
    ):  # fmt: skip
        call = {"id": "c", "function": {"name": "f", "arguments": found}}
        use = {"type": "tool_use", "id": "c", "name": "f", "input": found}
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": found}
        made = {**call, "type": "function", "function": {"name": "f", "arguments": text}}
        answer = {"role": "assistant", "content": "", "tool_calls": [made]}
        assert past({"role": "assistant", "tool_calls": [call]}) == [answer]
        assert past({"role": "assistant", "content": [use]}, api="messages") == [answer]
        assert past(item, api="responses") == [answer]
    (nameless,) = past({"role": "assistant", "tool_calls": [{"function": {}}, 5]})
    (call,) = nameless["tool_calls"]
    assert (call["id"], call["function"]) == ("", {"name": "unknown", "arguments": "{}"})
    assert nameless["content"] == "5"
    (deep,) = past({"role": "assistant", "function_call": {"name": "f", "arguments": "[" * 10**5}})
    assert deep["tool_calls"][0]["function"]["arguments"].endswith("[" * 10**5)


@pytest.mark.parametrize(
    ("items", "made"),
    [
        ([{"role": "user", "content": [TEXT, PICTURE]}], [("user", f"t\n{SHOWN}")]),
        ([{"role": "tool", "content": [PICTURE, TEXT]}], [("tool", f"{SHOWN}\nt")]),
        ([{"role": "tool", "content": {"a": 1}}], [("tool", '{"a": 1}')]),
        ([{"role": "tool", "content": [{"type": "row", "a": 1}]}],
         [("tool", '{"type": "row", "a": 1}')]),
        ([{"role": "tool", "content": [{"type": "blob", "data": "x" * 9999}]}],
         [("tool", "[blob]")]),
        ([{"role": "function", "name": "f", "content": "x"}], [("tool", "x")]),
        ([{"role": "developer", "content": "x"}], [("system", "x")]),
        ([{"role": "narrator", "content": "x"}], [("system", "x")]),
        ([{"role": "latest_reminder", "content": "x"}], [("latest_reminder", "x")]),
        ([{"role": "assistant", "audio": {"id": "1", "transcript": "x"}}], [("assistant", "x")]),
        ([{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}],
         [("user", "x"), ("assistant", "y")]),
        ([{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data":
          "x"}}, {"type": "file", "filename": "a.pdf", "file_data": "JVBE"}]}],
         [("user", "x\n[a file, which this model cannot read: a.pdf]")]),
        ([{"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content":
             [{"type": "web_search_result", "title": "T", "url": "U", "encrypted_content": "E"}]},
            TEXT]}],
         [("assistant", ""), ("tool", '{"type": "web_search_result", "title": "T", "url": "U"}'),
          ("assistant", "t")]),
        ([{"role": "tool", "content": [
            {"type": "issue", "body": "long words " * 900, "blob": "A" * 3000}]}],
         [("tool", '{"type": "issue", "body": "' + "long words " * 900 + '"}')]),
        ([{"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "x"}],
         [("assistant", ""), ("tool", "x")]),
        ([{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}], [("tool", "x")]),
        ([{"type": "image_generation_call", "result": "iVBORw"}], [("system", SHOWN)]),
        ([{"type": "item_reference", "id": "x"}],
         [("system", "[an earlier item, which was not sent]")]),
        ([{"type": "reasoning", "encrypted_content": "E", "summary": []}], []),
        (["x", 5, None, {"a": 1}], [("user", "x"), ("user", "5"), ("user", '{"a": 1}')]),
        ([{"role": "user", "content": [TEXT, RESULT, {**TEXT, "text": "u"}, RESULT]}],
         [("user", "t"), ("tool", "r"), ("user", "u"), ("tool", "r")]),  # in their order
    ],
)  # fmt: skip
def test_what_others_put_into_a_past(items: list[Any], made: list[tuple[str, str]]) -> None:
    for api in CHATS:
        assert [(m["role"], m["content"]) for m in past(*items, api=api)] == made, api


def test_reasoning_of_others() -> None:
    for more in (
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "s"}]}, TEXT]},
        {"content": "t", "reasoning_details": [{"type": "reasoning.encrypted", "data": "E"},
                                               {"type": "reasoning.summary", "summary": "s"}]},
        {"content": "t", "thinking": "s"},
    ):  # fmt: skip
        (made,) = past({"role": "assistant", **more})
        assert made == {"role": "assistant", "content": "t", "reasoning_content": "s"}


def test_a_picture_is_refused_where_it_is_what_is_asked() -> None:
    """Not in a message that its client joined of several: that session could never go on."""
    for parts in ([PICTURE], [TEXT, PICTURE]):
        assert (
            refusal("chat", **said("user", parts)).param
            == f"messages.0.content.{len(parts) - 1}.type"
        )
    for parts in (
        [PICTURE, TEXT, TEXT],
        [{"type": "tool_result", "tool_use_id": "t", "content": [PICTURE]}, PICTURE],
    ):
        told = ask("messages", **said("user", parts)).messages
        assert told is not None and SHOWN in told[0]["content"]


def test_kinds_that_are_not_supported_say_why() -> None:
    for kind, why in UNSUPPORTED.items():
        for dated in (kind, f"{kind}_20250305"):
            bad = refusal("messages", **said("user", [{"type": dated}]))
            assert bad.param == "messages.0.content.0.type" and why in bad.message


def test_the_last_message_may_be_begun() -> None:
    begun = [*HI, {"role": "assistant", "content": "So"}]
    whole = ask("chat", messages=begun)
    assert (whole.begun, len(whole.messages or ())) == ("", 2)
    for cut in (
        ask("chat", messages=begun, continue_final_message=True),
        ask("chat", messages=[*HI, {**begun[-1], "prefix": True}]),  # DeepSeek's, Mistral's
        ask("chat", messages=[*HI, {**begun[-1], "partial": True}]),  # Moonshot's, Qwen's
        ask("messages", messages=begun),
    ):
        assert (cut.begun, len(cut.messages or ())) == ("So", 1)
    assert not ask("messages").begun and not ask("chat", messages=[{**HI[0], "prefix": True}]).begun
    assert "assistant" in refusal("chat", continue_final_message=True).message
    assert refusal("chat", add_generation_prompt=False).param == "add_generation_prompt"
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    called = ask("messages", messages=[*HI, {"role": "assistant", "content": [use]}])
    assert not called.begun  # a call is whole; what it came to is not known


BEYOND: dict[str, list[Any]] = {
    "stream": ["yes"], "max_tokens": [0, 1.5], "temperature": [-0.1], "top_p": [1.1],
    "top_k": [-2], "min_p": [2], "repetition_penalty": [-1], "repetition_context_size": [-3],
    "presence_context_size": [-1], "frequency_context_size": [-1], "xtc_probability": [1.5],
    "xtc_threshold": [-1], "logprobs": ["x"], "top_logprobs": [21],
    "logit_bias": [{"a": 1}, {"1": "a"}, [1]], "seed": [1.5, True], "adapters": ["a"],
    "draft_model": ["other"], "stop": [3], "role_mapping": [{}], "model": [3, ""],
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_ranges_of_mlx_lms_server(api: str, name: str) -> None:
    for value in BEYOND[name]:
        bad = refusal(api, **{name: value})
        assert (bad.param or "").split(".")[0] == name and bad.message.count("\n") == 0


def test_numbers_by_which_others_mean_no_limit() -> None:
    """Those of llama.cpp, LM Studio, Ollama and vLLM, some under names of their own."""
    for api, name in (
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("chat", "n_predict"),
        ("completions", "n_predict"),
        ("messages", "max_tokens"),
        ("responses", "max_output_tokens"),
    ):
        assert (ask(api, **{name: -1}).max_tokens or 0) > 2**30, (api, name)
        assert ask(api, **{name: 7}).max_tokens == ask(api, **{name: 7.0}).max_tokens == 7
        assert refusal(api, **{name: 0}).param in (name, "max_tokens")
    for api in SHORT:
        assert ask(api, top_k=-1, seed=-1) == ask(api, top_k=-1.0, seed=-1.0) == ask(api)
        assert ask(api, seed=0).sampling.seed == 0 and ask(api, seed=-2).sampling.seed == 2**64 - 2
    told = ask("chat", repeat_penalty=1.1, repeat_last_n=-1, typical_p=1.0, mirostat=0).sampling
    assert told.repetition_penalty == 1.1 and told.repetition_context_size > 2**30
    assert refusal("chat", mirostat=2).param == "mirostat"
    assert ask("chat", top_logprobs=-1, seed=None).logprobs is None
    assert ask("chat", logprobs=True).logprobs == 0
    assert ask("completions", logprobs=True, top_logprobs=4).logprobs == 4
    assert chat.API.read({"messages": HI}).ask.model == "default_model"


@pytest.mark.parametrize(
    ("api", "name"), [(api, name) for api, kind in REQUESTS.items() for name in kind.rules]
)
def test_known_fields_are_harmless_or_refused_by_name(api: str, name: str) -> None:
    rule = REQUESTS[api].rules[name]
    odd = {"surely": ["nothing"]}
    if rule is None:
        assert ask(api, **{name: odd}) == ask(api)
        return
    bad = refusal(api, **{name: odd})
    assert bad.param == name and name in bad.message and rule.why in bad.message
    for value in rule.values:
        assert ask(api, **{name: value}) == ask(api)


@pytest.mark.parametrize("api", SHORT)
def test_unknown_fields_are_refused(api: str) -> None:
    bad = refusal(api, temprature=0.5)
    assert bad.param == "temprature" and "did you mean temperature?" in bad.message
    assert refusal(api, of_tomorrow=1).param == "of_tomorrow"
    assert refusal(api, **{"a\nb": 1}).message.isprintable()


@pytest.mark.parametrize(
    ("api", "fields", "param", "said"),
    [
        ("chat", {"messages": []}, "messages", "at least 1"),
        ("chat", {"messages": "hi"}, "messages", "valid list"),
        ("chat", {"messages": None}, "messages", "valid list"),
        ("chat", {"messages": ["x"]}, "messages.0", "a message with role"),
        ("chat", {"messages": [{"content": "x"}]}, "messages.0", "a message with role"),
        ("chat", said("user", 5), "messages.0.content", "a text"),
        ("chat", said("user", [5]), "messages.0.content.0", "a part"),
        ("chat", said("user", [{"type": "input_audio"}]), "messages.0.content.0.type", "alone"),
        ("chat", {"tools": [{"type": "custom", "custom": {}}]}, "tools.0", "with its name"),
        ("chat", {"tools": [{"type": "function", "name": ""}]}, "tools.0", "with its name"),
        ("chat", {"tools": [{"parameters": SCHEMA, "type": 1}]}, "tools.0", "a function"),
        ("chat", {"tools": ["look"]}, "tools.0", "a function"),
        ("responses", {"tools": [{"type": "namespace", "name": "n"}]}, "tools.0", "a namespace"),
        ("chat", {"tool_choice": "often"}, "tool_choice", '"often"'),
        ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "a mode"),
        ("chat", {"response_format": {"type": "grammar"}}, "response_format.type", "JSON schema"),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "json_schema with its schema",
        ),
        ("chat", {"kvlingo": {"strategy": "guess"}}, "kvlingo.strategy", "'translate'"),
        ("chat", {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "tokenize"),
        ("completions", {"prompt": ["a", "b"]}, "prompt", "one prompt"),
        ("completions", {"prompt": ""}, "prompt", "not empty"),
        ("completions", {"prompt": [1, -1]}, "prompt", "token ids"),
        ("completions", {"prompt": [True]}, "prompt", "token ids"),
        ("completions", {"messages": HI}, "messages", "not permitted"),
        ("completions", {"echo": True, "logprobs": 1}, "echo", "echo"),
        ("completions", {" ": 1}, " ", "' ': Extra inputs"),
        ("messages", {"max_tokens": None}, "max_tokens", "valid integer"),
        ("messages", {"system": 5}, "system", "a text or a list"),
        ("messages", said("user", [{"type": "image"}]), "messages.0.content.0.type", "text alone"),
        ("messages", {"thinking": {"type": "maybe"}}, "thinking.type", "'enabled'"),
        ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "tools"),
        ("responses", {"background": True}, "background", "false"),
        ("responses", {"previous_response_id": "r"}, "previous_response_id", "whole conversation"),
        (
            "responses",
            {"tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp", "server_label": "s"}},
            "tool_choice",
            "only a provider runs",
        ),
        ("chat", {"guided_json": SCHEMA}, "guided_json", "response_format"),
        ("responses", {"input": []}, "input", "at least 1"),
        ("responses", {"input": [{"type": "item_reference"}]}, "input.0.type", "keeps no"),
    ],
)
def test_what_is_wrong_is_named(api: str, fields: dict[str, Any], param: str, said: str) -> None:
    bad = refusal(api, **fields)
    assert bad.param == param
    assert said.lower() in bad.message.lower(), bad.message


def test_every_sampling_field_is_taken_by_every_api() -> None:
    for api in SHORT:
        told = ask(api, **SAMPLED).sampling
        assert told == Sampling(**{**SAMPLED, "logit_bias": {42: -1.5}})
    assert SAMPLED.keys() == Sampling.model_fields.keys()
    assert all(SAMPLED[name] != getattr(Sampling(), name) for name in SAMPLED)  # else: no test


def test_every_field_of_the_clients_is_known() -> None:
    """That it is taken, or refused for a reason of its own."""
    openai = pytest.importorskip("openai")
    claude = pytest.importorskip("anthropic")
    of_chat = openai.types.chat.completion_create_params.CompletionCreateParamsBase
    of_text = openai.types.completion_create_params.CompletionCreateParamsBase
    of_responses = openai.types.responses.response_create_params.ResponseCreateParamsBase
    of_messages = claude.types.message_create_params.MessageCreateParamsBase
    of_beta = claude.types.beta.message_create_params.MessageCreateParamsBase
    for theirs, ours in (
        (of_chat, REQUESTS["chat"]),
        (of_text, REQUESTS["completions"]),
        (of_responses, REQUESTS["responses"]),
        (of_messages, REQUESTS["messages"]),
        (of_beta, REQUESTS["messages"]),
    ):
        names = theirs.__annotations__.keys()
        known = {field.alias or name for name, field in ours.model_fields.items()}
        assert len(names) > 15
        assert not names - known - ours.rules.keys() - {"stream"}
