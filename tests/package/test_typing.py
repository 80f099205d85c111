"""What checkers and editors know of the package, seen through mypy."""

import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack, get_type_hints

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.engine import generation

ROOT = Path(kv.__file__).parents[1]
# What others bring takes mypy five times as long and tells nothing of our names.
CONFIG = """
[mypy]
ignore_missing_imports = True
follow_imports = skip
[mypy-kvlingo_mlx.*]
follow_imports = normal
ignore_errors = True
[mypy-mlx.*,numpy.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
PROGRAM = """
import kvlingo_mlx as kv

small, large = kv.load("a"), kv.load("b")
translator = kv.fit(small, large, [{"text": "x"}], nu=3)
reveal_type(translator.num_parameters)
reveal_type(kv.generate(small, large, "hi", translator=translator, enable_thinking=False))
talk = kv.Conversation({"s": small, "l": "b"}, [translator])
reveal_type(talk.reply("s", "hi", max_tokens=5))
reveal_type(kv.Conversation.resume("f", {"s": small}, eager=False))
for response in kv.stream_generate(small, large, [{"role": "user", "content": "hi"}], max_tokens=3):
    reveal_type(response.ttft_s)
"""
TYPES = ["int", "str", "str", "kvlingo_mlx.engine.conversation.Conversation", "float"]
WRONG = {
    'kv.generate("a", "b", "x", max_tokens="5")': "arg-type",
    'kv.generate("a", "b", "x", maxtokens=5)': "call-arg",
    'kv.generate("a", "b")': "call-arg",
    'kv.folded_generate("a", "b", "x", strategy="auto")': "call-arg",
    'talk.reply("s", "x", max_token=5)': "call-arg",
    'kv.Conversation.resume("f", {}, system="x")': "call-arg",
    "kv.genrate": "attr-defined",
    "kv.load(5)": "arg-type",
}


def told(tmp_path: Path, program: str) -> dict[int, str]:
    """What mypy says of each line of a program."""
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("program.py:"):
            number, text = line.split(":", 2)[1:]
            lines[int(number)] = lines.get(int(number), "") + text
    return lines


def test_a_program_is_checked(tmp_path: Path) -> None:
    names = list(kv.__all__)
    program = "\n".join([PROGRAM, *WRONG, *(f"reveal_type(kv.{name})" for name in names)])
    found = told(tmp_path, program)
    source = program.splitlines()
    by_line = {source[number - 1].strip(): text for number, text in found.items()}
    for line, code in WRONG.items():
        assert f"[{code}]" in by_line.pop(line), line
    for name in names:
        shown = by_line.pop(f"reveal_type(kv.{name})")
        assert 'type is "def (' in shown, f"kv.{name} is {shown}"  # a function or a class
    revealed = [text.split('type is "')[1].rstrip('"') for text in by_line.values()]
    assert [text.removeprefix("builtins.") for text in revealed] == TYPES  # and no error


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's keyword arguments and their types, those of a TypedDict among them."""
    hints = get_type_hints(function)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            found[name] = hints[name]
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hints[name]) is Unpack:
            found |= get_type_hints(typing.get_args(hints[name])[0])
    return found


@pytest.mark.parametrize(
    ("whole", "passes_to", "own"),
    [
        (kv.generate, kv.stream_generate, {"verbose"}),
        (kv.folded_generate, kv.folded_stream_generate, {"verbose"}),
        (kv.Conversation.reply, kv.Conversation.stream_reply, set()),
    ],
    ids=["generate", "folded_generate", "reply"],
)
def test_options_are_those_that_they_are_passed_to(
    whole: Callable[..., Any], passes_to: Callable[..., Any], own: set[str]
) -> None:
    given, taken = keywords(whole), keywords(passes_to)
    given = {name: kind for name, kind in given.items() if name not in own}
    if passes_to is kv.stream_generate:  # which takes mlx-lm's own by any name
        taken = dict.fromkeys(generation.DECODE_OPTIONS, int) | taken
    assert given == taken


def test_a_conversation_is_resumed_with_arguments_of_its_own() -> None:
    resumed, begun = keywords(kv.Conversation.resume), keywords(kv.Conversation.__init__)
    assert resumed and resumed.items() <= begun.items()
