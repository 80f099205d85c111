"""The chat page: what it may load, and a conversation in a real browser."""

import contextlib
import itertools
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvlingo_mlx.serving.app import PAGE, PAGE_FILES
from tests.support.fixtures import Temp
from tests.support.serving import Running, running

ENTER, ESCAPE, TAB, SHIFT, DOWN = "\ue007", "\ue00c", "\ue004", "\ue008", "\ue015"


class Browser:
    def __init__(self, url: str) -> None:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,760"]
        asked = {"goog:chromeOptions": {"args": options, "binary": shutil.which("chromium")},
                 "goog:loggingPrefs": {"browser": "ALL"}}  # fmt: skip
        self._client = httpx.Client(base_url=url, timeout=120)
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self._client.request(method, path, json=body)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def do(self, path: str, **body: Any) -> Any:
        return self._call("POST", f"{self._session}/{path}", body)

    def open(self, url: str) -> None:
        self.do("url", url=url)

    def size(self, width: int, height: int) -> None:
        """Make it a screen of this many pixels, a phone's if it is narrow."""
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.do("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=params)

    def run(self, script: str, *args: Any) -> Any:
        return self.do("execute/sync", script=script, args=args)

    def type(self, text: str) -> None:
        """Press keys where the focus is."""
        keys = [{"type": kind, "value": c} for c in text for kind in ("keyDown", "keyUp")]
        self.do("actions", actions=[{"type": "key", "id": "keys", "actions": keys}])

    def chord(self, held: str, key: str) -> None:
        """Press a key while another one is held."""
        keys = [{"type": "keyDown", "value": held}, {"type": "keyDown", "value": key},
                {"type": "keyUp", "value": key}, {"type": "keyUp", "value": held}]  # fmt: skip
        self.do("actions", actions=[{"type": "key", "id": "keys", "actions": keys}])

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """What a script returns as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.05)
        raise AssertionError(f"{script} did not come true; the page says: {self.text('body')}")

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({selector!r}).innerText")

    def errors(self) -> list[str]:
        """What the browser complained of since it was last asked."""
        found = self.do("se/log", type="browser")
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]

    def close(self) -> None:
        self._call("DELETE", self._session)
        self._client.close()


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/status").json()["value"]["ready"]:
                    break
            time.sleep(0.1)
        window = Browser(url)
        try:
            yield window
        finally:
            window.close()
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: Temp) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("told")) as found:
        yield found


@pytest.fixture
def page(window: Browser, server: Running) -> Browser:
    window.open(f"{server.url}/")
    window.run("sessionStorage.clear()")
    window.open(f"{server.url}/")
    window.until("return document.querySelector('#model').options.length == 2")
    window.errors()
    return window


def test_it_asks_nobody_else(server: Running) -> None:
    for path, name in PAGE_FILES.items():
        response = httpx.get(f"{server.url}{path}")
        assert response.text == (PAGE / name).read_text()
        assert "//" not in re.sub(r"^ *//.*| // .*", "", response.text, flags=re.MULTILINE)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    assert {file.name for file in PAGE.iterdir()} == set(PAGE_FILES.values())


def test_no_text_becomes_html() -> None:
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write",
                         (PAGE / "chat.js").read_text())  # fmt: skip


def light(colour: str) -> float:
    """A colour's relative luminance, as WCAG has it."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_it_is_read_in_light_and_dark() -> None:
    """Every text has a contrast of 4.5 with what may be behind it; all colours are in the table."""
    table, rest = (PAGE / "chat.css").read_text().split("}", 1)
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", table)
    colours = {name: (light(bright), light(dark)) for name, bright, dark in found}
    pairs = [*itertools.product(("text", "quiet", "wrong"), ("ground", "panel"))]
    for text, behind in [*pairs, ("on-accent", "accent")]:
        for one, other in zip(colours[text], colours[behind], strict=True):
            assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 4.5, (text, behind)
    assert len(colours) == table.count("#") / 2 == 8 and colours["ground"][1] < 0.05
    assert not re.search(r":[^;{]*(#[0-9a-f]|rgb|hsl|\b(black|white|grey)\b)", rest)


def body(page: Browser, server: Running) -> list[dict[str, Any]]:
    return json.loads(page.run("return JSON.stringify(messages)"))


def test_a_conversation_of_two_models(page: Browser, server: Running) -> None:
    """By the keyboard alone."""
    page.type("begin;say Hello <b>you</b>;say  there" + ENTER)
    page.until("return document.querySelectorAll('article.assistant dl').length == 1")
    answer = page.text("article.assistant")
    assert answer.startswith("small") and "Hello <b>you</b> there" in answer
    for told in ("tokens kept\n60", "translated\n30", "read\n10", "first token after\n250 ms",
                 "reading all would have taken\n4.0 s"):  # fmt: skip
        assert told in answer
    page.chord(SHIFT, TAB)
    assert page.run("return document.activeElement.id") == "model"
    page.type(DOWN + TAB + "fallback too long;say Again" + ENTER)
    page.until("return document.querySelectorAll('article.assistant dl').length == 2")
    last = page.text("article:last-child")
    assert last.startswith("large") and "read again, since\ntoo long" in last
    sent = body(page, server)
    assert [m["role"] for m in sent] == ["user", "assistant", "user", "assistant"]
    assert sent[1]["content"] == "Hello <b>you</b> there"
    assert server.told()[-2:] == [["ask", "small"], ["ask", "large"]]
    page.run("document.querySelector('header details').open = true")
    assert "Models 2.0 MB, conversations 5.0 kB of 9.0 MB" in page.text("#held")
    assert page.errors() == []


def test_an_answer_is_stopped(page: Browser, server: Running) -> None:
    before = server.told().count(["cancel"])
    page.type("begin;say Half;wait 600" + ENTER)
    page.until("return document.body.innerText.includes('Half\\n')")
    page.type(ESCAPE)
    page.until("return document.body.innerText.includes('Stopped.')")
    server.until(lambda: server.told().count(["cancel"]) == before + 1)
    said = {"role": "assistant", "content": "Half", "model": "small"}
    assert body(page, server)[-1] == said


def test_an_error_is_shown_and_the_message_comes_back(page: Browser, server: Running) -> None:
    page.type("fail memory" + ENTER)
    page.until("return document.querySelector('.wrong')")
    assert page.text(".wrong") == "planted failure: memory"
    assert page.run("return document.querySelector('#text').value") == "fail memory"
    assert body(page, server) == [] and page.text("#talk") == "planted failure: memory"
    page.run("document.querySelector('#text').value = ''")
    page.type("begin;say a;fail memory" + ENTER)
    page.until("return document.querySelector('article .wrong')")
    assert page.run("return document.querySelectorAll('.wrong').length") == 1
    assert [m["content"] for m in body(page, server)] == ["begin;say a;fail memory", "a"]


def test_shift_enter_begins_a_line_and_new_forgets(page: Browser, server: Running) -> None:
    page.type("begin;say a")
    page.chord(SHIFT, ENTER)
    page.type(";wait 600" + ENTER)
    page.until("return document.querySelector('article.user')")
    assert page.text("article.user p") == "begin;say a\n;wait 600"
    page.run("document.querySelector('#new').click()")
    page.until("return !document.querySelector('#send').disabled")
    assert body(page, server) == [] and page.text("#talk") == ""


LONG = "begin;say " + "words and more words " * 12 + "\n```py\n<i>code</i>\n```\nend"
LEFT = "const t = $('talk'); return t.scrollHeight - t.scrollTop - t.clientHeight"
SETTLED = "return new Promise((done) => setTimeout(done, 300))"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_end_stays_in_sight_until_somebody_scrolls_up(page: Browser, width: int) -> None:
    page.size(width, 800)
    said = "return document.querySelectorAll('article.assistant dl').length == {} && !running"
    for turn in range(3):
        page.run("document.querySelector('#text').value = arguments[0]", LONG)
        page.run("document.querySelector('#ask').requestSubmit()")
        page.until(said.format(turn + 1))
        page.run(SETTLED)
        assert page.run(LEFT) < 2, turn
    assert page.run("return document.querySelector('body > header').offsetHeight") < 80
    assert page.run("return document.body.scrollWidth") <= width
    assert page.text("article.assistant code") == "<i>code</i>"
    page.run("document.querySelector('#talk').scrollTop = 0")
    page.run(SETTLED)
    page.run("showUsage(document.querySelector('article:last-child'), {completion_tokens: 1})")
    page.run(SETTLED)
    assert page.run("return document.querySelector('#talk').scrollTop") == 0


def test_a_reload_shows_the_conversation_again(page: Browser, server: Running) -> None:
    page.type("begin;say Hello" + ENTER)
    page.until("return document.querySelector('article.assistant dl') && !running")
    before = body(page, server)
    page.open(f"{server.url}/")
    page.until("return document.querySelector('#model').options.length == 2")
    assert body(page, server) == before and len(before) == 2
    assert page.text("article.assistant").split() == ["small", "Hello"]
    page.run("document.querySelector('#new').click()")
    page.open(f"{server.url}/")
    assert body(page, server) == []


def test_a_server_that_has_gone(window: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as found:
        window.open(f"{found.url}/")
        window.until("return document.querySelector('#model').options.length == 2")
    window.type("begin;say Hello" + ENTER)
    window.until("return document.querySelector('.wrong')")
    assert window.text(".wrong") == "The server does not answer. Is it still running?"
    assert window.run("return document.querySelector('#text').value") == "begin;say Hello"


def test_a_key_is_asked_for(window: Browser, tmp_path: Path) -> None:
    with running(tmp_path, api_key="right-key") as locked:
        window.open(f"{locked.url}/")
        window.until("return document.activeElement.id == 'given'")
        window.type("wrong" + ENTER)
        window.until("return document.querySelector('#key label').innerText.includes('not this')")
        window.type("right-key" + ENTER)
        window.until("return document.querySelector('#model').options.length == 2")
        assert window.run("return document.querySelector('#key').hidden")
