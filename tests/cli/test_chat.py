"""The chat verb, run as a user runs it: from a pipe, and in a terminal of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvlingo_mlx.backend

import pytest
from mlx_lm.generate import stream_generate as mlx_stream_generate

import kvlingo_mlx.engine.conversation
from kvlingo_mlx.cli import run
from kvlingo_mlx.engine import healing
from kvlingo_mlx.engine.accounting import LineStats, Stats
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import is_apple
from tests.support.fixtures import Folders, Models, Patch, Printed
from tests.support.guards import with_receipt
from tests.support.healings import noted
from tests.support.identity import identity_of
from tests.support.processes import WITHOUT_TORCH

NEW = 6
HEADER = "<|im_start|>assistant\n"


def turn(question: str) -> str:
    """The tiny models' template, by hand."""
    return f"<|im_start|>user\n{question}<|im_end|>\n{HEADER}"


def says(*turns: tuple[LanguageModel, str], before: str = "", most: int = NEW) -> list[str]:
    """What mlx-lm answers to each turn when the model reads all that was said from the start."""
    ids: list[int] = []
    answers = []
    for model, question in turns:
        text = turn(question)
        if ids:
            ended = ids[-1] in model.tokenizer.eos_token_ids
            text = ("\n" if ended else "<|im_end|>\n") + text
        ids = ids + model.tokenizer.encode(before + text, add_special_tokens=False)
        responses = list(mlx_stream_generate(model.model, model.tokenizer, ids, max_tokens=most))
        answers.append("".join(response.text for response in responses))
        ids, before = ids + [int(response.token) for response in responses], ""
    return answers


@pytest.fixture(autouse=True)
def keyboard() -> Iterator[None]:
    """Ctrl-C as in a terminal, even where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass
class Chats:
    """Runs chats; what the last one printed."""

    models: list[str]
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""

    def __call__(self, *lines: str, options: tuple[str, ...] = (), status: int = 0) -> str:
        """Standard output of a chat in which these lines are typed into a pipe."""
        self.capsys.readouterr()
        self.monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        kept = () if "--resume" in options else ("-c", "verbatim=true")
        arguments = ["chat", *self.models, "--max-tokens", str(NEW), *kept, *options]
        assert run(arguments) == status
        self.out, self.err = self.capsys.readouterr()
        return self.out


@pytest.fixture
def one(models: Models) -> LanguageModel:
    """The model that answers under both names in ``chats``."""
    return models["dense"]


@pytest.fixture
def chats(
    one: LanguageModel, folders: Folders, store: Path, monkeypatch: Patch, capsys: Printed
) -> Chats:
    """Chats with "a" and "b", one model twice, and a translator in the store that adds nothing."""
    identity_of(one).save(store / "same")
    named = [f"--model={name}={folders['dense']}" for name in "ab"]
    return Chats(named, monkeypatch, capsys)


@pytest.fixture
def two(folders: Folders, monkeypatch: Patch, capsys: Printed) -> Chats:
    """Chats with two models that differ, and no translator."""
    named = ["--model", f"small={folders['dense']}", "--model", f"large={folders['moe']}"]
    return Chats(named, monkeypatch, capsys)


@pytest.mark.parametrize("heal", ["idle", "interleaved", "layers"])
def test_a_model_reads_behind_its_translation(chats: Chats, heal: str, monkeypatch: Patch) -> None:
    """Between two lines, or between the tokens of an answer; the answers are there all the same."""
    read = noted(monkeypatch)
    lines = ("the use of an other " * 6, "/use b", "and you", "hi")
    plain = chats(*lines, options=("-c", "eager=false"))
    assert read == []
    healed = ("-c", f"heal={heal}", "-c", "eager=false")
    assert chats(*lines, options=healed) == plain  # one model twice
    assert chats.err == "" and read


def test_a_guard_looks_at_every_switch(chats: Chats, one: LanguageModel, store: Path) -> None:
    """An identity is not doubted; one that was made on short prompts is."""
    lines = ("the use of an other " * 12, "/use b", "and you", "/stats")
    chats(*lines, options=("-c", "guard=32"), status=2)
    assert "`kvlingo-mlx verify TRANSLATOR" in chats.err  # its receipt does not say what is usual
    identity = with_receipt(identity_of(one))
    identity.save(store / "same", overwrite=True)
    plain = chats(*lines[:-1])
    out = chats(*lines, options=("-c", "guard=32"))
    assert chats.err == "" and out.startswith(plain) and "nothing unusual: the models are" in out
    with_receipt(identity, longest_prefix=10).save(store / "same", overwrite=True)
    for doubt, warned in (("warn", True), ("heal", False), ("reread", False)):
        out = chats(*lines, options=("-c", "guard=32", "-c", f"on_doubt={doubt}"))
        assert out.startswith(plain) and "tested on prefixes of at most 10" in out
        assert ("is in doubt" in chats.err) == warned
        rows = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
        assert ("tokens translated" in rows) and (rows["tokens translated"].strip() == "0") == (
            doubt == "reread"
        )


def test_what_cannot_be_healed_is_told(chats: Chats, monkeypatch: Patch) -> None:
    chats("hi", options=("-c", "heal=later"), status=2)
    assert "heal is 'later'; give idle, interleaved or layers" in chats.err

    def fails(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(healing, "reread", fails)
    out = chats("one", "/use b", "two", "three", options=("-c", "heal=idle", "-c", "eager=false"))
    assert chats.err.count("healing has ended (out of memory)") == 1 and out.strip()


@pytest.mark.parametrize("eager", ["true", "false"])
def test_every_model_goes_on_where_the_other_ended(
    chats: Chats, one: LanguageModel, eager: str
) -> None:
    questions = ("hi there", "is it on?", "and you")
    out = chats(
        questions[0], "/use b", "", questions[1], "  ", "/use a", f"  {questions[2]}",
        options=("-c", f"eager={eager}"),
    )  # fmt: skip
    expected = says(*((one, question) for question in questions))
    assert out == "".join(f"{answer}\n" for answer in expected)
    assert chats.err == "" and len(set(expected)) == 3


def test_the_model_that_is_asked_answers(two: Chats, models: Models) -> None:
    out = two(
        "hi there", "/use small", "and you",
        options=("--use", "large", "-c", "on_missing=reprefill", "--system-prompt", "be brief"),
    )  # fmt: skip
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    turns = (models["moe"], "hi there"), (models["dense"], "and you")
    assert out == "".join(f"{answer}\n" for answer in says(*turns, before=system))


def test_undo(chats: Chats, one: LanguageModel) -> None:
    out = chats("hi there", "and you", "/undo", "is it on?", "/undo", "/undo", "/undo", "and you")
    first, second = says((one, "hi there"), (one, "and you"))
    other = says((one, "hi there"), (one, "is it on?"))[1]
    took = "took back the last message and its answer"
    fresh = says((one, "and you"))[0]
    assert out.splitlines() == "\n".join(
        [first, second, took, other, took, took, fresh]
    ).splitlines()  # fmt: skip
    assert chats.err == "error: there is nothing to undo: nobody has answered yet\n"


def test_a_reply_that_fails_leaves_the_conversation(two: Chats, models: Models) -> None:
    out = two("hi there", "/use large", "is it on?", "/use small", "x" * 600, "a\udcff", "and you")
    expected = says((models["dense"], "hi there"), (models["dense"], "and you"))
    assert out == "".join(f"{answer}\n" for answer in expected)
    warning, *errors = two.err.splitlines()
    assert "there is no translator from small to large" in warning
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)
    assert "no translator from small" in errors[0] and "-c on_missing=reprefill" in errors[0]
    assert "the context of" in errors[1] and "not valid Unicode" in errors[2]


def test_a_route_chooses_until_the_user_does(
    chats: Chats, one: LanguageModel, tmp_path: Path
) -> None:
    route = tmp_path / "route.toml"
    route.write_text('default = "a"\n[[rule]]\nuse = "b"\npattern = "ON"\n')
    questions = ("hi there", "is it on?", "is it on?", "so on")
    out = chats(
        *questions[:2], "/use a", questions[2], "/use auto", questions[3],
        options=("--route", str(route)),
    )  # fmt: skip
    w, x, y, z = says(*((one, question) for question in questions))
    assert out == f"[a]\n{w}\n[b]\n{x}\n{y}\n[b]\n{z}\n"
    route.write_text('default = "c"')
    chats(options=("--route", str(route)), status=2)
    assert "default is 'c'; give one of a, b" in chats.err


def test_bad_commands_cost_a_line(chats: Chats, one: LanguageModel) -> None:
    lines = ("/frobnicate", "/use", "/use c", "/use auto", "/undo 3", "/save", "/", "hi there")
    assert chats(*lines) == says((one, "hi there"))[0] + "\n"
    *found, last = chats.err.splitlines()
    for (word, *more), line in zip(map(str.split, lines), found, strict=False):
        assert line.startswith("error: ") and word in line and all(repr(m) in line for m in more)
    assert len(found) == 6 and last.startswith("error: there is no /; there are")
    assert all("give one of a, b" in line for line in found[1:4])


def test_help_and_exit(chats: Chats) -> None:
    out = chats("/help", "/exit", "hi there")
    words = [line.split()[0] for line in out.splitlines()]
    assert words == ["/use", "/use", "/undo", "/save", "/stats", "/help", "/exit", "(paste)"]
    assert chats() == ""


def test_save(chats: Chats, one: LanguageModel, tmp_path: Path, monkeypatch: Patch) -> None:
    """Where the last one was, if no folder is named; at the end, too; no empty one."""
    here, there = tmp_path / "here", tmp_path / "x" / "there"
    out = chats("hi there", f"/save {here}", "/save", options=("--save", str(there)))
    answer = says((one, "hi there"))[0]
    assert out == f"{answer}\nsaved to {here}\nsaved to {there}\nsaved to {there}\n"
    assert all((folder / "conversation.json").exists() for folder in (here, there))
    chats(options=("--save", str(tmp_path / "unsaid")))
    assert not (tmp_path / "unsaid").exists()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Conversation, "save", full)
    chats("hi there", "/save full", "/save")
    assert chats.err.count("error: ") == 2
    chats("hi there", options=("--save", str(here)), status=2)
    assert chats.err == "error: no space left\n"


def test_stats(chats: Chats, monkeypatch: Patch) -> None:
    """A table, and what reading all anew takes: measured once a switch, unless Ctrl-C skips it."""
    lines = (LineStats("a", 12, 7, 5, 3_000_000, 40_000, "8bit"),
             LineStats("b", 0, 0, 0, 0, 0, "empty"))  # fmt: skip
    planted = Stats(lines, 11_000_000, 2_500_000, 1_234_567_890, 13_000_000)
    measured: list[str] = []

    def measure(talk: Conversation) -> float:
        measured.append(talk.messages[0]["content"])
        if measured[-1] == "slow":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
            raise AssertionError("Ctrl-C was not heard")
        return 0.5

    monkeypatch.setattr(Conversation, "stats", lambda talk: planted)
    monkeypatch.setattr(Conversation, "measure_reprefill", measure)
    cells = [re.findall(r"[^\s\u2502\u2503]+", row) for row in chats("/stats").splitlines()]
    assert ["a", "12", "7", "5", "3.00", "0.04", "8bit"] in cells
    assert ["b", "0", "0", "0", "0.00", "0.00", "empty"] in cells
    assert ["models", "(MB)", "11.00"] in cells and ["total", "(MB)", "1,234.57"] in cells
    assert ["translators", "(MB)", "2.50"] in cells and cells[-1][:3] == ["no", "model", "has"]
    out = chats("hi there", "/use b", "and you", "/stats", "/stats", "hi there", "/stats")
    assert len(measured) == 2  # once for each of two switches
    assert re.search(r"reading \d+ tokens anew with b to compare; Ctrl-C skips", out)
    assert re.search(r"last switch +to b\n", out) and re.search(r"reading all anew .* 500\n", out)
    assert out.count("Not measured on Apple hardware") == (0 if is_apple() else 3)
    out = chats("slow", "/stats", "/stats", "and you")
    assert len(measured) == 4
    assert len(re.findall(r"reading all anew .* not measured\n", out)) == 2


def test_bad_input(chats: Chats, monkeypatch: Patch, store: Path) -> None:
    bad = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8")
    for given, message in ((None, "is closed"), (bad, "standard input is not UTF-8 text")):
        monkeypatch.setattr("sys.stdin", given)
        assert run(["chat", *chats.models]) == 2
        assert message in chats.capsys.readouterr().err
    assert not (store.parent / "chat_history").exists()


class Interrupted(Conversation):
    """Has Ctrl-C pressed before the ``moment``-th token of the first answer that is asked for."""

    moment = 0
    talks: list[Interrupted]

    def stream_reply(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        responses = super().stream_reply(*arguments, **options)
        with contextlib.closing(responses):  # type: ignore[type-var]
            for number, response in enumerate(responses):
                if number == self.moment and not self.messages and self not in self.talks:
                    self.talks.append(self)
                    os.kill(os.getpid(), signal.SIGINT)
                yield response


@pytest.mark.parametrize("moment", [0, 1])
def test_ctrl_c(chats: Chats, one: LanguageModel, moment: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Interrupted, "moment", moment)
    monkeypatch.setattr(Interrupted, "talks", [], raising=False)
    monkeypatch.setattr(kvlingo_mlx.engine.conversation, "Conversation", Interrupted)
    before = signal.getsignal(signal.SIGINT)
    out = chats("hi there", "and you")
    assert signal.getsignal(signal.SIGINT) is before and chats.err == ""
    (talk,) = Interrupted.talks
    if moment == 0:
        second = says((one, "and you"))[0]
        assert out == f"stopped; nothing was kept\n{second}\n"
        assert [m["content"] for m in talk.messages] == ["and you", second]
        return
    ids = one.tokenizer.encode(turn("hi there"), add_special_tokens=False)
    responses = list(mlx_stream_generate(one.model, one.tokenizer, ids, max_tokens=moment + 2))
    kept = "".join(response.text for response in responses[: moment + 1])
    assert out.startswith(f"{kept}\nstopped; what was written is kept\n")
    assert talk.messages[1]["content"].startswith(kept)  # and what a cut character has so far
    # What follows is what mlx-lm says after exactly these tokens.
    ids += [int(response.token) for response in responses[: moment + 1]]
    ids += one.tokenizer.encode(f"<|im_end|>\n{turn('and you')}", add_special_tokens=False)
    after = mlx_stream_generate(one.model, one.tokenizer, ids, max_tokens=NEW)
    assert talk.messages[3]["content"] == "".join(response.text for response in after)


# In a session of its own, whose terminal turns control-C into a signal; answers take their time.
LAUNCH = """
import fcntl, json, os, pathlib, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if os.environ["TERM"] == "no readline":
    sys.modules["readline"] = None
import kvlingo_mlx.engine.conversation as conversation

class Slow(conversation.Conversation):
    def stream_reply(self, *arguments, **options):
        for response in (replies := super().stream_reply(*arguments, **options)):
            try:
                yield response
            except GeneratorExit:
                replies.close()
                facts = {"messages": self.messages, "tokens": self.transcript.tokens}
                pathlib.Path(sys.argv[1]).write_text(json.dumps(facts))
                raise
            time.sleep(0.03)

conversation.Conversation = Slow
from kvlingo_mlx.cli import run
sys.exit(run(sys.argv[2:]))
"""


class Terminal:
    """A child process on a terminal, and all that it wrote there."""

    def __init__(self, arguments: list[str], term: str) -> None:
        self.end, slave = pty.openpty()
        environment = {**os.environ, "TERM": term, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH + LAUNCH, *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment,
        )  # fmt: skip
        os.close(slave)
        self.text = ""
        self._seen = 0

    def wait_for(self, text: str, seconds: float = 600) -> str:
        """What it writes up to and with ``text``; the limit is for a child that hangs."""
        until = time.monotonic() + seconds
        while text not in self.text[self._seen :]:
            assert time.monotonic() < until, f"no {text!r} in {self.text!r}"
            if select.select([self.end], [], [], 0.1)[0]:
                data = os.read(self.end, 4096).decode(errors="replace")
                self.text += data.replace("\r\n", "\n")
        start = self._seen
        self._seen = self.text.index(text, start) + len(text)
        return self.text[start : self._seen]

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def settle(self) -> None:
        """Until it waits for a key.

        Python's readline misses a signal between its prompt and its first look at the keys: it is
        seen at the next one.
        """
        status, calm = Path(f"/proc/{self.process.pid}/stat"), 0
        while calm < 10:
            asleep = not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "S"
            calm = calm + 1 if asleep else 0
            time.sleep(0.1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.fixture
def terminals(chats: Chats, tmp_path: Path) -> Iterator[Any]:
    """Starts chats in terminals; an answer that is cut short leaves its facts in ``facts``."""
    opened: list[Terminal] = []

    def start(*options: str, term: str = "dumb") -> Terminal:
        begin = [] if "--resume" in options else ["-c", "verbatim=true"]
        arguments = [str(tmp_path / "facts"), "chat", *chats.models, *begin, *options]
        opened.append(Terminal(arguments, term))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_a_chat_in_a_terminal(
    terminals: Any, one: LanguageModel, store: Path, tmp_path: Path
) -> None:
    readline = pytest.importorskip("readline")
    question, history = "is it on?", store.parent / "chat_history"
    readline.clear_history()
    readline.add_history(question)
    readline.write_history_file(history)
    history.chmod(0o644)
    ids = one.tokenizer.encode(turn(question), add_special_tokens=False)
    responses = list(mlx_stream_generate(one.model, one.tokenizer, ids, max_tokens=200))
    assert len(responses) > 50

    terminal = terminals("--max-tokens", "200")
    terminal.wait_for("a> ")
    terminal.type("\x10\n")  # control-P: what an earlier chat was told
    terminal.wait_for(f"{question}\n")
    terminal.wait_for(responses[2].text or responses[3].text)  # streamed, long before the end
    terminal.type("\x03")
    terminal.wait_for("stopped; what was written is kept\n")
    facts = json.loads((tmp_path / "facts").read_text())
    length = len(facts["tokens"]) - len(ids)
    assert 0 < length < len(responses)
    assert facts["tokens"] == ids + [int(r.token) for r in responses[:length]]
    kept = one.tokenizer.decode(facts["tokens"][len(ids) :])
    assert facts["messages"][1] == {"role": "assistant", "content": kept}

    terminal.wait_for("a> ")
    # It takes two in a row to leave.
    for typed in ("/use b\n", "\x03", "/help\n", "\x03"):
        if typed == "\x03":
            terminal.settle()
        terminal.type(typed)
        terminal.wait_for("another Ctrl-C\nb> " if typed == "\x03" else "b> ")
    terminal.settle()
    terminal.type("\x03")
    assert terminal.process.wait(600) == 130
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    readline.clear_history()
    readline.read_history_file(history)
    kept_lines = [readline.get_history_item(i + 1) for i in range(9)]
    assert kept_lines == [question, "/use b", "/help", *[None] * 6]


PASTED = ("is it on?", "", "/use b", "and you")
MARKED = "\x1b[200~{}\x1b[201~\n"  # as terminals send a paste, if they are asked to


def said(record: Path) -> list[str]:
    """What the user said in the chat that left this record, and each time the answer."""
    (line,) = record.read_text().splitlines()
    return [message["content"] for message in json.loads(line)["results"]["messages"]]


@pytest.mark.parametrize(
    ("term", "sent"),
    [
        ("xterm", MARKED.format("\r".join(PASTED))),
        ("dumb", "\n".join(PASTED) + "\n"),
        ("no readline", MARKED.format("\n".join(PASTED))),
    ],
    ids=["marked", "no marks known", "no readline, marked"],
)
def test_a_paste_is_one_message(
    terminals: Any, one: LanguageModel, store: Path, tmp_path: Path, term: str, sent: str
) -> None:
    record = tmp_path / "record.jsonl"
    options = "--max-tokens", str(NEW), "--json", str(record)
    terminal = terminals(*options, term=term)
    terminal.wait_for("a> ")
    terminal.type(sent)
    answers = says((one, "\n".join(PASTED)), (one, "hi there"))
    terminal.wait_for(answers[0])
    terminal.wait_for("a> ")  # nobody was asked to /use b
    terminal.type("hi there\n")
    terminal.wait_for(answers[1])
    terminal.wait_for("a> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    assert said(record) == ["\n".join(PASTED), answers[0], "hi there", answers[1]]
    history = store.parent / "chat_history"
    if term == "no readline":
        assert not history.exists()
    else:
        assert [line for line in history.read_text().splitlines() if line[0] != "_"] == ["hi there"]
        assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_pasted_commands_are_commands_and_a_switch_is_told(terminals: Any, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    terminal = terminals("--max-tokens", str(NEW), "--json", str(record))
    terminal.wait_for("a> ")
    for message, name in (("is it on?", "a"), ("and you", "b")):
        terminal.type(f"{message}\n")
        if name == "b":
            told = terminal.wait_for(" of them before you asked), ")
            assert "[b took over in " in told and " translated (" in told
        terminal.wait_for(f"{name}> ")
        terminal.type("/use b\n")
        terminal.wait_for("b> ")
    terminal.type("/undo\n\n/undo\n/use a\n")
    terminal.wait_for("a> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    assert said(record) == []


def test_lines_typed_during_an_answer_are_sent_alone(
    terminals: Any, one: LanguageModel, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    terminal = terminals("--max-tokens", "40", "--json", str(record))
    terminal.wait_for("a> ")
    first, second = says((one, "is it on?"), (one, "and you"), most=40)
    terminal.type("is it on?\n")
    terminal.wait_for(first[:3])
    terminal.type("/use b\nand you\n")
    terminal.wait_for("b> ")
    terminal.wait_for(second)
    terminal.wait_for("b> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    assert said(record) == ["is it on?", first, "and you", second]


def test_no_history(terminals: Any, one: LanguageModel, store: Path) -> None:
    history = store.parent / "chat_history"
    history.write_text("and you\n")
    history.chmod(0o640)
    terminal = terminals("--max-tokens", str(NEW), "-c", "history=false")
    terminal.wait_for("a> ")
    terminal.type("is it on?\n")
    terminal.wait_for(says((one, "is it on?"))[0])
    terminal.wait_for("a> ")
    terminal.type("\x10\x10\n")  # control-P: this chat's own line alone is there
    terminal.wait_for(says((one, "is it on?"), (one, "is it on?"))[1])
    terminal.wait_for("a> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    assert history.read_text() == "and you\n" and stat.S_IMODE(history.stat().st_mode) == 0o640


def test_a_resumed_chat_shows_what_was_said_last(
    chats: Chats, terminals: Any, one: LanguageModel, tmp_path: Path
) -> None:
    folder, long = str(tmp_path / "talk"), "so on " * 50 + "END"
    asked = ("hi there", long, "is it \x1b[31mon?")
    chats(*asked, options=("--save", folder, "--system-prompt", "x", "-c", "verbatim=true"))
    chats("/exit", options=("--resume", folder))
    assert chats.out == ""  # from a pipe: the answers alone
    talk = Conversation.resume(folder, {name: one for name in "ab"})
    answers = ["".join(c if c.isprintable() or c == "\n" else "?" for c in m["content"])
               for m in talk.messages if m["role"] == "assistant"]  # fmt: skip
    terminal = terminals("--resume", folder)
    shown = terminal.wait_for("a> ")
    assert shown == (
        f"user: {long[:300]} ...\nassistant: {answers[1]}\n"
        f"user: is it ?[31mon?\nassistant: {answers[2]}\n/help lists the commands\na> "
    )


def test_a_chat_leaves_its_record(chats: Chats, one: LanguageModel, tmp_path: Path) -> None:
    out = chats("hi there", "/use b", "and you", options=("--json", "-"))
    answers = says((one, "hi there"), (one, "and you"))
    record = json.loads(out)  # the answers themselves are on standard error
    assert chats.err == "".join(f"{answer}\n" for answer in answers)
    found = record["results"]
    assert [m["content"] for m in found["messages"]] == ["hi there", answers[0], "and you",
                                                         answers[1]]  # fmt: skip
    assert record["kind"] == "chat" and found["last_switch"]["name"] == "b"
    assert [line["name"] for line in found["stats"]["lines"]] == ["a", "b"]
    assert all(type(line["tokens"]) is int for line in found["stats"]["lines"])
    chats("hi there", options=("--json", str(tmp_path / "no" / "file")), status=2)
    assert "--json is" in chats.err and chats.out == ""


def test_a_chat_is_resumed_with_the_settings_that_it_began_with(
    chats: Chats, tmp_path: Path
) -> None:
    folder = str(tmp_path / "talk")
    own = ("--no-thinking", "--system-prompt", "be kind", "-c", "verbatim=true")
    chats("hi there", options=("--save", folder, *own))
    assert chats("and you", options=("--resume", folder)).strip()
    for options in (own[:1], own[1:3], own[3:]):
        chats("and you", options=("--resume", folder, *options), status=2)
        assert chats.out == "" and chats.err.count("\n") == 1
        assert f"no effect with --resume {folder}, which goes on with those" in chats.err


def test_a_saved_chat_goes_on(chats: Chats, one: LanguageModel, tmp_path: Path) -> None:
    """Saved by one chat, resumed by the next, which may put lines away otherwise."""
    folder = str(tmp_path / "talk")
    said = (one, "hi there"), (one, "is it on?"), (one, "and you")
    answers = says(*said)
    out = chats("hi there", "/use b", "is it on?", options=("--save", folder, "-c", "offload=disk"))
    assert out == f"{answers[0]}\n{answers[1]}\nsaved to {folder}\n"
    out = chats("and you", "/stats", options=("--resume", folder))
    assert out.startswith(f"{answers[2]}\n")
    cells = [re.findall(r"[^\s\u2502\u2503]+", row) for row in out.splitlines()]
    tokens = {row[0]: row[1] for row in cells if row and row[0] in ("a", "b")}
    assert len(set(tokens.values())) == 1 and set(tokens) == {"a", "b"}
    (kept,) = (row[-1] for row in cells if row[:2] == ["tokens", "kept"])
    assert 0 < int(kept) < int(tokens["a"])  # what was saved was not read again
    (anew,) = (row[-1] for row in cells if row[:3] == ["reading", "all", "anew"])
    assert float(anew) > 0
    out = chats("hi", "/stats", options=("--resume", folder, "-c", "offload=8bit"))
    assert re.search(r"^\W*b\W.*8bit", out, re.M)


def test_too_little_memory_leaves_the_chat_as_it_was(
    chats: Chats, one: LanguageModel, monkeypatch: Patch
) -> None:
    real, left = Conversation.stream_reply, [RuntimeError("[malloc] Unable to allocate 9 bytes."),
                                             MemoryError(), RuntimeError("a slip")]  # fmt: skip

    def stream_reply(*arguments: Any, **options: Any) -> Any:
        if left and arguments[2] == "and you":
            raise left.pop(0)
        return real(*arguments, **options)

    monkeypatch.setattr(Conversation, "stream_reply", stream_reply)
    out = chats("hi there", "and you", "and you", "is it on?")
    answers = says((one, "hi there"), (one, "is it on?"))
    assert out == f"{answers[0]}\n{answers[1]}\n"
    assert chats.err.count("error: there is not enough memory for this answer") == 2
    assert chats.err.count("-c offload=disk") == 2
    with pytest.raises(RuntimeError, match="a slip"):
        chats("and you")
