"""What clients send beside what the server honours. A client's oddity is a row of these tables.

A field of a table changes nothing (None), or is taken with some values alone, each of which is what
the server does anyway; a kind of UNSUPPORTED is refused with its reason.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.serving.messages import MOST
from kvlingo_mlx.serving.wire import shown


class Only:
    """A field that may have these values alone; without any, one that cannot be honoured.

    Null always counts as not given.
    """

    def __init__(self, why: str, *values: Any) -> None:
        self.why, self.values = why, values

    def refusal(self, value: Any) -> str | None:
        """Why a value is refused; None if it is taken."""
        if any(type(value) is type(taken) and value == taken for taken in self.values):
            return None
        if not self.values:
            return f"is not supported; {self.why}"
        expected = " or ".join(map(json.dumps, self.values))
        return f"is {shown(value)}, expected {expected}; {self.why}"


Rules = Mapping[str, Only | None]
# Fields that other servers call otherwise (llama.cpp, Mistral).
ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "n_predict": "max_tokens",
    "random_seed": "seed",
}
# Values by which clients of other servers mean no limit, all, off, any, or what is usual.
_NO_LIMIT = {-1: MOST, -2: MOST}
_USUAL = dict.fromkeys(("", "auto", "default"))
MEANINGS: Mapping[str, Mapping[Any, int | None]] = {
    **dict.fromkeys(("effort", "reasoning_effort"), _USUAL),
    "tool_choice": {"": None},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _NO_LIMIT),
    "repetition_context_size": _NO_LIMIT,
    "top_k": {-1: 0},
    "seed": {-1: None, 2**32 - 1: None},
}


def meaning(name: str, value: Any) -> Any:
    """A field's value, as a client of another server means it; None is as if it were not given."""
    if type(value) is float and value.is_integer():  # some languages write all numbers so
        value = int(value)
    return MEANINGS.get(name, {}).get(value, value) if type(value) in (int, str) else value


def ignored(names: str) -> Rules:
    """Fields that change nothing in an answer."""
    return dict.fromkeys(names.split())


_END = "an answer ends where its model ends it, at stop, or at max_tokens"
_HOSTED = "the server runs no tools itself; declare a function, run it, and send its result"
_KEPT = "the server keeps no requests; send the whole conversation each time"
_OFF = "tokens are not chosen in this way here"
_OLD_TOOLS = "use tools and tool_choice"
_ONE = "a request gets one answer; send it again for another"
_READ_TEXT = "the models here read text alone; leave this part out, or describe it in words"
_WRITE_TEXT = "the models here write text alone"

CACHED = ignored("cache_control")  # the server keeps every conversation's cache by itself
TOOL = {"async": Only("a call is answered by the client", False)}  # others change nothing
STREAM = ignored("include_obfuscation continuous_usage_stats")
THINKING_SETTING = ignored("budget_tokens")  # how long it thinks, a model decides
OUTPUT_SETTING = {"task_budget": Only("give max_tokens")}
TEXT_SETTING = ignored("verbosity")
REASONING_SETTING = {
    **ignored("summary generate_summary exclude max_tokens"),
    "context": Only("the chat template says which reasoning is shown", "auto"),
    "mode": Only("models have one mode here", "standard"),
}

_OPENAI = {
    **ignored("user safety_identifier prompt_cache_key prompt_cache_retention"),
    **ignored("prompt_cache_options service_tier store verbosity"),
    "moderation": Only("the server has no such model"),
    "n": Only(_ONE, 1),
}
_MLX_LM = {
    **ignored("num_draft_tokens"),
    "draft_model": Only("the server drafts with no other model", "default_model"),
    "adapters": Only("fuse the adapter into a model, and serve that one"),
    "role_mapping": Only("messages are written by the model's own chat template"),
}
_LOCAL = {  # of llama.cpp, LM Studio, Ollama and vLLM
    **ignored("cache_prompt id_slot slot_id n_keep keep_alive ttl priority request_id cache_salt"),
    **ignored("timings_per_token return_progress num_ctx mirostat_eta mirostat_tau dry_base"),
    **ignored("dry_allowed_length dry_sequence_breakers dynatemp_exponent thinking_budget"),
    **dict.fromkeys(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs grammar".split(),
        Only("give response_format with a JSON schema"),
    ),
    **dict.fromkeys(("tfs_z", "typical_p", "length_penalty"), Only(_OFF, 1)),
    **dict.fromkeys(("mirostat", "top_a", "dynatemp_range", "dry_multiplier"), Only(_OFF, 0)),
    "use_beam_search": Only(_OFF, False),
    "min_tokens": Only(_END, 0),
    "ignore_eos": Only(_END, False),
    "stop_token_ids": Only(_END, []),
    "include_stop_str_in_output": Only("a stop text is left out", False),
    "skip_special_tokens": Only("special tokens are no text", True),
    "n_probs": Only("give top_logprobs", 0),
    "reasoning_format": Only("reasoning is told apart", "auto", "deepseek"),
}
CHAT = {
    **_OPENAI,
    **_MLX_LM,
    **_LOCAL,
    **CACHED,
    **ignored("metadata prediction"),
    # of OpenRouter, LiteLLM, Open WebUI and Mistral
    **ignored("include_reasoning usage transforms provider route models trace timeout"),
    **ignored("litellm_metadata session_id chat_id"),
    "plugins": Only(_HOSTED, []),
    "enable_search": Only(_HOSTED, False),
    "safe_prompt": Only("a system message says so", False),
    "functions": Only(_OLD_TOOLS, []),
    "function_call": Only(_OLD_TOOLS, "none", "auto"),
    "audio": Only(_WRITE_TEXT),
    "modalities": Only(_WRITE_TEXT, ["text"]),
    "web_search_options": Only(_HOSTED),
}
COMPLETIONS = {
    **_OPENAI,
    **_MLX_LM,
    **_LOCAL,
    "best_of": Only(_ONE, 1),
    "suffix": Only("the models here write what follows; put it into the prompt", ""),
    "chat_template_kwargs": Only("a plain completion has no template", {}),
}
RESPONSES = {
    **_OPENAI,
    **ignored("client_metadata max_tool_calls context_management"),
    "previous_response_id": Only(_KEPT),
    "conversation": Only(_KEPT),
    "prompt": Only("the server keeps no prompts; send instructions and input"),
    "background": Only("an answer is sent as it is made", False),
    "background_options": Only("an answer is sent as it is made"),
    "truncation": Only("a conversation that is too long is refused", "disabled", "auto"),
    "access_programs": Only("the server has no such programs"),
    "image": Only(_WRITE_TEXT),
}
MESSAGES = {
    **CACHED,
    **ignored("user metadata user_profile_id workspace_id diagnostics betas service_tier speed"),
    **ignored("context_management anthropic_beta anthropic_version litellm_metadata"),
    "inference_geo": Only("the server answers where it runs"),
    "container": Only("the server runs no code; declare a function"),
    "mcp_servers": Only("the server calls no other one; declare its functions as tools", []),
    "fallbacks": Only("ask another model yourself", []),
    "fallback_credit_token": Only("the server charges nothing"),
    "billing_policy": Only("the server charges nothing"),
    "compaction": Only("leave out of the messages what shall be forgotten"),
    "thread": Only(_KEPT),
}
COUNT = {**MESSAGES, **ignored("max_tokens stop_sequences")}

_KINDS = {
    _READ_TEXT: """
        image image_url input_image input_audio audio file input_file document video search_result
        container_upload tool_reference video_url""",
    _HOSTED: "mcp_list_tools mcp_approval_request mcp_approval_response",
    _KEPT: "item_reference compaction compaction_trigger",
}
UNSUPPORTED = {
    **{name: why for why, names in _KINDS.items() for name in names.split()},
    "grammar": "give a JSON schema instead",
}
