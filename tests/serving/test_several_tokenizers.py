"""A conversation between models of two tokenizers through HTTP, beside the library's own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.engine.spans import translated
from tests.support import TESTS
from tests.support.served import PLAIN, Server, served
from tests.support.talks import expected

ZOO = TESTS / "zoo"
TRANSLATORS = [
    str(ZOO / "translators" / name)
    for name in ("tiny-qwen3-s--tiny-mistral", "tiny-mistral--tiny-qwen3-s")
]
LACKS = "there is no translator for this pair"
TEXT = "The home of Anna is Rome. " * 6 + "The home of Oscar is Oslo. The home of Anna"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one tokenizer, and one whose tokenizer puts <s> in front of a text."""
    mistral = tmp_path_factory.mktemp("models") / "mistral"
    shutil.copytree(ZOO / "models" / "tiny-mistral", mistral)
    path = mistral / "tokenizer.json"
    facts = json.loads(path.read_text())
    facts["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    bos = facts["model"]["vocab"]["<s>"]
    facts["post_processor"]["special_tokens"] = {
        "<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}
    }
    path.write_text(json.dumps(facts))
    return {"small": zoo("tiny-qwen3-s"), "mistral": mistral, "moe": zoo("tiny-qwen3-moe")}


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    named = [part for path in TRANSLATORS for part in ("--translator", path)]
    with served(tmp_path_factory.mktemp("home"), models, *named) as found:
        for name in models:  # so that all lines follow every answer, as in the library
            assert httpx.post(f"{found.url}/v1/models/{name}/load").is_success
        yield found


def ask(server: Server, model: str, messages: list[Any], **extra: Any) -> tuple[str, Any]:
    """A model's answer, and its usage with what ``usage.kvlingo`` adds."""
    answer = server.openai.chat.completions.create(
        model=model, messages=messages, max_tokens=12, extra_body={**PLAIN, **extra}
    )
    usage = answer.usage.model_dump()
    usage |= usage["kvlingo"] | usage["prompt_tokens_details"]
    return answer.choices[0].message.content, usage


def test_a_conversation_is_the_librarys_own(server: Server, models: dict[str, Path]) -> None:
    talk = kv.Conversation(models, TRANSLATORS, enable_thinking=False, on_missing="reprefill")
    history: list[Any] = []
    held = dict.fromkeys(models, 0)  # translated tokens of each line after its last answer
    for name, strategy, fallback in (
        ("small", "read", None),
        ("mistral", "translate", None),
        ("moe", "translate", LACKS),  # what small wrote, but not what mistral wrote
        ("small", "translate", None),
        ("mistral", "translate", LACKS),
        ("mistral", "kept", None),
        ("moe", "translate", LACKS),
    ):
        question = f"Anna lives in Rome. Oscar lives in Oslo. Where does {name} live?"
        history.append({"role": "user", "content": question})
        text, usage = ask(server, name, history)
        assert text.strip() == talk.reply(name, question, max_tokens=12).strip()
        history.append({"role": "assistant", "content": text})
        switch, line = talk.last_switch, talk.lines[name]
        assert switch is not None
        assert usage["prompt_tokens"] == switch.kept + switch.translated + switch.read + 1
        assert usage["cached_tokens"] == switch.kept
        assert usage["read_tokens"] == switch.read + 1
        assert usage["translated_tokens"] == translated(line.spans) - held[name]
        held[name] = translated(line.spans)
        assert (usage["strategy"], usage["fallback"]) == (strategy, fallback)
    assert server.status()["healed"] == 0  # nobody told it to read behind translations


def test_reading_again_has_its_reason(server: Server) -> None:
    """The third model's line does not follow while its weights are not in memory."""
    question = {"role": "user", "content": "Maria lives in Vienna. Where does Maria live?"}
    for first, second, extra, why in (
        ("mistral", "moe", {}, LACKS),
        ("small", "mistral", {"kvlingo": {"strategy": "reread"}}, "the request asked for it"),
    ):
        for name in ("small", "mistral", "moe"):
            httpx.post(f"{server.url}/v1/models/{name}/unload")
        asked = [{**question, "content": f"{question['content']} {why}"}]
        text, _ = ask(server, first, asked)
        history = [*asked, {"role": "assistant", "content": text}, question]
        body = {"model": second, "messages": history, "max_tokens": 4, **PLAIN, **extra}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert response.headers["x-kvlingo-strategy"] == "reread"
        assert response.headers["x-kvlingo-fallback"] == why
        usage = response.json()["usage"]
        assert usage["kvlingo"]["read_tokens"] == usage["prompt_tokens"]
        assert not usage["kvlingo"]["translated_tokens"]


def test_tools_stay_while_a_model_answers_that_cannot_be_told_of_them(server: Server) -> None:
    """Its answer brings the other's line up to date, behind the tools as they were read."""
    function = {"name": "look", "description": "Looks. " * 20, "parameters": {"type": "object"}}
    tools = {"tools": [{"type": "function", "function": function}]}
    for name in ("small", "mistral", "moe"):
        httpx.post(f"{server.url}/v1/models/{name}/load")
    history, usages = list[Any](), list[Any]()
    for name in ("small", "mistral", "small"):
        history.append({"role": "user", "content": f"Rosa lives in Bern. And {name}?"})
        text, usage = ask(server, name, history, **tools)
        history.append({"role": "assistant", "content": text})
        usages.append(usage)
    assert usages[1]["prompt_tokens"] < usages[0]["prompt_tokens"]  # told of no tools
    assert usages[2]["cached_tokens"] >= 0.9 * usages[0]["prompt_tokens"]


def completed(server: Server, model: str, prompt: Any, **more: Any) -> tuple[str, Any]:
    answer = server.openai.completions.create(model=model, prompt=prompt, max_tokens=8, **more)
    usage = answer.usage.model_dump()
    return answer.choices[0].text, usage | usage["kvlingo"] | usage["prompt_tokens_details"]


@pytest.mark.parametrize("name", ["small", "mistral"])
def test_a_plain_text_is_gone_on_with(server: Server, models: dict[str, Path], name: str) -> None:
    """With one <s> in front where the tokenizer has one, and the spaces that belong to it."""
    model = kv.load(models[name])
    tokenizer, decode = model.tokenizer, model.tokenizer.decode
    tokens = tokenizer.encode(TEXT)
    assert (tokens[0] == tokenizer.bos_token_id) is (name == "mistral")
    right = decode([*tokens, *expected(model, tokens, 8)])[len(decode(tokens)) :]
    text, usage = completed(server, name, TEXT)
    assert text == right and text.startswith(" ")
    assert usage["prompt_tokens"] == len(tokens) and usage["strategy"] == "read"
    assert completed(server, name, TEXT, echo=True)[0] == TEXT + right
    text, usage = completed(server, name, tokens)
    assert text == right and usage["cached_tokens"] == len(tokens) - 1
    if name == "mistral":
        text, usage = completed(server, name, "<s>" + TEXT)
        assert usage["prompt_tokens"] == len(tokens) and text == right
    else:
        _, usage = completed(server, "moe", TEXT)
        assert usage["translated_tokens"] == len(tokens) - 1 and usage["strategy"] == "translate"
