"""What clients send beside what the server honours. A client's oddity is a row of these tables.

A field of a table changes nothing (None), or is taken with some values alone, each of which is what
the server does anyway; a kind of UNSUPPORTED is refused with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlingo_mlx.serving.wire import shown


class Only(NamedTuple):
    """A field that is refused but for these values; null always counts as not given."""

    why: str
    values: tuple[Any, ...]

    def refusal(self, value: Any) -> str | None:
        """Why a value is refused; None if it is taken."""
        if any(type(value) is type(taken) and value == taken for taken in self.values):
            return None
        if not self.values:
            return f"is not supported; {self.why}"
        expected = " or ".join(map(json.dumps, self.values))
        return f"is {shown(value)}, expected {expected}; {self.why}"


Rules = Mapping[str, Only | None]


def only(why: str, *values: Any) -> Only:
    """A field that may have these values alone; without any, one that cannot be honoured."""
    return Only(why, values)


def ignored(names: str) -> Rules:
    """Fields that change nothing in an answer."""
    return dict.fromkeys(names.split())


# ---- reasons ------------------------------------------------------------------------------------

_ALIKE = "all requests are served alike"
_HOSTED = "the server runs no tools itself; declare a function, run it, and send its result"
_KEPT = "the server keeps no requests; send the whole conversation each time"
_OLD_TOOLS = "use tools and tool_choice"
_ONE = "a request gets one answer; send it again for another"
_READ_TEXT = "the models here read text alone; leave this part out, or describe it in words"
_WRITE_TEXT = "the models here write text alone"

# ---- tools and settings within requests ------------------------------------------------------

CACHED = ignored("cache_control")  # the server keeps every conversation's cache by itself
TOOL = {  # other fields of a tool change nothing
    "defer_loading": only("all tools are shown to the model", False),
    "async": only("a call is answered by the client", False),
    "allowed_callers": only("only the model calls tools", ["direct"], []),
    "input_examples": only("put the examples into the description", []),
}
STREAM = ignored("include_obfuscation")
EDIT = ignored("keep")  # of thinking, as the chat template says
THINKING_SETTING = ignored("budget_tokens")  # how long it thinks, a model decides
OUTPUT_SETTING = {"task_budget": only("give max_tokens")}
TEXT_SETTING = {"verbosity": only("say in a message how long the answer should be", "medium")}
REASONING_SETTING = {
    **ignored("summary generate_summary"),
    "context": only("the chat template says which reasoning is shown", "auto"),
    "mode": only("models have one mode here", "standard"),
}

# ---- requests -----------------------------------------------------------------------------------

_OPENAI = {
    **ignored("user safety_identifier prompt_cache_key prompt_cache_retention"),
    **ignored("prompt_cache_options"),
    "service_tier": only(_ALIKE, "auto", "default"),
    "store": only("the server keeps no requests; leave it out", False),
    "moderation": only("the server has no such model"),
    "n": only(_ONE, 1),
}
_MLX_LM = {
    **ignored("num_draft_tokens"),
    "draft_model": only("the server drafts with no other model", "default_model"),
    "adapters": only("fuse the adapter into a model, and serve that one"),
    "role_mapping": only("messages are written by the model's own chat template"),
}
CHAT = {
    **_OPENAI,
    **_MLX_LM,
    **TEXT_SETTING,
    **ignored("metadata"),
    "functions": only(_OLD_TOOLS),
    "function_call": only(_OLD_TOOLS),
    "audio": only(_WRITE_TEXT),
    "modalities": only(_WRITE_TEXT, ["text"]),
    "prediction": only("the server drafts from no text; leave it out"),
    "web_search_options": only(_HOSTED),
}
COMPLETIONS = {
    **_OPENAI,
    **_MLX_LM,
    "best_of": only(_ONE, 1),
    "suffix": only("the models here write what follows; put it into the prompt"),
    "chat_template_kwargs": only("a plain completion has no template", {}),
}
RESPONSES = {
    **_OPENAI,
    **ignored("client_metadata max_tool_calls"),
    "previous_response_id": only(_KEPT),
    "conversation": only(_KEPT),
    "prompt": only("the server keeps no prompts; send instructions and input"),
    "background": only("an answer is sent as it is made", False),
    "background_options": only("an answer is sent as it is made"),
    "context_management": only("leave out of the input what shall be forgotten", []),
    "truncation": only("a conversation that is too long is refused", "disabled"),
    "access_programs": only("the server has no such programs"),
    "image": only(_WRITE_TEXT),
}
MESSAGES = {
    **CACHED,
    **ignored("metadata user_profile_id workspace_id diagnostics betas"),
    "service_tier": only(_ALIKE, "auto", "standard_only"),
    "speed": only(_ALIKE, "standard"),
    "inference_geo": only("the server answers where it runs"),
    "container": only("the server runs no code; declare a function"),
    "mcp_servers": only("the server calls no other one; declare its functions as tools", []),
    "fallbacks": only("ask another model yourself", []),
    "fallback_credit_token": only("the server charges nothing"),
    "billing_policy": only("the server charges nothing"),
    "compaction": only("leave out of the messages what shall be forgotten"),
    "thread": only(_KEPT),
}

# ---- kinds of content, messages, items and tools, without the dates that end some names ----------

_KINDS = {
    _READ_TEXT: """
        image image_url input_image input_audio audio file input_file document video search_result
        container_upload tool_reference video_url""",
    _HOSTED: """
        web_search_preview web_search_call web_fetch file_search file_search_call computer
        computer_use computer_use_preview computer_call computer_call_output mcp mcp_call
        mcp_list_tools mcp_approval_request mcp_approval_response mcp_toolset code_interpreter
        code_interpreter_call code_execution image_generation_call local_shell local_shell_call
        local_shell_call_output shell shell_call shell_call_output apply_patch apply_patch_call
        apply_patch_call_output bash text_editor memory tool_search tool_search_tool_regex
        tool_search_tool_bm25 server_tool_use web_search_tool_result web_fetch_tool_result
        code_execution_tool_result advisor""",
    _KEPT: "item_reference compaction compaction_trigger",
    'tools take JSON; declare it with type "function"': (
        "custom custom_tool_call custom_tool_call_output"
    ),
}
UNSUPPORTED = {
    **{name: why for why, names in _KINDS.items() for name in names.split()},
    "namespace": "declare each of its functions in tools",
    # Codex offers these two by default; a user of it can turn them off.
    "web_search": f'{_HOSTED}; in Codex, set web_search = "disabled"',
    "image_generation": f"{_HOSTED}; in Codex, set features.image_generation = false",
    "allowed_tools": "send only the tools that are allowed",
    "grammar": "give a JSON schema instead",
}
OLD_ROLES = {
    "function": 'such messages are of an older API; use tool_calls, role "tool" and tool_call_id',
}
