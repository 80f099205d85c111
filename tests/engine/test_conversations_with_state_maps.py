"""Conversations whose translators map recurrent states: each line has that of its last token.

The models' convolutions read the present token alone. So the tail, which is not mapped, has no
effect, and through unit matrices every state must be that of a model that reads all by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import hybrid_models
from tests.support.identity import identity_of
from tests.support.native_caches import native
from tests.support.opened import cast
from tests.support.talks import CLOSE, NEW, expected

LONG = "the use of an other is it on? " * 2
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_5": {"num_hidden_layers": 4}, "nemotron_h": {}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder, name = tmp_path_factory.mktemp("hybrid") / "model", request.param
    found = kv.load(hybrid_models.write_hybrid_model(folder, name, **FAMILIES[name]))
    hybrid_models.forget_tails(found)
    return found


def talk_of(model: LanguageModel, **options: Any) -> Conversation:
    point = model.family.points[0]
    same = identity_of(model, capture=point, state_maps=True)
    options = {"prefill_step_size": 7, "verbatim": True} | options
    return Conversation(dict.fromkeys("ab", model), [same], **options)


def parts(cache: Any, length: int) -> list[np.ndarray]:
    """States, and keys and values; tails have no effect here."""
    found = []
    for each in cache:
        held = caches.held(each)
        found += [held["state"]] if caches.is_recurrent(each) else [
            array[..., :length, :] for array in held.values()
        ]  # fmt: skip
    return [np.array(array) for array in found]


def as_float(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def apart(line: Line, tokens: list[int] | None = None) -> float:
    tokens = line.tokens if tokens is None else tokens
    both = (parts(cache, len(line)) for cache in (line.cache, native(line.model, tokens, 7)))
    return max(
        np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        for mine, theirs in zip(*both, strict=True)
        if mine.shape == theirs.shape
    )


def ask(talk: Conversation, name: str, message: str) -> None:
    """One reply, which must be the model's own; every line must hold its tokens."""
    model = talk.lines[name].model
    prompt = talk.transcript.prompt(model, [{"role": "user", "content": message}])
    talk.reply(name, message, max_tokens=NEW)
    assert talk.transcript.tokens[len(prompt) :] == expected(model, prompt)
    for line in talk.lines.values():
        if len(line):
            assert apart(line) < CLOSE, (line.name, apart(line))


@pytest.mark.parametrize("eager", [True, False])
def test_turns(model: LanguageModel, eager: bool) -> None:
    """Nothing is read twice: what the other one wrote is translated, at every turn."""
    talk = talk_of(model, eager=eager)
    for turn, name in enumerate("abbaab"):
        before = len(talk.lines[name])
        ask(talk, name, ("is it on?", "and you")[turn % 2])
        switch = talk.last_switch
        assert switch is not None and switch.kept + switch.ahead == before
        if turn and not eager and name != "abbaab"[turn - 1]:
            assert switch.translated > 0
    assert any(span.passes == 1 for span in talk.lines["b"].spans)


@pytest.mark.parametrize("eager", [True, False])
def test_going_back(model: LanguageModel, eager: bool) -> None:
    """To marks, which only lie where a state is known; and on from there."""
    talk = talk_of(model, eager=eager)
    ask(talk, "a", LONG)
    ask(talk, "b", "is it on?")
    talk.undo()
    ask(talk, "a", "and you")
    talk.truncate_answer(1)
    ask(talk, "b", "hi there")
    talk.undo()
    talk.undo()
    ask(talk, "b", "is it on?")
    ask(talk, "a", "and you")


def test_an_answer_in_the_middle_of_which_it_is_taken_over(model: LanguageModel) -> None:
    """Where a part of the other's tokens is not wanted, its state is not, and they are read."""
    talk = talk_of(model, eager=False)
    ask(talk, "a", LONG)
    answer = talk.stream_reply("a", "is it on?", max_tokens=NEW)
    for _ in range(3):
        next(answer)
    answer.close()
    ask(talk, "b", "and you")
    assert talk.last_switch is not None and talk.last_switch.translated > 0


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_is_recorded(model: LanguageModel, kind: str, tmp_path: Path) -> None:
    """States, also beside keys and values of another dtype: saved and resumed."""
    model = model if kind == "float32" else cast(model, tmp_path / "half", mx.bfloat16)
    talk = talk_of(model, eager=False)
    for name in "ab":
        talk.reply(name, "is it on?", max_tokens=NEW)
    kept = [part.kept for part in talk.lines["b"].native.parts if part.kept]
    assert kept and all(state.dtype == mx.float32 for each in kept for state in each.values())
    folder = talk.save(tmp_path / "talk")
    again = Conversation.resume(
        folder, dict.fromkeys("ab", model), list(talk.exchange.directions.loaded.values()),
        prefill_step_size=7,
    )  # fmt: skip
    for name, line in talk.lines.items():
        for mine, theirs in zip(again.lines[name].native.parts, line.native.parts, strict=True):
            for one, other in zip(mine.arrays, theirs.arrays, strict=True):
                assert one.dtype == other.dtype and np.array_equal(*map(as_float, (one, other)))
    for each in (talk, again):
        each.reply("a", "and you", max_tokens=NEW)
    assert again.transcript.tokens == talk.transcript.tokens


def test_without_a_state_nothing_is_taken_over(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: tokens whose state is not known are read, and are right all the same."""
    monkeypatch.setattr(Line, "_states", lambda self: {})  # as if they had not been kept
    talk = talk_of(model, eager=False)
    ask(talk, "a", LONG)
    ask(talk, "b", "is it on?")
    assert talk.last_switch is not None and talk.last_switch.translated == 0
