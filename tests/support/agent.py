"""An agent's session with a server: a long prompt, many tools, a header that changes, edits.

It has the shape of a coding agent's requests to `/v1/messages`: a system prompt and tools that take
most of the context; a billing header and the model's own name in the system prompt, new with every
request; calls of tools and their results; another model now and then; and once, the result of an
old call is cleared, as agents do to save room. The models are random, so their calls are demanded.
One row a request says where its prompt came from.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic

from tests.support import tiny
from tests.support.tool_callers import write_caller

NAMES = ("read_file", "write_file", "search", "run_tests", "list_files", "fetch")
ORDER = "aaabbbaabbbaab"  # which model answers which request
HEADER = "x-anthropic-billing-header"  # of a line that the server's settings know to change
CLEARED = 8  # the request before which the first tool's result is cleared
Row = dict[str, Any]


def prose(rng: random.Random, tokens: int) -> str:
    """A text of about so many tokens; the tiny models' tokens are little more than letters."""
    words = "the of and use other money house passenger long river is not file test".split()
    text = ""
    while len(text) < 0.8 * tokens:
        text += rng.choice(words) + rng.choice("  \n")
    return text


def tools(rng: random.Random, tokens: int) -> list[dict[str, Any]]:
    """Tools whose descriptions take about so many tokens together."""
    text = {"type": "object", "properties": {"path": {"enum": ["a.py", "b.py"]}},
            "required": ["path"], "additionalProperties": False}  # fmt: skip
    return [
        {"name": name, "description": prose(rng, tokens // len(NAMES)), "input_schema": text}
        for name in NAMES
    ]


def session(
    client: anthropic.Anthropic,
    tokens: int,
    order: str = ORDER,
    cleared: int = CLEARED,
    header: str = HEADER,
) -> list[Row]:
    """All requests of one session, whose first prompt has about ``tokens``."""
    rng = random.Random(0)
    known, offered = prose(rng, tokens // 2), tools(rng, tokens // 2)
    messages: list[Any] = [{"role": "user", "content": "Mend the test of the river."}]
    rows: list[Row] = []
    for number, model in enumerate(order):
        if number == cleared:
            result = next(m for m in messages if isinstance(m["content"], list) and
                          m["content"][0]["type"] == "tool_result")  # fmt: skip
            result["content"][0]["content"] = "[cleared]"
        changing = f"{header}: cc_version=2.1; cch={rng.randrange(16**5):05x};"
        named = f"You are powered by the model named {model}."
        answer = client.messages.create(
            model=model,
            system=[{"type": "text", "text": part} for part in (changing, f"{named}\n{known}")],
            messages=messages,
            tools=offered,
            tool_choice={"type": "any"} if number % 2 == 0 else {"type": "none"},
            max_tokens=60 if number % 2 == 0 else 12,
        )
        rows.append(row(number, model, answer.usage.model_dump()))
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        messages += [{"role": "assistant", "content": blocks}, following(rng, blocks, tokens)]
    return rows


def following(rng: random.Random, blocks: Sequence[Any], tokens: int) -> dict[str, Any]:
    """What the agent sends after an answer: the results of its calls, or the user's next wish."""
    calls = [block for block in blocks if block["type"] == "tool_use"]
    text = prose(rng, tokens // 40)
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": text} for c in calls]
    return {"role": "user", "content": results or "Go on."}


def row(number: int, model: str, usage: dict[str, Any]) -> Row:
    """Where a prompt's tokens came from."""
    cached, own = usage["cache_read_input_tokens"], usage["kvlingo"]
    prompt = usage["input_tokens"] + cached
    return {
        "request": number, "model": model, "prompt": prompt, "cached": cached,
        "translated": own["translated_tokens"], "read": own["read_tokens"],
        "strategy": own["strategy"], "answer": usage["output_tokens"],
        "not read": round(1 - own["read_tokens"] / prompt, 4), "ttft_s": own["ttft_s"],
    }  # fmt: skip


def write_callers(root: Path, context: int) -> list[str]:
    """Two models and translators both ways; returns the options that name the translators."""
    write_caller(root / "a", context=context)
    write_caller(root / "b", context=context, seed=9, layers=4)
    options = []
    for source, target in ("ab", "ba"):
        folder = root / f"{source}-{target}"
        tiny.write_random_translator(folder, root / source, root / target, nu=2, seed=7)
        options += ["--translator", str(folder)]
    return options
