"""The requests of mlx-lm's own tests of its server, sent to both servers.

The facts come from mlx-lm's tests/test_server.py: which requests it sends over HTTP, and what it
expects of the answers. Everything that its answers hold, ours hold too, and greedy answers are the
same. Some differ on purpose:

=========================== ================================ ===================================
what                        mlx_lm.server                    here
=========================== ================================ ===================================
another model's name        looks for it on the Hub          404 with the names that are offered
an error's body             ``error`` is a text              ``error`` is an object, as OpenAI's
a field of another type     200, 400 or 404                  400 that names the field
a plain text's answer       lacks the space it begins with   begins with it
a token's text in logprobs  as the vocabulary writes it      as the answer shows it
first frame of a stream     a role and the first text        a role alone, then the texts
an embedded model           thinks unless told not to        thinks if it is told to
``draft_model``             drafts with it                   refused, but for ``default_model``
too long a prompt           may be cut                       400
out of memory, other faults 503, 500                         503, 500 (``test_app.py``)
=========================== ================================ ===================================

Its other tests are of its classes, and send no requests.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvlingo_mlx.embedded import zoo
from tests.support.served import THEIRS, ZOO, Server, of_mlx_lm

KIND = {"role": "system", "content": "Answer kindly."}
GREETING = {"role": "user", "content": "Good morning! Anna lives in Rome. Where does Anna live?"}
SAMPLED = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 999}
# What mlx-lm's server renders unless told otherwise; here the embedded models do not think.
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def urls(zoo_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of our server and of theirs, of one model."""
    home = tmp_path_factory.mktemp("theirs")
    with of_mlx_lm(home, THEIRS, zoo(ZOO["large"])) as theirs:
        yield zoo_server.url, theirs.url


def both(urls: tuple[str, str], path: str, **body: Any) -> tuple[Any, Any]:
    """The answers of both servers; ours has all fields that theirs has."""
    more = THINKING if "messages" in body else {}
    body = {"model": "default_model", "max_tokens": 10, **more, **body}
    found = [httpx.post(f"{url}{path}", json=body, timeout=60) for url in urls]
    assert [each.status_code for each in found] == [200, 200], [each.text for each in found]
    ours, other = (each.json() for each in found)
    assert ours["object"] == other["object"] and ours["id"]
    check_fields(ours, other)
    return ours, other


def check_fields(ours: Any, other: Any) -> None:
    """Objects of ours have the names that theirs have, at every depth."""
    if isinstance(other, dict):
        assert other.keys() <= ours.keys()
        for name, value in other.items():
            check_fields(ours[name], value)
    elif isinstance(other, list) and other:
        check_fields(ours[0], other[0])


def chat(urls: tuple[str, str], messages: list[Any], **more: Any) -> Any:
    """Our answer to a chat, which is theirs, token for token."""
    answers = both(urls, "/v1/chat/completions", messages=messages, temperature=0.0, **more)
    ours, other = (answer["choices"][0] for answer in answers)
    assert ours["message"]["content"] == other["message"]["content"]
    assert ours["finish_reason"] == other["finish_reason"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert len({tuple(answer["usage"][name] for name in names) for answer in answers}) == 1
    return answers[0]


def test_completions(urls: tuple[str, str]) -> None:
    prompt = {"prompt": "The home of Anna is Rome. The home of Oscar"}
    ours, other = both(urls, "/v1/completions", **prompt, temperature=0.0, top_p=1.0)
    text, theirs = (answer["choices"][0]["text"] for answer in (ours, other))
    assert text.removeprefix(" ") == theirs and text != theirs
    assert ours["usage"]["completion_tokens"] == other["usage"]["completion_tokens"] > 0
    asked = {**prompt, **SAMPLED, "repetition_context_size": 20, "stop": "stop sequence"}
    first, second = (both(urls, "/v1/completions", **asked) for _ in range(2))
    for one, again in zip(first, second, strict=True):
        assert one["choices"][0]["text"] == again["choices"][0]["text"]


def test_chats(urls: tuple[str, str]) -> None:
    messages = [KIND, GREETING]
    whole = chat(urls, messages)
    assert whole["choices"][0]["message"]["role"] == "assistant"
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    answer = chat(urls, parts)
    assert answer["choices"][0]["message"] == whole["choices"][0]["message"]
    both(urls, "/v1/chat/completions", messages=messages, **SAMPLED | {"temperature": 0.7})
    chat(urls, messages, logprobs=True, top_logprobs=2)


def test_a_stream(urls: tuple[str, str]) -> None:
    body = {"model": "default_model", "messages": [KIND, GREETING], "max_tokens": 10, **THINKING}
    texts = []
    for url in urls:
        asked = {**body, "temperature": 0.0, "stream": True}
        lines = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        chunks = [json.loads(each) for each in data]
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        texts.append("".join(delta.get("content") or "" for delta in deltas))
        assert deltas[0]["role"] == "assistant" and chunks[-1]["choices"][0]["finish_reason"]
        comments = [line for line in lines if line.startswith(":")]
        assert all(re.fullmatch(r": keepalive \d+/\d+", line) for line in comments)
    assert texts[0] == texts[1] != ""
