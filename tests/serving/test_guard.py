"""Keys, hosts, origins, sizes of bodies, and clients that are slow."""

import gzip
import http.client
import json
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fixtures import Temp
from tests.support.serving import Running, running, texts

BODY = {"model": "small", "prompt": "begin;say a"}
OPEN = ("/", "/page/chat.js", "/page/chat.css", "/health", "/health/live")
CLOSED = ("/v1/models", "/v1/models/small", "/v1/status", "/metrics", "/nothing")


@pytest.fixture(scope="module")
def server(tmp_path_factory: Temp) -> Iterator[Running]:
    with running(
        tmp_path_factory.mktemp("told"), body_limit=10_000, body_timeout=1.0, header_timeout=1.0,
        write_timeout=1.0, cors=("http://listed:3000",),
    ) as found:  # fmt: skip
        yield found


@pytest.fixture(scope="module")
def locked(tmp_path_factory: Temp) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("told"), api_key="right-key") as found:
        yield found


def post(server: Running, **more: Any) -> Any:
    return httpx.post(f"{server.url}/v1/completions", **{"json": BODY, "timeout": 30, **more})


def text_of(response: Any) -> str:
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer right-key"},
        {"authorization": "bearer  right-key"},
        {"x-api-key": "right-key"},
    ],
)
def test_a_key_lets_in(headers: dict[str, str], locked: Running) -> None:
    assert text_of(post(locked, headers=headers)) == "a"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer right-key2"},
        {"authorization": "Basic right-key"},
        {"authorization": "right-key"},
        {"x-api-key": ""},
        {"x-api-key": b"right-ke\xff"},
    ],
)
def test_no_key_lets_nobody_in(headers: dict[str, Any], locked: Running) -> None:
    refused = post(locked, headers=headers)
    assert refused.status_code == 401 and "right-key" not in refused.text
    assert "`x-api-key: KEY`" in refused.json()["error"]["message"]
    assert refused.headers["www-authenticate"] == "Bearer"


def test_what_needs_no_key(locked: Running) -> None:
    for path in OPEN:
        assert httpx.get(f"{locked.url}{path}").status_code == 200, path
    for path in CLOSED:
        assert httpx.get(f"{locked.url}{path}").status_code == 401, path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8080", "[::1]:8080", "LOCALHOST"])
def test_this_machines_names(host: str, server: Running) -> None:
    assert post(server, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[", ""])
def test_other_names_are_refused(host: str, server: Running) -> None:
    refused = post(server, headers={"host": host})
    assert refused.status_code == 403 and "--api-key" in refused.json()["error"]["message"]


def test_pages_of_other_sites_are_refused(server: Running) -> None:
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port + 1}"):
        refused = post(server, headers={"origin": origin})
        assert refused.status_code == 403 and "--cors" in refused.text
        assert "access-control-allow-origin" not in refused.headers
    for origin in (server.url, "http://listed:3000"):
        assert post(server, headers={"origin": origin}).status_code == 200


def test_cors(server: Running) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    url = f"{server.url}/v1/completions"
    allowed = httpx.options(url, headers={"origin": "http://listed:3000", **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://listed:3000"
    assert "x-api-key" in allowed.headers["access-control-allow-headers"]
    refused = httpx.options(url, headers={"origin": "http://evil.example", **asked})
    assert refused.status_code >= 400 and "access-control-allow-origin" not in refused.headers
    exposed = post(server, headers={"origin": "http://listed:3000"}).headers
    assert "x-kvlingo-strategy" in exposed["access-control-expose-headers"]


def test_a_body_that_says_it_is_too_large(server: Running) -> None:
    refused = post(server, json={**BODY, "prompt": "x" * 20_000})
    assert refused.status_code == 413 and "10,000 bytes" in refused.json()["error"]["message"]


def test_a_body_that_does_not_say_how_large_it_is(server: Running) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    refused = post(server, json=None, content=parts())
    assert refused.status_code == 413
    whole = json.dumps(BODY).encode()
    accepted = post(server, json=None, content=iter([whole[:9], whole[9:], b" " * 5000]))
    assert text_of(accepted) == "a"


def test_bodies_as_clients_encode_them(server: Running) -> None:
    """Of each the same request is read: marks in front, compressed, with halves of pairs."""
    body = json.dumps({**BODY, "prompt": "begin;say X"}).encode()
    half, pair = body.replace(b"X", b"\\ud83d."), body.replace(b"X", b"\\ud83d\\ude00")
    escaped = body.replace(b"X", b"\\\\ud83d")
    for sent, text in (
        (body, "X"), (b"\xef\xbb\xbf" + body, "X"), (body.decode().encode("utf-16"), "X"),
        (half, "\ufffd."), (pair, "\U0001f600"),
        (escaped, "\\ud83d"), (half.replace(b"ud83d", b"uDE00"), "\ufffd."),
        (body.replace(b"X", b"a\\u0000b"), "a\0b"),
    ):  # fmt: skip
        assert text_of(post(server, json=None, content=sent)) == text, sent
        for name, packed in (("gzip", gzip.compress(sent)), ("deflate", zlib.compress(sent))):
            headers = {"content-encoding": name}
            assert text_of(post(server, json=None, content=packed, headers=headers)) == text
    latin = body.replace(b"X", b"\xfc\x80")
    for kind, text in (("iso-8859-1", "\xfc\x80"), ('"CP1252"', "\xfc\u20ac"), ("utf-8", "")):
        told = {"content-type": f"application/json; charset={kind}"}
        got = post(server, json=None, content=latin, headers=told)
        wrong = f"byte 0xfc in position {latin.index(0xFC)}", "send UTF-8 (in PowerShell: "
        assert text_of(got) == text if text else all(part in got.text for part in wrong)
    bomb = gzip.compress(body + b" " * 10**7)
    for name, content, status in (
        ("gzip", bomb, 413), ("gzip", body, 400), ("br", body, 415), ("identity", b"{", 400),
        ("zstd", body, 415),
    ):  # fmt: skip
        refused = post(server, json=None, content=content, headers={"content-encoding": name})
        assert refused.status_code == status, name
        message = refused.json()["error"]["message"]
        assert message.isprintable() and ("in Codex" in message) == (name == "zstd")


def connect(server: Running, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(data)
    return client


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"


def test_a_body_that_does_not_come(server: Running) -> None:
    with connect(server, HEAD + b"{") as client:
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == 408 and b"did not arrive within 1 s" in answer.read()
        assert client.recv(1000) == b""


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", HEAD[:-4]])
def test_headers_that_do_not_come(data: bytes, server: Running) -> None:
    with connect(server, data) as client:
        assert ended(client)


def ended(client: socket.socket) -> bool:
    try:
        return client.recv(1000) == b""
    except ConnectionResetError:
        return True


def test_a_reader_that_takes_nothing_is_cut(server: Running) -> None:
    cancels = server.told().count(["cancel"])
    with server.send("begin;flood 40;wait 600"):
        server.until(lambda: server.told().count(["cancel"]) == cancels + 1)


def test_a_reader_that_takes_all_is_not(server: Running) -> None:
    prompt = "begin;flood 10;wait 1.5;say end"
    got = httpx.post(f"{server.url}/completions", json={**BODY, "prompt": prompt, "stream": True},
                     timeout=60)  # fmt: skip
    assert texts(got.text) == [*["x" * 500_000] * 10, "end", "[DONE]"]


def test_hosts_are_not_asked_of_who_has_a_key(locked: Running, tmp_path: Path) -> None:
    key = {"x-api-key": "right-key"}
    assert post(locked, headers={"host": "box.example", **key}).status_code == 200
    with running(tmp_path, allow_anyone=True) as anyone:
        assert post(anyone, headers={"host": "box.example"}).status_code == 200
        assert post(anyone, headers={"origin": "http://evil.example"}).status_code == 403
