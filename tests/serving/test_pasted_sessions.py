"""What a history holds is told, whoever wrote it: nothing of a part is lost.

The reference is the prompt of the same session in the form of OpenAI's chat, written by hand.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engines import SEEN, Seen
from tests.support.real_templates import FAMILIES, NAMES, reference, write_real
from tests.support.serving import running

Item = dict[str, Any]
MODELS = ("qwen3.5", "gemma4")  # neither shows ids


Prompt = Callable[..., str]


@pytest.fixture(scope="module")
def prompt(root: Path) -> Iterator[Prompt]:
    """The text that a model is given for a body's messages."""
    own = [family for family in FAMILIES if family.name in MODELS]
    folders = {family.name: write_real(root / family.name, family) for family in own}
    tokenizers = {name: reference(folder) for name, folder in folders.items()}
    models = {name: str(folder) for name, folder in folders.items()}
    with running(root, SEEN, models=models, keep_conversations=False) as server:

        def prompt(messages: list[Any], model: str = MODELS[0], api: str = "chat") -> str:
            path = {"chat": "chat/completions"}.get(api, api)
            field = "input" if api == "responses" else "messages"
            most = "max_output_tokens" if api == "responses" else "max_tokens"
            body = {"model": model, field: messages, most: 1}
            answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            while Seen.now.busy:
                pass
            session = max(Seen.now.store.sessions, key=lambda session: session.used)
            return tokenizers[model].decode(session.line(model).tokens[:-1])

        yield prompt


# ---- one session in two forms -------------------------------------------------------------------

ASKED, SAID, PLACE, FOUND, ANSWER, AGAIN = (f"fact{n:04}x" for n in range(6))
CALL_ID = "call_abcdef012345678"
FUNCTION = {"name": "look", "arguments": json.dumps({"place": PLACE})}
OPENAI: list[Item] = [
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": SAID, "tool_calls": [
        {"id": CALL_ID, "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": CALL_ID, "content": FOUND},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": AGAIN},
]  # fmt: skip
CALL: Item = {"type": "tool-call", "toolCallId": CALL_ID, "toolName": "look",
              "input": {"place": PLACE}}  # fmt: skip
RESULT: Item = {"type": "tool-result", "toolCallId": CALL_ID, "toolName": "look"}
USED: Item = {"type": "tool_use", "id": CALL_ID, "name": "look", "input": {"place": PLACE}}


@pytest.mark.parametrize("answer", [
    [{**OPENAI[1], "function_call": FUNCTION}, OPENAI[2]],  # told twice by old clients
    [{**OPENAI[1], "content": [{"type": "text", "text": SAID}, USED, {
        "type": "tool_result", "tool_use_id": CALL_ID, "content": FOUND}]}],
    [{"role": "assistant", "content": [{"type": "text", "text": SAID}, CALL]},
     {"role": "tool", "content": [{**RESULT, "output": {"type": "text", "value": FOUND}}]}],
])  # fmt: skip
def test_a_session_is_read_as_openais(prompt: Prompt, answer: list[Item]) -> None:
    for model in MODELS:
        assert prompt([OPENAI[0], *answer, *OPENAI[3:]], model) == prompt(OPENAI, model)


def test_calls_of_one_id_are_two_calls(prompt: Prompt) -> None:
    """Some servers number the calls of each answer from 0, or give all of them one id."""
    other = {"name": "look", "arguments": json.dumps({"place": AGAIN})}
    calls = [{"id": CALL_ID, "type": "function", "function": each} for each in (FUNCTION, other)]
    result = {**OPENAI[2], "content": ASKED}
    told = [*OPENAI[:1], {**OPENAI[1], "tool_calls": calls}, OPENAI[2], result, OPENAI[3]]
    for model in MODELS:
        text = prompt([*told, {"role": "user", "content": "?"}], model)
        assert [text.count(fact) for fact in (PLACE, AGAIN, FOUND, ASKED)] == [1, 1, 1, 2]


# ---- parts of any kind --------------------------------------------------------------------------

FACT, SECRET = re.compile(r"fact\d{4}x"), re.compile(r"secret\w*|QUJD")
KINDS = (
    "issue bash_code_execution_result search_result resource document file image input_audio"
    " video json web_fetch_result of-tomorrow imageNote custom.thing container_upload"
).split()
TEXTS = (
    "text content output value stdout stderr title source context error caption body author"
    " url filename uri name summary message data result page_age revised_prompt"
).split()
# What nobody can read, each with its field.
HIDDEN: list[tuple[str, Any]] = [
    ("signature", "secret"),
    ("thoughtSignature", "secret"),
    ("encrypted_content", "secret+secret/="),
    ("cache_control", {"type": "secret"}),
    ("call_id", "call_secret68af5d2c81f0a3e4"),
    ("toolUseId", "secret"),
    ("id", "msg_secret68af5d2c81f0a3e4"),
    ("file_id", "file-secret0123456789abc"),
    ("body", "QUJD" * 1000),
    ("blob", "\n".join(["QUJD" * 19] * 60)),
    ("url", "data:image/png;base64,QUJDQUJD"),
]
# What looks like that, and is a tool's fact.
SHOWN = [
    {"signature": "look(place: str)"}, {"id": "cus_NffrFeUfNV2Hib"}, {"encrypted": "no, not yet"},
    {"call_id": "17"}, {"line": "data: a, b"}, {"cache_hits": "9"}, {"data": "some text here"},
]  # fmt: skip


@st.composite
def parts(draw: st.DrawFn, words: Iterator[str], depth: int = 2) -> Item:
    """A part of a kind that is more than a text, with facts and secrets in any of its fields."""

    def value(levels: int) -> Any:
        kind = draw(st.sampled_from(["text", "text", "dict", "list", "part"][: 2 + 3 * levels]))
        if kind == "dict":
            names = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2, unique=True))
            return {name: value(0) for name in names}
        if kind == "list":
            return [value(0) for _ in range(draw(st.integers(1, 2)))]
        return draw(parts(words, 0)) if kind == "part" else f"it is {next(words)} here"

    names = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4, unique=True))
    made = {name: value(min(depth, 1)) for name in names}
    for name, hidden in draw(st.lists(st.sampled_from(HIDDEN), max_size=2)):
        made.setdefault(name, hidden)
    return {"type": draw(st.sampled_from(KINDS)), **made}


def past(role: str, found: list[Item]) -> list[Item]:
    """A history with these parts in a message of that role."""
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    if role == "user":
        return [{"role": "user", "content": found}]
    if role == "assistant":
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": found}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": found}
    made = {"role": "tool", "tool_call_id": "c", "content": found}
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [call]}]
    return [*asked, made if role == "tool" else {"role": "user", "content": [result]}]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), api=st.sampled_from(["chat", "messages", "responses"]))
def test_no_text_of_a_part_is_lost(prompt: Prompt, data: st.DataObject, api: str) -> None:
    words = (f"fact{number:04}x" for number in itertools.count())
    history: list[Item] = []
    for role in ("user", "assistant", "tool", "result"):
        found = data.draw(st.lists(parts(words), min_size=1, max_size=2))
        history += past(role, found)
    given = prompt([*history, {"role": "user", "content": "So?"}], api=api)
    planted = FACT.findall(json.dumps(history))
    lost = [fact for fact in planted if given.count(fact) != 1]
    assert not lost, f"{lost} of {json.dumps(history)[:3000]}\nin {given[:3000]}"
    assert not SECRET.search(given), f"{json.dumps(history)[:3000]}\nin {given[:3000]}"


@pytest.mark.parametrize("row", SHOWN, ids=str)
def test_what_tools_tell_is_shown(prompt: Prompt, row: Item) -> None:
    for content in (
        row,
        [row],
        [{"type": "row", **row}],
        [{"type": "row", "mime": "a/b", "in": row}],
    ):
        history = [{"role": "user", "content": "?"}, {"role": "tool", "content": content}]
        assert json.dumps(row)[1:-1] in prompt([*history, {"role": "user", "content": "So?"}])


def test_a_text_is_all_that_a_text_part_says(prompt: Prompt) -> None:
    """What a client adds to it is about it: a model's own words come back as they were."""
    said = {"type": "output_text", "text": SAID, "annotations": [{"title": "secret"}],
            "logprobs": [{"token": "secret"}]}  # fmt: skip
    for content in (SAID, [said], {"type": "text", "text": SAID, "citations": ["secret"]}):
        history = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": content}]
        given = prompt([*history, {"role": "user", "content": AGAIN}])
        assert SAID in given and "secret" not in given


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": None,
          "error": "the fact"}, "Error: the fact"),
        ({"role": "tool", "content": "", "structuredContent": {"a": "the fact"}},
         '{"structuredContent": {"a": "the fact"}}'),
        ({"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [
            {"name": "the fact"}]}, '{"tools": [{"name": "the fact"}]}'),
        ({"role": "tool", "content": [{"type": "issue", "id": 17, "text": "the", "by": "fact"}]},
         "the\nid: 17\nby: fact"),
        ({"role": "tool", "content": [{"type": "json", "json": {"a": "事" * 3000}}]}, "事" * 3000),
        ({"role": "tool", "content": [{"type": "ls", "out": "Makefile\n" * 500}]},
         json.dumps("Makefile\n" * 500)),
        ({"role": "user", "content": [], "parts": [{"type": "text", "text": "the fact"}]},
         "the fact"),
        ({"role": "user", "content": "", "text": "the fact"}, "the fact"),
        ({"role": "user", "content": [{"type": "document", "title": "a.txt", "source": {
            "type": "text", "media_type": "text/plain", "data": "the fact"}}]},
         "the fact\ntitle: a.txt"),
        ({"role": "user", "content": [{"type": "file", "file": {
            "filename": "a.txt", "file_data": "data:text/plain;base64,dGhlIGZhY3Q="}}]},
         "[a file, which this model cannot read: a.txt]"),
        ({"role": "tool", "content": [{"type": "resource", "resource": {
            "uri": "a.txt", "mimeType": "text/plain", "text": "the fact " * 500}}]},
         "the fact " * 500 + "\nuri: a.txt\nmimeType: text/plain"),
        ({"role": "tool", "content": [{"type": "resource", "resource": {
            "uri": "a.pdf", "mimeType": "application/pdf", "blob": "QUJD"}}]},
         '{"type": "resource", "resource": {"uri": "a.pdf", "mimeType": "application/pdf"}}'),
        ({"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "the fact",
          "error": False}, "\nthe fact\n"),
    ],
)  # fmt: skip
def test_how_it_is_told(prompt: Prompt, item: Item, said: str) -> None:
    question = {"role": "user", "content": "?"}
    assert said in prompt([question, item, question])


assert set(MODELS) <= set(NAMES)
