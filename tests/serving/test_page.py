"""The chat page: what it may load, and a conversation in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from kvlingo_mlx.serving.app import PAGE, PAGE_FILES, apis  # noqa: E402
from tests.support.browser import (  # noqa: E402
    DOWN,
    ENTER,
    ESCAPE,
    INSTALLED,
    SHIFT,
    TAB,
    Browser,
    browser,
)
from tests.support.serving import Running, running  # noqa: E402

seen = pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("told"), apis()) as found:
        yield found


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
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


def body(page: Browser, server: Running) -> list[dict[str, Any]]:
    return json.loads(page.run("return JSON.stringify(messages)"))


@seen
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


@seen
def test_an_answer_is_stopped(page: Browser, server: Running) -> None:
    before = server.told().count(["cancel"])
    page.type("begin;say Half;wait 600" + ENTER)
    page.until("return document.body.innerText.includes('Half\\n')")
    page.type(ESCAPE)
    page.until("return document.body.innerText.includes('Stopped.')")
    server.until(lambda: server.told().count(["cancel"]) == before + 1)
    said = {"role": "assistant", "content": "Half", "model": "small"}
    assert body(page, server)[-1] == said


@seen
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


@seen
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


@seen
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


@seen
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


@seen
def test_a_server_that_has_gone(window: Browser, tmp_path: Path) -> None:
    with running(tmp_path, apis()) as found:
        window.open(f"{found.url}/")
        window.until("return document.querySelector('#model').options.length == 2")
    window.type("begin;say Hello" + ENTER)
    window.until("return document.querySelector('.wrong')")
    assert window.text(".wrong") == "The server does not answer. Is it still running?"
    assert window.run("return document.querySelector('#text').value") == "begin;say Hello"


@seen
def test_a_key_is_asked_for(window: Browser, tmp_path: Path) -> None:
    with running(tmp_path, apis(), api_key="right-key") as locked:
        window.open(f"{locked.url}/")
        window.until("return document.activeElement.id == 'given'")
        window.type("wrong" + ENTER)
        window.until("return document.querySelector('#key label').innerText.includes('not this')")
        window.type("right-key" + ENTER)
        window.until("return document.querySelector('#model').options.length == 2")
        assert window.run("return document.querySelector('#key').hidden")


@seen
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_read_in_light_and_dark(dark: bool, server: Running, tmp_path: Path) -> None:
    """Every text has a contrast of 4.5 with what is behind it, as WCAG asks."""
    with browser(dark=dark) as window:
        window.open(f"{server.url}/")
        window.until("return document.querySelector('#model').options.length == 2")
        window.type("begin;say Hello" + ENTER)
        window.until("return document.querySelector('dl')")
        found = window.run(CONTRASTS)
        ground = window.run("return getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) == dark
        assert len(found) > 10 and min(found.values()) >= 4.5, found


CONTRASTS = """
const canvas = document.createElement("canvas").getContext("2d");
function rgb(color) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
}
function light(color) {
  const [r, g, b] = [...rgb(color)].slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (rgb(color)[3] === 255) return color;
  }
}
const found = {};
for (const element of document.querySelectorAll("body *")) {
  if (!element.innerText || element.children.length || !element.checkVisibility()) continue;
  const both = [light(getComputedStyle(element).color), light(behind(element))];
  const contrast = (Math.max(...both) + .05) / (Math.min(...both) + .05);
  found[`${element.tagName} ${element.innerText}`] = contrast;
}
return found;
"""
