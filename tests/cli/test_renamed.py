"""Two models are named alike in every verb, and what went to the laboratory says where."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.backend import mx  # noqa: F401  (before mlx, always)

import pytest
from typer.core import TyperCommand

from kvlingo_mlx.cli import MOVED, VERBS, command_line, run
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
