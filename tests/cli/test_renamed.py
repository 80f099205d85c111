"""Two models are named alike in every verb, and what was called otherwise once still works."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx  # noqa: F401  (before mlx, always)

import pytest
from typer.core import TyperCommand

import kvlingo_mlx as kv
from kvlingo_mlx import errors
from kvlingo_mlx.cli import MOVED, OLD_VERBS, VERBS, command_line, run
from kvlingo_mlx.cli.needs import OLD_OPTIONS
from kvlingo_mlx.engine import timings
from kvlingo_mlx.engine.timings import Timings
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.command_line import COMMANDS as PAPERS
from tests.support.command_line import PAPER

OF_ONE_OR_NONE = {"demo", "remove", "publish", "show", "doctor", "serve",
                  "serve-prefill"}  # fmt: skip
OF_TWO = [verb for verb in VERBS if verb not in OF_ONE_OR_NONE]
NEEDED = {
    "fit": ["--data", "x", "--out", "y"], "train": ["--data", "x"], "import": ["t"],
    "verify": ["t"], "eval": ["t"], "export": ["t", "--to", "veloxquant", "--out", "y"],
}  # fmt: skip
COMMANDS = command_line.commands  # type: ignore[attr-defined]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Verbs end where they would begin; what they were asked."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(TyperCommand, "invoke", lambda self, ctx: asked.append(dict(ctx.params)))
    return asked


@pytest.mark.parametrize("verb", OF_TWO)
def test_source_and_target_in_every_verb(verb: str, begun: list[dict[str, Any]]) -> None:
    """By either spelling, and none that is made up."""
    needed = NEEDED.get(verb, [])
    for source in ("--source", "--prefill-model"):
        for target in ("--target", "--decode-model"):
            assert run([verb, *needed, source, "A", f"{target}=B"]) == 0
    assert len(begun) == 4 and all(asked == begun[0] for asked in begun)
    assert (begun[0]["source"], begun[0]["target"]) == ("A", "B")
    assert run([verb, *needed, "--from", "A", "--to", "B"]) == 2 and len(begun) == 4


def test_the_other_verbs_take_no_pair() -> None:
    """So the list above is whole."""
    for verb in OF_ONE_OR_NONE:
        assert not {"source", "target"} <= {p.name for p in COMMANDS[verb].params}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no model is given"),
        (["--source", "A", "--model", "a=B"], "--source has no effect"),
        (["--target", "B"], "--target has no effect without --source"),
    ],
)
def test_a_chat_names_its_models_one_way(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", *words]) == 2
    assert told in capsys.readouterr().err


# ---- old names of the command line -------------------------------------------------------------


def test_old_verbs(begun: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in OLD_VERBS.items():
        capsys.readouterr()
        assert run([new, "A", "B"]) == 0 and not capsys.readouterr().err
        assert run([old, "A", "B"]) == 0 and begun[-1] == begun[-2]
        assert capsys.readouterr().err == (
            f"warning: `kvlingo-mlx {old}` is now called `kvlingo-mlx {new}`; the old name works "
            "for one release\n"
        )
        assert run(["--help"]) == 0 and f" {old} " not in capsys.readouterr().out


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_what_the_papers_tables_alone_need_is_in_a_checkout(
    old: str, new: str, begun: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed of old is refused in a line that says what to type; its beginning is not."""
    verb, *rest = old.split()
    for typed in (rest, ["=".join(rest)] if len(rest) == 2 else rest):
        assert run([verb, "--source", "a", *typed, "x"]) == 2 and not begun
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"`{old}` is now `{new}` in a checkout" in error
    assert run(["bench", "--source", "a", "--target", "b"]) == 0 and len(begun) == 1
    module, command, *_ = [*new.split()[2:], "reproduce"]
    assert module == "benchmarks.paper" and f"{PAPER}{command}" in PAPERS


def test_old_options(begun: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in OLD_OPTIONS.items():
        capsys.readouterr()
        assert run(["bench", new]) == 0 and not capsys.readouterr().err
        assert run(["bench", old]) == 0 and begun[-1] == begun[-2]
        told = capsys.readouterr().err
        assert told.startswith(f"warning: {old} is now called {new}") and told.count("\n") == 1
        assert run(["bench", "--help"]) == 0 and old not in capsys.readouterr().out
    assert begun[-1]["save_timings"]


# ---- old names of Python -----------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), errors.OLD_NAMES.items())
def test_old_errors(old: str, new: str) -> None:
    for where in (kv, errors):
        with pytest.warns(kv.KVLingoWarning, match=f"{old} is now called {new}") as told:
            assert getattr(where, old) is getattr(kv, new)
        assert len(told) == 1 and told[0].filename == __file__
    assert old not in kv.__all__ and new in kv.__all__
    with pytest.raises(AttributeError):
        errors.NoSuchError  # noqa: B018


def test_strategy_of_a_conversation(models: dict[str, LanguageModel]) -> None:
    model = models["dense"]
    with pytest.warns(kv.KVLingoWarning, match="^strategy is now called switching;") as told:
        talk = kv.Conversation({"a": model, "b": model}, strategy="reprefill")
    assert len(told) == 1 and told[0].filename == __file__
    assert talk.exchange.rules.switching == "reprefill"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kv.Conversation({"a": model}).exchange.rules.switching == "alternated"
    with pytest.warns(kv.KVLingoWarning), pytest.raises(ValueError, match="switching is 'fast'"):
        kv.Conversation({"a": model, "b": model}, strategy="fast")
    with pytest.raises(TypeError, match="strategy and switching are one argument"):
        kv.Conversation({"a": model}, strategy="naive", switching="naive")


def test_timings_in_the_folder_of_before(store: Path) -> None:
    """They are read there; new ones go to the new folder, and count more."""
    key, names = {"source": "a"}, ("a", "b")
    written = timings.write(Timings(key, (8,), {way: (1.0,) for way in timings.WAYS}))
    assert written.parent == store.parent / "timings"
    before = store.parent / "profiles" / written.name
    before.parent.mkdir()
    shutil.move(written, before)
    assert timings.read(key, names).seconds["native"] == (1.0,)
    timings.write(Timings(key, (8,), {way: (2.0,) for way in timings.WAYS}))
    assert timings.read(key, names).seconds["native"] == (2.0,)
    assert before.exists()
