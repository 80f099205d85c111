"""What reaches a client of a planted answer: the bytes of its tokens, and a plain text as it is."""

from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import pytest

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.serving.scheduler import Scheduler
from kvlingo_mlx.serving.settings import Settings
from kvlingo_mlx.serving.wire import chat
from tests.support import TESTS
from tests.support.engines import Clients
from tests.support.tool_callers import write_caller

TEXTS = {
    "bytes": "Hi \U0001f600 ok,  é\n\t名 is ▁ and \u0120!",
    "pieces": "Hi \U0001f600 ok,  é\n\t名 and \u0120!",  # to these ▁ is a space
}


@pytest.fixture(scope="module")
def clients(root: Path) -> Clients:
    models = {
        "bytes": str(zoo("tiny-qwen3-s")),  # byte-level tokens
        "pieces": str(TESTS / "zoo/models/tiny-mistral"),  # pieces, and bytes for what is rare
        "caller": str(write_caller(root / "caller")),
    }
    return Clients(Scheduler(Settings(models=models, conversations=str(root / "kept"))))


def answered(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, api: Any, text: str, body: dict[str, Any]
) -> tuple[Any, Path]:
    """The body of a planted answer, and the ids of its tokens."""
    tokenizer = clients.engine.pool[body["model"]].model.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    left = iter([*ids, *[tokenizer.eos_token_id] * 9])
    monkeypatch.setattr(
        "kvlingo_mlx.serving.scheduler.sampler_of", lambda _: lambda _: mx.array([next(left)])
    )
    read = api.read({"max_tokens": 200, **body})
    for event in clients.together([read.ask])[0].events:
        read.take(event)
    return read.body(), ids


@pytest.mark.parametrize("model", ["bytes", "pieces"])
def test_logprobs_have_the_bytes_of_their_tokens(
    model: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they are the text, though no token may be a character; the end is not among them."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    text = TEXTS[model]
    body, ids = answered(clients, monkeypatch, chat.API, text, {"model": model, **asked})
    listed = body["choices"][0]["logprobs"]["content"]
    assert [each["id"] for each in listed] == ids
    spelt = [bytes(each["bytes"]) for each in listed]
    assert b"".join(spelt).decode().strip(" ") == text
    assert sum(b"\x80" <= each < b"\xf8" and len(each) == 1 for each in spelt) > 2
    for each in [*listed, *(top for told in listed for top in told["top_logprobs"])]:
        assert bytes(each["bytes"]).decode(errors="replace") == each["token"] != ""


@pytest.mark.parametrize("model", ["bytes", "pieces"])
def test_lists_of_completions_can_be_put_together(
    model: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, text = {"model": model, "prompt": "so it is", "logprobs": 2}, TEXTS[model]
    body, _ = answered(clients, monkeypatch, chat.COMPLETIONS, text, asked)
    choice = body["choices"][0]
    lists, spelt = choice["logprobs"], b""
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert offset == len(spelt.decode(errors="ignore"))
        parts = token.removeprefix("bytes:").split("\\x")[1:]
        spelt += bytes(int(part, 16) for part in parts) if "bytes:" in token else token.encode()
    assert spelt.decode().strip(" ") == text == choice["text"].strip(" ")
    assert any("bytes:" in token for token in lists["tokens"])


@pytest.mark.parametrize("prompt", ["so", "as <think> has it, "])
def test_a_completion_is_the_text_as_it_was_written(
    prompt: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks of reasoning and calls are text, in which stop texts count; no call is lost."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"a <think>b; {call}</think> c; d"
    asked = {"model": "caller", "prompt": prompt}
    for stop, expected in ((None, text), (";", "a <think>b"), ("</think>", f"a <think>b; {call}")):
        body, _ = answered(
            clients, monkeypatch, chat.COMPLETIONS, text, asked | ({"stop": stop} if stop else {})
        )
        assert body["choices"][0]["text"].lstrip(" ") == expected


@pytest.mark.parametrize(
    "begun, parts", [("<think>so", ("it", "is")), ("<think>a</think>so", (None, "it</think>is"))]
)
def test_an_answer_that_was_begun_is_divided_by_its_own_marks(
    begun: str, parts: tuple[str | None, str], clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": begun}]
    asked = {"model": "caller", "messages": told, "continue_final_message": True}
    body, _ = answered(clients, monkeypatch, chat.API, "it</think>is", asked)
    message = body["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == parts
