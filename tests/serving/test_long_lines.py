"""Lines of 100,000 characters wherever a text can be: answered or refused soon, nobody waits."""

import copy
import itertools
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.serving.engine_thread import ENGINE
from kvlingo_mlx.serving.sessions import Keys
from tests.support.fixtures import Patch
from tests.support.serving import Running, running
from tests.support.wire_bodies import CHAT, COMPLETION, MESSAGES, RESPONSES, changed, places

LONG = 100_000  # whose square no regular expression looks at within these seconds
SOON = 2.0  # seconds, or some times what ordinary text of this length takes
KINDS = {
    "spaces": " ", "tabs": " \t", "newlines": "\n", "lines of spaces": " " * 999 + "\n",
    "letters": "a", "words": "ab ", "base64": "QmFzZTY0+/9z", "digits": "1", "brackets": "[{",
    "closed": "[]", "quotes": "\"'", "backslashes": "\\", "combining": "e\u0301\u0323",
    "joiners": "\u200d", "unknown": "\ufffd", "noncharacters": "\ufdd01\ufdd1", "emoji": "👩‍👧",
    "thoughts": "<think>", "calls": "<tool_call>\n", "ends": "<|im_end|>\n", "headers": "Model: ",
}  # fmt: skip
ASIDE = """
    stream stream_options tool_choice response_format output_config text continue_final_message
    add_generation_prompt logprobs top_logprobs include kvlingo
""".split()


def line(kind: str) -> str:
    return (KINDS[kind] * LONG)[:LONG]


def body_of(full: dict[str, Any]) -> dict[str, Any]:
    """A request that the models answer, in which the fields have texts."""
    body = {key: value for key, value in copy.deepcopy(full).items() if key not in ASIDE}
    if body.get("messages", [{}])[-1].get("role") == "assistant":
        body["messages"].pop()
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in body:
            body[name] = 2
    return body


BODIES = {
    "/v1/chat/completions": body_of(CHAT),
    "/v1/completions": body_of(COMPLETION) | {"prompt": "Hej"},
    "/v1/messages": body_of(MESSAGES),
    "/v1/responses": body_of(RESPONSES),
}


def texts(body: Any) -> list[tuple[Any, ...]]:
    """The places of texts in a body, those of a call's arguments included."""
    return [path for path in places(body) if isinstance(reduce(getitem, path, body), str)]


@dataclass
class Streaming:
    """A client that streams one answer after another."""

    url: str
    ended: bool = False
    waited: float = 0.0  # the longest time between two of its tokens
    tokens: int = 0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        question = {"role": "user", "content": "Anna lives in Rome. Where does Anna live?"}
        body = {"model": "large", "messages": [question], "stream": True, "max_tokens": 400,
                "temperature": 2.0}  # fmt: skip
        while not self.ended:
            last = time.monotonic()
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body, timeout=60
            ) as r:
                for _ in filter(None, r.iter_lines()):
                    now = time.monotonic()
                    self.waited, last = max(self.waited, now - last), now
                    self.tokens += 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    models = {"large": str(zoo("tiny-qwen3-l")), "small": str(zoo("tiny-qwen3-s"))}
    with running(tmp_path, ENGINE, models=models, keep_conversations=False) as found:
        yield found


def took(server: Running, path: str, body: Any) -> float:
    """Seconds until a request is answered or refused, in either case by the server's own words."""
    began = time.monotonic()
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    seconds = time.monotonic() - began
    assert answer.status_code in (200, 400, 404, 413), (path, answer.status_code, answer.text[:300])
    assert answer.status_code == 200 or len(answer.text) < 2000
    return seconds


def test_long_lines_hold_nobody_up(server: Running) -> None:
    asked = {"model": "small", "max_tokens": 2}
    ordinary = " ".join(f"word{n % 97}" for n in range(LONG // 7))
    usual = max(
        took(server, "/v1/chat/completions",
             {**asked, "messages": [{"role": "user", "content": ordinary}]})
        for _ in range(2)
    )  # fmt: skip
    most, other = max(SOON, 8 * usual), Streaming(server.url)
    kinds, slow = itertools.cycle(KINDS), list[tuple[float, Any]]()
    for kind in KINDS:
        body = {**asked, "messages": [{"role": "user", "content": line(kind)}]}
        slow.append((took(server, "/v1/chat/completions", body), kind))
    for path, full in BODIES.items():
        assert httpx.post(f"{server.url}{path}", json=full | {"model": "small"}).is_success
        for place in texts(full):
            kind = next(kinds)
            body = changed(full | {"model": "small"}, place, line(kind), "replaced")
            slow.append((took(server, path, body), (path, place, kind)))
    other.ended = True
    other.thread.join(60)
    print(len(slow), usual, other.waited, other.tokens, sorted(slow, key=str, reverse=True)[:5])
    assert max(slow, key=lambda each: each[0])[0] < most
    assert other.tokens > 100 and other.waited < most


def test_a_pattern_of_quadratic_time_is_noticed(server: Running, monkeypatch: Patch) -> None:
    """The old default pattern of volatile lines, searched in all that is said."""
    pattern = re.compile(r"^\s*-?\s*You are powered by the model")

    def lasting(_: Keys, message: Any) -> str:
        lines = str(message.get("content") or "").split("\n")
        return "\n".join(line for line in lines if not pattern.search(line))

    def seconds(text: str) -> float:
        body = {"model": "small", "messages": [{"role": "user", "content": text}]}
        return took(server, "/v1/chat/completions", body)

    spaces = "|\n" + " " * 30_000 + "|"
    before = min(seconds(spaces) for _ in range(4))
    monkeypatch.setattr(Keys, "_lasting", lasting)
    assert seconds(spaces) > 3 * before
