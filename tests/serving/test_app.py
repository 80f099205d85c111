"""Requests and their responses, over real connections, with an engine that runs scripts."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fixtures import Logged, Patch, Temp
from tests.support.serving import Running, running, texts

FALLBACK, STRATEGY = "x-kvlingo-fallback", "x-kvlingo-strategy"


@pytest.fixture(scope="module")
def server(tmp_path_factory: Temp) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("told"), queue_limit=3, routes="rules.toml") as found:
        yield found


def comments(response: Any) -> list[str]:
    return [line for line in response.text.split("\n\n") if line.startswith(":")]


def test_a_whole_answer(server: Running) -> None:
    response = server.ask("begin translate;say one;waiting;say two")
    found = response.json()["choices"][0]["text"]
    assert (response.status_code, found) == (200, "onetwo")
    assert response.headers[STRATEGY] == "translate" and FALLBACK not in response.headers


def test_a_stream(server: Running) -> None:
    response = server.ask("begin kept;say one;say two", stream=True)
    assert texts(response.text) == ["one", "two", "[DONE]"]
    assert response.headers[STRATEGY] == "kept"
    assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("kind", "status"),
    [("invalid", 400), ("too_long", 400), ("busy", 429), ("memory", 503), ("internal", 500)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_token_have_their_status(
    kind: str, status: int, stream: bool, server: Running
) -> None:
    response = server.ask(f"waiting;fail {kind}", stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["message"] == f"planted failure: {kind}"
    assert ("retry-after" in response.headers) == (kind in ("busy", "memory"))


def test_keep_alives_come_by_timer(server: Running) -> None:
    """Also while the engine tells how far it has read; a failure is then a frame."""
    quiet = server.ask("wait 1;begin;say one", stream=True)
    assert texts(quiet.text) == ["one", "[DONE]"]
    assert set(comments(quiet)) == {": keepalive 0/0"} and STRATEGY not in quiet.headers
    busy = server.ask("waiting;wait 0.2;" * 5 + "fail memory", stream=True)
    assert busy.status_code == 200 and texts(busy.text)[0] == "out_of_memory"
    assert ": keepalive 3/10" in comments(busy)
    assert not comments(server.ask("begin;say one", stream=True))  # control


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ["wait 600", "begin;say a;wait 600"])
def test_a_client_that_leaves_cancels(script: str, stream: bool, server: Running) -> None:
    before = server.told().count(["cancel"])
    asked = len(asks(server))
    with server.send(script, stream):
        server.until(lambda: len(asks(server)) > asked)
        assert server.told().count(["cancel"]) == before
    server.until(lambda: server.told().count(["cancel"]) == before + 1)
    server.until(lambda: server.engine.waiting == 0)
    server.until(lambda: 'status="499"' in httpx.get(f"{server.url}/metrics").text)


def test_too_many_that_wait_are_refused(server: Running) -> None:
    clients = []
    for number in range(1, 4):
        clients.append(server.send("wait 600"))
        server.until(lambda number=number: server.engine.waiting == number)
    refused = server.ask("begin")
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    assert "3 requests wait already" in refused.json()["error"]["message"]
    for client in clients:
        client.close()
    server.until(lambda: server.engine.waiting == 0)
    assert server.ask("begin").status_code == 200


def asks(server: Running) -> list[list[str]]:
    return [told for told in server.told() if told[0] == "ask"]


def test_an_unknown_model_is_told_those_there_are(server: Running) -> None:
    before = len(asks(server))
    response = server.ask("begin", model="gpt-9\n")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"] == "model 'gpt-9\\n' is not offered; offered are small, large, auto"
    assert error["param"] == "model" and len(asks(server)) == before
    assert server.ask("begin", model="auto").status_code == 200
    assert server.ask("begin", model="default_model").status_code == 200  # as mlx-lm's server
    assert asks(server)[before:] == [["ask", "auto"], ["ask", "small"]]


def test_a_bad_request_is_told_in_its_apis_form(server: Running) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "small"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt: Field required"
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'"\\ud800"', b"1" * 9999,
     b'{"prompt": "begin"', b"null", b"[]", b'"x"', b"\x00" * 10],
)  # fmt: skip
def test_bodies_that_are_no_requests(body: bytes, server: Running) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.isprintable() and len(message) < 300


def test_paths_and_methods_that_do_not_exist(server: Running) -> None:
    response = httpx.get(f"{server.url}/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == (
        "there is no GET '/v2/nothing'; POST to /v1/chat/completions, /v1/completions, "
        "/v1/messages, /v1/responses, /v1/messages/count_tokens; GET /v1/models"
    )
    response = httpx.get(f"{server.url}/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"] == "/v1/completions takes no GET; use POST"


def test_models_are_loaded_and_unloaded(server: Running) -> None:
    def loaded() -> bool:
        return httpx.get(f"{server.url}/v1/models/large").json()["kvlingo"]["loaded"]

    unloaded = httpx.post(f"{server.url}/v1/models/large/unload")
    assert unloaded.status_code == 200 and unloaded.json()["kvlingo"]["loaded"] is False
    server.until(lambda: not loaded())
    assert httpx.post(f"{server.url}/v1/models/large/load").status_code == 200
    server.until(loaded)
    for name in ("auto", "none"):
        assert httpx.post(f"{server.url}/v1/models/{name}/load").status_code == 404


def test_health_and_status(server: Running) -> None:
    for path in ("/health", "/health/live"):
        response = httpx.get(f"{server.url}{path}")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    status = httpx.get(f"{server.url}/v1/status").json()
    assert status["ready"] and status["worker"]["lines_bytes"] == 5_000
    assert status["worker"]["pairs"] == [["small", "large", "translate", "receipt 0.95"]]


def test_an_engine_that_fails_ends_its_requests_and_the_server(tmp_path: Path) -> None:
    """The parent then starts another one."""
    with running(tmp_path) as server:
        body = {"model": "small", "prompt": "begin;say a;wait 600", "stream": True}
        with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=30) as other:
            text = other.iter_text()
            assert texts(next(text)) == ["a"]
            response = server.ask("wait 0;raise")
            assert response.status_code == 503 and "LookupError" in response.text
            assert response.headers["x-should-retry"] == "false"
            assert texts("".join(text))[0] == "worker_crashed"
        server.thread.join(60)
    assert str(server.error) == "LookupError" and not server.engine.fatal


def test_not_ready_is_not_healthy_but_alive(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("wait 3")
    context = running(tmp_path)
    ready, Running.ready = Running.ready, lambda self: self  # type: ignore[method-assign]
    try:
        with context as server:
            assert httpx.get(f"{server.url}/health/live").status_code == 200
            health = httpx.get(f"{server.url}/health")
            assert health.status_code == 503 and "retry-after" in health.headers
            refused = server.ask("begin")
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert "is being started" in refused.json()["error"]["message"]
            assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "small"
            assert server.ask("begin", model="none").status_code == 404
    finally:
        Running.ready = ready  # type: ignore[method-assign]


def test_a_stop_lets_answers_end_or_cuts_them(tmp_path: Path) -> None:
    with running(tmp_path, stop_timeout=2.0) as server:
        short, long = (
            httpx.stream("POST", f"{server.url}/completions", timeout=30,
                         json={"model": "small", "prompt": script, "stream": True})
            for script in ("begin;say a;wait 0.5;say b", "begin;say a;wait 600")
        )  # fmt: skip
        with short as first, long as second:
            server.server.should_exit = True
            assert texts(first.read().decode()) == ["a", "b", "[DONE]"]
            assert "server_unready" in texts(second.read().decode())
        server.thread.join(30)
    assert server.told()[-1] == ["stop"]


def test_stopping_refuses_new_requests_on_old_connections(tmp_path: Path) -> None:
    with running(tmp_path) as server, httpx.Client() as client:
        assert client.get(f"{server.url}/health").status_code == 200
        server.engine._stopping = True
        refused = client.post(f"{server.url}/completions", json={"prompt": "begin"})
        assert refused.status_code == 503 and "is stopping" in refused.text


def test_metrics(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.ask("begin translate;say a")
        server.ask("fallback too long;say a", model="large")
        server.ask("begin", model="none-of-them")
        httpx.get(f"{server.url}/v1/models/small")
        httpx.get(f"{server.url}/a/path/of/a/client")
        text = httpx.get(f"{server.url}/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        'requests_total{endpoint="/v1/completions",model="small",status="200"}': 1,
        'requests_total{endpoint="/v1/completions",model="large",status="200"}': 1,
        'requests_total{endpoint="/v1/completions",model="-",status="404"}': 1,
        'requests_total{endpoint="/v1/models/{id}",model="-",status="200"}': 1,
        'requests_total{endpoint="other",model="-",status="404"}': 1,
        'switches_total{model="small",strategy="translate"}': 1,
        'switches_total{model="large",strategy="reread"}': 1,
        'fallbacks_total{model="large"}': 1,
        'prompt_tokens_total{model="small",source="translated"}': 30,
        'prompt_tokens_total{model="small",source="cached"}': 60,
        'completion_tokens_total{model="small"}': 5,
        'time_to_first_token_seconds_count{model="small",strategy="translate"}': 1,
        'time_per_token_seconds_count{model="small"}': 1,
        'memory_bytes{kind="weights"}': 2_000_000,
        'memory_bytes{kind="lines"}': 5_000,
        'conversations{place="disk"}': 1,
        "worker_ready": 1,
        "worker_restarts_total": 0,
        "waiting": 0,
    }
    assert {k: float(found[f"kvlingo_{k}"]) for k in expected} == expected
    assert "none-of-them" not in text and "/a/path" not in text


def test_texts_are_never_logged(tmp_path: Path, caplog: Logged, monkeypatch: Patch) -> None:
    """Neither of prompts nor of answers, also when we make a mistake."""
    from kvlingo_mlx.serving.server import NoContents
    from kvlingo_mlx.serving.wire import requests

    read, counter = requests.Api.read, itertools.count()

    def fails_once(self: Any, body: Any) -> Any:
        if next(counter) == 1:
            raise KeyError(f"a fault that quotes {body}")
        return read(self, body)

    monkeypatch.setattr(requests.Api, "read", fails_once)
    caplog.set_level("DEBUG")
    caplog.handler.addFilter(NoContents())
    with running(tmp_path) as server:
        assert server.ask("begin;say SECRET").status_code == 200
        broken = server.ask("begin;say SECRET")
        assert broken.status_code == 500 and "KeyError" in broken.json()["error"]["message"]
        assert "SECRET" not in broken.text
        time.sleep(0.2)
    assert "30 translated" in caplog.text and "KeyError at " in caplog.text
    assert "SECRET" not in caplog.text
