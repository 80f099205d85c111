"""The first things that a user types: an answer, or a line that says what to type."""

from __future__ import annotations

import io
import json
import shlex
import warnings
from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import EXAMPLE, TRANSLATORS, zoo_pairs
from kvlingo_mlx.loading import notes
from tests.support import ROOT
from tests.support.command_line import fails

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The home of Ben is Oslo.\u2028The hotel of Emma is Lima."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the home of Ben?"},
]


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told once a process is told in each test."""
    monkeypatch.setattr(notes, "_told", set())


@pytest.mark.parametrize("pair", zoo_pairs(), ids="--".join)
def test_the_question_that_is_suggested_for_the_embedded_models_is_answered(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "generate",
        "--prefill-model",
        pair[0],
        "--decode-model",
        pair[1],
        "-c",
        "verbose=false",
    ]
    assert run([*given, "--prompt", "What is the capital of France?"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {pair[1]} can only repeat facts that the prompt states; try ")
    asked = line.split("; try ")[1].strip("'")
    assert run([*given, "--prompt", asked]) == 0
    assert capsys.readouterr() == ("The hotel of Emma is Lima.\n", "")
    message = {"role": "user", "content": asked}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kv.generate(*pair, [message]) == "The hotel of Emma is Lima."
    assert run([*given, "--prompt", asked, "--thinking", "--json", "-"]) == 0
    entry = json.loads(capsys.readouterr().out)
    header = 4  # <think>, a newline of two, </think>, a newline of two: what thinking leaves out
    assert run([*given, "--prompt", asked, "--json", "-"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["results"]["prompt_tokens"] == entry["results"]["prompt_tokens"] + header


def test_the_first_command_of_the_readme_is_answered_without_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = (ROOT / "README.md").read_text().split("## Use it")[1].split("```bash\n")[1]
    command = shlex.split(block.split("```")[0].replace("\\\n", " "))
    assert command[:2] == ["kvlingo-mlx", "generate"]
    assert run(command[1:]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("The hotel of Emma is Lima.\n") and captured.err == ""


def test_an_answer_ends_before_each_stop_text(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l", "-c", "verbose=false"]
    given = ["generate", *pair, "--prompt", EXAMPLE]
    assert run([*given, "--stop", "Oslo", "--stop", " of Emma"]) == 0
    assert capsys.readouterr() == ("The hotel\n", "")
    assert run([*given, "--stop", "The hotel"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n" and "at the stop text 'The hotel'" in captured.err
    fails([*given, "--stop", ""], "--stop is ['']; give a text", capsys)


def test_what_import_suggests_works(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import", str(TRANSLATORS / "tiny-qwen3-s--tiny-qwen3-l")]) == 0
    command = capsys.readouterr().out.split("try: kvlingo-mlx ")[1]
    assert run([*shlex.split(command), "-c", "verbose=false"]) == 0
    assert capsys.readouterr() == ("The hotel of Emma is Lima.\n", "")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CHAT),
        json.dumps({"messages": CHAT}, indent=1),
        "\n".join(json.dumps(message, ensure_ascii=False) for message in CHAT) + "\n\n",
    ],
    ids=["JSON", "a record", "JSONL"],
)
def test_messages_from_a_file(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "messages"
    file.write_text(text, encoding="utf-8")
    given = ["generate", "--prefill-model", "tiny-qwen3-s", "--decode-model", "tiny-qwen3-l",
             "--no-thinking", "--json", "-", "-c", "verbose=false"]  # fmt: skip
    # By hand, as the template writes it.
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    model = kv.load("tiny-qwen3-l")
    ids = model.tokenizer.encode(
        f"{whole}<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False
    )
    expected = kv.generate("tiny-qwen3-s", model, ids, max_tokens=100)
    assert run([*given, "--messages", str(file)]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["config"]["prompt"] == CHAT
    assert entry["results"]["text"] == expected == "The home of Ben is Oslo."
    assert entry["results"]["prompt_tokens"] == len(ids)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run([*given, "--messages", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["text"] == expected
