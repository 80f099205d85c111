"""`agents`: files of other programs gain what they should, keep the rest, become what they were."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlingo_mlx.agents import agents, files
from kvlingo_mlx.agents.insertion import with_lines, with_members
from kvlingo_mlx.cli import run
from tests.support.command_line import fails

Printed = pytest.CaptureFixture[str]
OFFER = {"url": "http://x:1", "key": "k", "plan": "p/1", "plan_context": "8", "plan_output": "2",
         "build": 'b"2', "build_context": "16", "build_output": "4"}  # fmt: skip
KEYS = st.sampled_from(
    ["model", "agent", "plan", "env", "provider", "kvlingo", "a", "é // {", 'q"']
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "x, ]", "/* no */", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=5)
NOISE = st.sampled_from(["", " ", "\n", "\r\n\t", "// a } comment\n", "/* one , { */", "\n  "])

# A file's test shares its home over the examples; no test asserts speed.
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[*HealthCheck])


@st.composite
def jsonc(draw: Any, value: Any) -> str:
    """A text of a value, with comments, commas before closing marks, and any white space."""

    def write(value: Any) -> str:
        if not isinstance(value, dict | list):
            return json.dumps(value, ensure_ascii=draw(st.booleans()))
        opens, closes = "{}" if isinstance(value, dict) else "[]"
        items = value.items() if isinstance(value, dict) else ((None, each) for each in value)
        parts = [
            draw(NOISE) + ("" if key is None else f"{json.dumps(key)}{draw(NOISE)}:{draw(NOISE)}")
            + write(each) + draw(NOISE)
            for key, each in items
        ]  # fmt: skip
        last = "," if parts and draw(st.booleans()) else ""
        return f"{opens}{','.join(parts)}{last}{draw(NOISE)}{closes}"

    return draw(NOISE) + write(value) + draw(NOISE)


def read(text: str) -> Any:
    """A JSONC text's value, by another way: character by character."""
    kept, at = "", 0
    while at < len(text):
        if text[at] == '"':
            end = at + 1
            while text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            kept, at = kept + text[at : end + 1], end + 1
        elif text[at : at + 2] in ("//", "/*"):
            mark = "\n" if text[at + 1] == "/" else "*/"
            at = text.index(mark, at + 2) + len(mark)
        elif text[at] in "]}":
            kept, at = kept.rstrip().removesuffix(",") + text[at], at + 1
        else:
            kept, at = kept + text[at], at + 1
    return json.loads(kept)


def merged(old: Any, new: dict[str, Any]) -> dict[str, Any]:
    """What a file should hold then."""
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        whole = key == "kvlingo" or not isinstance(value, dict)
        found[key] = value if whole else merged(found.get(key), value)
    return found


@QUICK
@given(st.data(), OBJECTS, OBJECTS)
def test_members_are_put_in_and_all_else_stays(data: Any, old: Any, new: Any) -> None:
    text = data.draw(jsonc(old))
    assert read(text) == old  # the reader itself
    then = with_members(text, new)
    assert read(then) == merged(old, new)
    replaced = any(key in old for key in new)
    if not replaced:  # then nothing but insertions: what was there is there, in its order
        left = iter(then)
        assert all(each in left for each in text)


@given(
    st.lists(st.sampled_from(["- a: 1", "# no", "- {b: 2}", ""])), st.sampled_from(["\n", "\r\n"])
)
def test_lines_are_put_at_the_end(lines: list[str], end: str) -> None:
    text = end.join(lines)
    then = with_lines(text, "- {c: 3}\n")
    assert then.startswith(text) and yaml.safe_load(then) == [
        *(yaml.safe_load(text) or []),
        {"c": 3},
    ]


def test_a_key_is_put_at_the_end() -> None:
    assert with_lines("a: x # mine", "b:\n- 1\n") == "a: x # mine\nb:\n- 1\n"


@pytest.mark.parametrize("text", ["[{a: 1}]", "a: 1", "a: [", "- a\n...\n", "word", "b: []", "{}"])
@pytest.mark.parametrize("lines", ["- {c: 3}\n", "b:\n- 1\n"])
def test_where_lines_do_not_fit_a_person_must(text: str, lines: str) -> None:
    if (text, lines[0]) != ("a: 1", "b"):
        with pytest.raises(ValueError, match="end"):
            with_lines(text, lines)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home without any program."""
    for name, value in (("HOME", tmp_path), ("KVLINGO_HOME", tmp_path / "ours")):
        monkeypatch.setenv(name, str(value))
    for agent in agents().values():
        for folder in agent.folders:
            monkeypatch.delenv(folder.split("/")[0].removeprefix("$"), raising=False)
    return tmp_path


WITH_FILE = [name for name, agent in agents().items() if agent.files]


@QUICK
@given(st.data())
@pytest.mark.parametrize("name", WITH_FILE)
def test_set_up_and_removal_leave_a_file_as_it_was(name: str, data: Any) -> None:
    """Whatever it held, and also set up twice; what stood in it stands there meanwhile, too."""
    agent = agents()[name]
    path = agent.path
    assert path is not None
    texts = {".json": OBJECTS.flatmap(jsonc), ".yaml": st.sampled_from(["", "# none\n", "# x"])}
    text = data.draw(st.none() | texts.get(path.suffix, st.text(st.characters(codec="utf-8"))))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_bytes(text.encode())
        path.chmod(0o640)
    before = (text and text.encode(), text and path.stat())
    for _ in range(data.draw(st.integers(1, 2))):
        then = agent.put(text or "", agent.snippet(OFFER))
        files.write(name, path, then.encode())
        assert path.read_bytes() == then.encode()
        assert text is None or path.stat().st_mode & 0o777 == 0o640
    files.put_back(name)
    if text is None:
        assert [*path.parent.iterdir()] == []
    else:
        after = path.stat()
        assert path.read_bytes() == text.encode()
        assert not before[1] or (after.st_mode, after.st_mtime_ns) == (
            before[1].st_mode, before[1].st_mtime_ns)  # fmt: skip
        path.unlink()
        assert [*path.parent.iterdir()] == []  # no copy is left


@pytest.fixture
def url() -> Iterator[str]:
    """A server that offers two models."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = [{"id": name, "kvlingo": {"context": 4096}} for name in ("big", "quick")]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": said}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_the_verb(url: str, home: Path, capsys: Printed) -> None:
    file = home / ".config" / "zed" / "settings.json"
    file.parent.mkdir(parents=True)
    file.write_text('// mine\n{\n    "theme": "One", // dark\n}\n')
    words = ["agents", "zed", "--plan", "big", "--build", "quick", "--url", url]
    assert run(words) == 0 and "--setup" in capsys.readouterr().out
    assert "kvlingo" not in file.read_text() and run([*words, "--setup"]) == 0
    shown = capsys.readouterr().out
    assert '\n+    "agent": {' in shown and not re.search(r"^-(?!--)", shown, re.MULTILINE)
    assert (
        '"theme": "One", // dark' in file.read_text() and '"max_tokens": 4096' in file.read_text()
    )
    assert run(["agents"]) == 0 and re.search("zed .* yes", capsys.readouterr().out)
    file.write_text(file.read_text().replace("One", "Two"))  # by somebody else
    fails(["agents", "zed", "--remove"], "was changed since", capsys)
    fails([*words, "--setup"], "was changed since", capsys)
    assert "Two" in file.read_text() and run(["agents", "zed", "--remove", "--force"]) == 0
    assert file.read_text() == '// mine\n{\n    "theme": "One", // dark\n}\n'
    fails(["agents", "zed", "--remove"], "not set up", capsys)
    assert run([*words, "--setup"]) == 0
    files.copy_of(file).unlink()  # then what was there is not known, and nothing is taken away
    fails(["agents", "zed", "--remove", "--force"], "is gone", capsys)
    assert "kvlingo" in file.read_text()


def test_what_cannot_be_done_is_one_line(url: str, home: Path, capsys: Printed) -> None:
    words = ["--plan", "big", "--build", "quick", "--url", url]
    fails(["agents", "sed", *words], "name one of opencode, claude", capsys)
    fails(["agents", "--setup"], "name one of", capsys)
    fails(["agents", "pi", "--plan", "big", "--url", url], "the server has big, quick", capsys)
    fails(["agents", "pi", *words[:4], "--url", "http://127.0.0.1:9"], "kvlingo-mlx serve", capsys)
    (home / ".pi" / "agent").mkdir(parents=True)
    file = home / ".pi" / "agent" / "models.json"
    for broken in ("{", "[1]", "{'a': 1}"):
        file.write_text(broken)
        capsys.readouterr()
        assert run(["agents", "pi", *words, "--setup"]) == 2
        out, error = capsys.readouterr()
        assert '"baseUrl"' in out and "stays as it is" in error and file.read_text() == broken
    assert run(["agents", "cline", *words]) == 0
    assert f"cline auth -p openai-compatible -k none -b {url} -m quick" in capsys.readouterr().out
