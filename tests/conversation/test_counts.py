"""Where a prompt's tokens came from: disjoint counts, against a tape of all that lines did."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.models.language_model import LanguageModel

SEEDS = int(os.environ.get("KVLINGO_EXAMPLES", "3"))  # more of them by hand
NAMES = ("tiny-qwen3-s", "tiny-qwen3-l", "tiny-qwen3-moe")
MESSAGES = (
    "Anna lives in Rome.",
    "Where does Anna live?",
    "Oscar has two cats, Emma a dog.",
    "So?",
)


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    return {name: kv.load(zoo(name)) for name in NAMES}


class Tape:
    """What happened at each position of each line: translated, read, or counted by an answer."""

    def __init__(self) -> None:
        self.of: dict[int, list[str]] = {}
        self.origins: dict[int, list[str]] = {}

    def put(self, line: Line, what: str, origin: str, number: int) -> None:
        tape, origins = self._both(line, len(line) - number)
        tape += [what] * number
        origins += [origin] * number

    def _both(self, line: Line, length: int) -> tuple[list[str], list[str]]:
        """The tapes of a line, cut or filled to ``length``; decoded tokens are its own."""
        both = self.of.setdefault(id(line), []), self.origins.setdefault(id(line), [])
        for tape in both:
            del tape[length:]
            tape += ["own"] * (length - len(tape))
        return both

    def own_what_was_read(self) -> None:
        """What a model read for an earlier answer, perhaps another's, it holds from before."""
        for tape in self.of.values():
            tape[:] = ["own" if what == "read" else what for what in tape]

    def answered(self, line: Line) -> tuple[Counter[str], set[str]]:
        """The tally of a line that was brought up to date for an answer, then all is counted."""
        tape, origins = self._both(line, len(line))
        tally = Counter(tape)
        used = {o for what, o in zip(tape, origins, strict=True) if what == "translated"}
        tape[:] = ["counted"] * len(tape)
        return tally, used


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    found = Tape()
    take_over, read, cut, clear, copy = (
        getattr(Line, n) for n in ("take_over", "read", "_cut", "clear", "copy")
    )

    def taking(line: Line, tokens: Any, source: Line, *more: Any, **o: Any) -> Any:
        begun = len(line)
        yield from take_over(line, tokens, source, *more, **o)
        found.put(line, "translated", source.name, len(tokens) - begun)

    def reading(line: Line, tokens: Any, *more: Any) -> Iterator[None]:
        yield from read(line, tokens, *more)
        found.put(line, "read", "own", len(tokens))

    def cutting(line: Line, length: int) -> None:
        cut(line, length)
        found._both(line, length)

    def clearing(line: Line) -> None:
        clear(line)
        found._both(line, 0)

    def copying(line: Line) -> Line:
        made = copy(line)
        for tapes in (found.of, found.origins):
            tapes[id(made)] = list(tapes.get(id(line), []))
        return made

    for name, method in (
        ("take_over", taking), ("read", reading), ("_cut", cutting), ("clear", clearing),
        ("copy", copying),
    ):  # fmt: skip
        monkeypatch.setattr(Line, name, method)
    return found


def answer(talk: Conversation, tape: Tape, name: str, **asked: Any) -> Counter[str]:
    """One answer; its first response and the switch are held to the tape."""
    tape.own_what_was_read()
    steps = talk.stream_reply(name, max_tokens=5, **asked)
    first, line = next(steps), talk.lines[name]
    tally, used = tape.answered(line)
    rest = list(steps)
    for each in (first, *rest):
        assert each.cached_tokens + each.translated_tokens + each.read_tokens == each.prompt_tokens
        assert (each.translated_tokens, each.read_tokens) == (
            tally["translated"],
            tally["read"] + 1,
        )
    switch = talk.last_switch
    assert switch is not None
    assert (switch.kept, switch.translated, switch.read + 1, switch.ahead) == (
        first.cached_tokens, first.translated_tokens, first.read_tokens, first.ahead_tokens,
    )  # fmt: skip
    folders = {str(TRANSLATORS / f"{source}--{name}") for source in used}
    assert set((first.translator or "").split(", ")) - {""} == folders
    return tally


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_counts_are_disjoint_and_whole(
    models: dict[str, LanguageModel], tape: Tape, seed: int, eager: bool, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    names = NAMES[: 2 + seed % 2]
    chosen = {name: models[name] for name in names}
    switches = {"enable_thinking": rng.choice([None, False]), "verbatim": rng.random() < 0.5}
    talk = Conversation(chosen, eager=eager, **switches)
    total: Counter[str] = Counter()
    for step in range(14):
        action = rng.choice(["say"] * 6 + ["undo", "edit", "branch", "resume", "prefill"])
        asked: dict[str, Any] = {"message": f"{step}. {rng.choice(MESSAGES)}"}
        if action == "undo" and talk.messages:
            talk.undo()
        elif action == "edit" and talk.messages:
            asked = {"messages": [*talk.messages[:-2], {"role": "user", "content": "Who?"}]}
        elif action == "branch":
            talk = talk.branch()
        elif action == "resume" and talk.messages:
            given = {"eager": eager}
            saved = {name: talk.lines[name] for name in names}
            talk = Conversation.resume(talk.save(tmp_path / str(step)), chosen, **given)
            for name, line in talk.lines.items():  # what was not counted yet is not lost
                for tapes in (tape.of, tape.origins):
                    tapes[id(line)] = list(tapes.get(id(saved[name]), []))
        elif action == "prefill":
            asked["prefill"] = rng.choice(names)
        total += answer(talk, tape, rng.choice(names), **asked)
    assert total["translated"] and total["read"] and total["counted"], "or nothing was shown"
