"""Bodies of requests in which every field is used, and changes of them."""

import copy
from typing import Any

from tests.support.wire_app import CALL, TOOL

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CACHE = {"type": "ephemeral", "ttl": "5m"}
SAMPLED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7,
    "repetition_penalty": 1.1, "repetition_context_size": 21,
    "presence_penalty": 0.2, "presence_context_size": 22,
    "frequency_penalty": 0.3, "frequency_context_size": 23,
    "xtc_probability": 0.4, "xtc_threshold": 0.2, "logit_bias": {"42": -1.5},
}  # fmt: skip
OWN: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "kvlingo": {"strategy": "reread", "pin": True},
}
CHAT: dict[str, Any] = {
    **SAMPLED, **OWN,
    "model": "large",
    "messages": [
        {"role": "developer", "content": "Be kind.", "name": "boss"},
        {"role": "user",
         "content": [{"type": "text", "text": "Hej"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}],
         "reasoning_content": "Hm.", "reasoning": "Hm.", "refusal": None,
         "provider_specific_fields": {"refusal": None}, "tool_calls": [{**CALL, "index": 0}]},
        {"role": "tool", "content": "9", "tool_call_id": "call_1", "name": "weather"},
        {"role": "assistant", "content": "It is"},
    ],
    "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False},
    "max_tokens": 30, "max_completion_tokens": 20, "stop": ["END", "\n\n"],
    "tools": [{"type": "function", "function": {**TOOL, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema",
                        "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    "logprobs": True, "top_logprobs": 3, "reasoning_effort": "low",
    "add_generation_prompt": False, "continue_final_message": True, "n": 1, "user": "somebody",
    "store": False, "service_tier": "auto", "draft_model": "default_model", "num_draft_tokens": 3,
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    **SAMPLED,
    "kvlingo": {"pin": True}, "model": "large", "prompt": [1, 2, 3], "stream": False,
    "stream_options": {"include_usage": False}, "max_tokens": 5, "stop": "END", "echo": False,
    "logprobs": 2, "best_of": 1, "suffix": None,
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    **SAMPLED, **OWN,
    "model": "large",
    "system": [{"type": "text", "text": "Be kind.", "cache_control": CACHE}],
    "messages": [
        {"role": "user", "content": "Hej"},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "abc"},
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "Let me see.", "citations": None},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Malmö"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1",
             "content": [{"type": "text", "text": "9"}], "is_error": True, "cache_control": CACHE},
            {"type": "text", "text": "Well?"},
        ]},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "It is"},
    ],
    "tools": [{"type": "custom", "name": "weather", "description": "Tells the weather.",
               "input_schema": SCHEMA, "cache_control": CACHE}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2000, "display": "summarized"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "somebody"}, "service_tier": "auto", "max_tokens": 30,
    "stop_sequences": ["END"], "stream": True,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    **SAMPLED, **OWN,
    "model": "large", "instructions": "Be kind.",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Hej"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "H"}],
         "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather",
         "arguments": '{"city": "Malmö"}', "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "9"},
    ],
    "max_output_tokens": 30, "metadata": {"a": "b"}, "stream": True,
    "stream_options": {"include_obfuscation": False},
    "tools": [{"type": "function", **TOOL, "strict": True}],
    "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": True,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "reasoning": {"effort": "medium", "summary": "auto"}, "top_logprobs": 2,
    "include": ["reasoning.encrypted_content"], "store": False, "truncation": "disabled",
    "prompt_cache_key": "x",
}  # fmt: skip

DECLARED: dict[str, Any] = {  # tools of many kinds; some share names with planted calls
    "model": "large", "stream": True,
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [
            {"type": "namespace", "name": "functions", "description": "d", "tools": [
                {"type": "custom", "name": "weather", "description": "d",
                 "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}]}]},
        {"role": "user", "content": "Hej"},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c", "tools": [
            {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "now"}]}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "weather", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        {"type": "local_shell_call", "call_id": "e", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None}},
        {"type": "local_shell_call_output", "id": "e", "output": "z"},
    ],
    "tools": [
        {"type": "tool_search", "execution": "client", "parameters": SCHEMA}, {"type": "shell"},
        {"type": "shell", "environment": {"type": "local"}}, {"type": "web_search"},
        {"type": "computer_20251124", "name": "computer", "display_width_px": 9},
        {"name": "b", "input_schema": SCHEMA, "input_examples": [{"a": 1}], "async": False},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "shell"}, {"type": "custom", "name": "weather"}, {"type": "web_search"}]},
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    if isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def changed(body: Any, path: tuple[Any, ...], new: Any, how: str) -> Any:
    """A body in which one place is replaced, gone, doubled, or has one thing more."""
    body = copy.deepcopy(body)
    if not path:
        return new
    here = body
    for key in path[:-1]:
        here = here[key]
    if how == "replaced":
        here[path[-1]] = new
    elif how == "gone":
        del here[path[-1]]
    elif isinstance(here, list):
        here.insert(0, copy.deepcopy(here[path[-1]]) if how == "doubled" else new)
    else:
        here[str(new)] = new
    return body
