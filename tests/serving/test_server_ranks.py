"""A server whose large model two ranks hold: clients see what one process would tell them."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvlingo_mlx.embedded import zoo
from tests.support import TESTS
from tests.support.ranks import launching

VERB = str(Path(sys.executable).parent / "kvlingo-mlx")
MODELS = [f"--model={name}={zoo(f'tiny-qwen3-{name}')}" for name in ("s", "l")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """The address of a server on two ranks, its launcher, and what it prints."""
    words = launching(2, VERB, "serve", *MODELS, "--port=0")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "KVLINGO_HOME": str(tmp_path)}
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=environment, cwd=TESTS.parent,
    )  # fmt: skip
    printed: list[str] = []
    assert process.stdout is not None
    threading.Thread(target=printed.extend, args=(process.stdout,), daemon=True).start()
    until = time.monotonic() + 300
    while not any(" ready: " in line for line in printed):
        assert process.poll() is None and time.monotonic() < until, "".join(printed)
        time.sleep(0.2)
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)  # MLX's launcher keeps a processor busy
    (url,) = re.findall(r"a chat at (http://\S+?)/ ", "".join(printed))
    try:
        yield url, process, printed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def ask(url: str, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_clients_of_a_server_on_two_ranks(
    server: tuple[str, subprocess.Popen[str], list[str]],
) -> None:
    """A switch by translation, answers side by side, an error, and a killed rank that ends all."""
    url, process, printed = server
    messages = [{"role": "user", "content": "The home of Paul is Oslo. What is the home of Paul?"}]
    first = ask(url, "s", messages)
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "What is the home of Paul?"})
    switched = ask(url, "l", messages)
    assert switched["choices"][0]["message"]["content"] == "The home of Paul is Oslo."
    told = switched["usage"]["kvlingo"]
    assert told["strategy"] == "translate" and told["translated_tokens"] > 20
    said: list[Any] = [None] * 2
    several = [
        threading.Thread(target=lambda n=n: said.__setitem__(n, ask(url, "sl"[n % 2], messages)))
        for n in range(2)
    ]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join(120)
    texts = [answer["choices"][0]["message"]["content"] for answer in said]
    assert texts == ["The home of Paul is Oslo."] * 2
    assert httpx.post(f"{url}/v1/chat/completions", json={"model": "x"}).status_code in (400, 404)
    assert any("several machines serve, so conversations are kept in memory" in p for p in printed)
    other = _follower(process.pid)
    os.kill(other, signal.SIGKILL)
    process.wait(60)  # no rank is left waiting for it
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/health", timeout=5)
    said = "".join(printed)
    assert "Traceback" not in said and said.count("error: ") <= 1, said


def _follower(launcher: int) -> int:
    """The process of the second rank among a launcher's descendants."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            group = os.getpgid(int(place.name))
            environment = (place / "environ").read_bytes().split(b"\0")
            words = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if group == launcher and b"MLX_RANK=1" in environment and b"serve" in words:
            return int(place.name)
    raise AssertionError("there is no second rank")
