"""Conversations of hybrids: a state that cannot be trimmed is never ahead of its line's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine import healing
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.spans import Span
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from tests.support import hybrid_models, tiny
from tests.support.identity import identity_of
from tests.support.opened import cast
from tests.support.talks import CLOSE, NEW, apart, ask, check_caches, talk_of

LONG = "the use of an other is it on? " * 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    root = tmp_path_factory.mktemp("hybrids")
    found = {
        name: kv.load(hybrid_models.write_hybrid_model(root / name, name))
        for name in ("granitemoehybrid", "lfm2")
    }
    found["delta"] = kv.load(
        hybrid_models.write_hybrid_model(root / "delta", "qwen3_5", num_hidden_layers=4)
    )
    found["half"] = cast(found["granitemoehybrid"], root / "half", mx.bfloat16)
    return found


@pytest.fixture
def model(models: dict[str, LanguageModel]) -> LanguageModel:
    return models["granitemoehybrid"]


def parts_of(line: Line) -> dict[str, np.ndarray]:
    """Copies of what a line's caches hold, and its marks."""
    return {name: np.array(a.astype(mx.float32)) for name, a in line.arrays().items()}


def same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


# ---- growing and shrinking --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["granitemoehybrid", "delta", "lfm2"])
def test_a_state_that_is_ahead_is_noticed(models: dict[str, LanguageModel], name: str) -> None:
    """The control of every comparison here: one token more is not a matter of rounding."""
    talk = talk_of(models[name])
    ask(talk, "a", "the use of an other")
    line = talk.lines["a"]
    assert apart(line) < CLOSE
    assert apart(line, line.tokens[:-1]) > 0.3
    for cache in line.cache:  # keys and values alone go back
        if not caches.is_recurrent(cache):
            cache.trim(1)
    line.tokens = line.tokens[:-1]
    with pytest.raises(AssertionError):
        check_caches(line)


@pytest.mark.parametrize("eager", [True, False])
def test_the_usual_turn_reads_nothing_twice(model: LanguageModel, eager: bool) -> None:
    talk = talk_of(model, verbatim=True, eager=eager)
    for turn, name in enumerate("abba"):
        before = len(talk.lines[name])
        ask(talk, name, ("is it on?", "and you")[turn % 2])
        switch = talk.last_switch
        assert switch is not None and switch.kept + switch.ahead == before
    header = talk.lines["a"]._marks[-1][0]
    held = len(talk.transcript.tokens)
    talk.undo()
    ask(talk, "a", "and you")  # the same answer again: only its header is read
    assert talk.last_switch is not None and talk.last_switch.kept == header > held - NEW - 20
    talk.truncate_answer(1)
    ask(talk, "a", "hi there")  # what is left of the answer is read again, no more
    assert talk.last_switch.kept == header


def test_a_snapshot_in_the_middle_of_an_answer(model: LanguageModel) -> None:
    """As a server takes one for another client: its lines are those before the answer."""
    talk = talk_of(model, eager=False, verbatim=True)
    ask(talk, "a", "the use of an other")
    answer = talk.stream_reply("a", "is it on?", max_tokens=NEW)
    for _ in range(3):
        next(answer)
    assert apart(talk.lines["a"]) > 0.3  # ahead of what is booked
    made = talk.snapshot()
    check_caches(made.lines["a"])
    for _ in answer:
        pass
    for each in (talk, made):
        check_caches(each.lines["a"])
    ask(made, "a", "and you")
    ask(talk, "b", "and you")


@pytest.mark.parametrize(("name", "steps"), [("granitemoehybrid", 1), ("delta", 2), ("lfm2", 3)])
def test_ctrl_c_while_decoding(models: dict[str, LanguageModel], name: str, steps: int) -> None:
    """What was given out stays in the line, or nothing does; a new try begins at the header."""
    talk = talk_of(models[name], verbatim=True)
    ask(talk, "a", "the use of an other")
    answer = talk.stream_reply("b", "is it on?", max_tokens=NEW)
    for _ in range(steps):
        next(answer)
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt)
    header = talk.lines["b"]._marks[-1][0]
    for line in talk.lines.values():
        check_caches(line)
    ask(talk, "b", "is it on?")
    assert talk.last_switch is not None and talk.last_switch.kept >= header > 32


@pytest.mark.parametrize("name", ["granitemoehybrid", "lfm2"])
@pytest.mark.parametrize(
    ("place", "error"),
    [("reading", KeyboardInterrupt), ("decoding", MemoryError), ("translating", MemoryError)],
)
def test_some_layers_are_ahead_when_it_stops(
    models: dict[str, LanguageModel], name: str, place: str, error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The last layer does not run, so those below it are ahead of it, and of the tokens."""
    model = models[name]
    talk = talk_of(model, eager=False, verbatim=True)
    ask(talk, "a", LONG)
    ask(talk, "b", "is it on?")
    line, append, ahead = talk.lines["a"], caches.append, [0.0]
    last, cls = model.attentions[-1], type(model.attentions[-1])

    def look() -> None:
        last.__class__ = cls
        ahead.append(apart(line))
        if ahead[-1] > 0.01:
            raise error

    class Stops(cls):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
            if x.shape[1] == (1 if place == "decoding" else 7):
                look()
            return super().__call__(x, *args, **options)

    def stops(*arguments: Any) -> None:
        append(*arguments)
        look()

    with monkeypatch.context() as patch, pytest.raises(error):
        if place == "translating":
            patch.setattr(caches, "append", stops)
        else:
            last.__class__ = Stops
        talk.reply("a", LONG, max_tokens=NEW)
    assert type(last) is cls and ahead[-1] > 0.01  # there was something to put right
    check_caches(line)
    for each in "ab":
        ask(talk, each, "and you")


# ---- away and on disk -------------------------------------------------------------------------


def test_a_line_on_disk_comes_back_bit_by_bit(models: dict[str, LanguageModel]) -> None:
    """Its states are float32 where all else is bfloat16, so they have a file of their own."""
    talk = talk_of(models["half"], verbatim=True)
    talk.reply("a", LONG, max_tokens=NEW)
    line = talk.lines["a"]
    kinds = {str(a.dtype).split(".")[-1] for a in line.arrays().values()}
    assert kinds == {"bfloat16", "float32"}
    before = parts_of(line)
    assert any(name.startswith("mark") for name in before)
    held = line.cache_bytes
    assert talk.offload("a", "disk") == held > 0 == line.cache_bytes
    assert [path.exists() for path in line._away.paths] == [True, True]
    paths = line._away.paths
    assert all(not caches.held(cache) for cache in line.resident)
    len(line.cache)
    same(parts_of(line), before)
    assert not any(path.exists() for path in paths)
    talk.offload("a", "disk")
    again = talk.branch()
    talk.undo()
    for each in (talk, again):
        each.reply("a", "and you", max_tokens=NEW)
        assert apart(each.lines["a"]) < 0.05  # bfloat16, in other chunks


def test_parts_that_do_not_fit_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    talk = talk_of(model, eager=False)
    ask(talk, "a", "is it on?")
    line = talk.lines["a"]
    facts: Any = json.loads(json.dumps(line.facts()))
    arrays = line.arrays()
    fresh = Line("a", model, records=False)
    fresh.restore(facts, arrays)
    assert apart(fresh) < CLOSE
    state, tail = (arrays[f"0.{part}"] for part in ("state", "tail"))
    for name, wrong, message in (
        ("0.state", state.astype(mx.float16), "holds mlx.core.float16 .*expected mlx.core.float32"),
        ("0.state", state[:, :-1], r"holds .*expected mlx.core.float32 \(1, 8, 16, 24\)"),
        ("0.tail", tail[:, 1:], "holds .*expected"),
        ("mark0.1.tail", tail[..., 1:], "holds .*expected"),
    ):
        with pytest.raises(ValueError, match=message):
            Line("a", model, records=False).restore(facts, {**arrays, name: wrong})
    for name in ("0.state", "mark0.3.tail"):
        with pytest.raises(KeyError, match=name):
            some = {each: array for each, array in arrays.items() if each != name}
            Line("a", model, records=False).restore(facts, some)
    facts["caches"][0]["parts"] = 1
    with pytest.raises(ValueError, match="keeps {'parts': 2}, not {'parts': 1}"):
        Line("a", model, records=False).restore(facts, arrays)


# ---- healing ----------------------------------------------------------------------------------


def test_reading_behind_a_translation_makes_the_models_own_states(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = identity_of(model, provenance={})
    halved = {name: array / 2 for name, array in right.to_weights().arrays.items()}
    wrong = build(right.config, Weights("float32", halved))
    talk = Conversation(
        dict.fromkeys("ab", model), [wrong], verbatim=True, eager=False, prefill_step_size=7,
        enable_thinking=False,
    )  # fmt: skip
    talk.reply("a", LONG, max_tokens=NEW)
    talk.reply("b", "is it on?", max_tokens=NEW)
    line = talk.lines["b"]
    assert apart(line) > 0.1  # the control
    reread, whole = healing.reread, len(line)

    def stops(*arguments: Any) -> None:
        reread(*arguments)
        raise KeyboardInterrupt

    calls = iter([False, False, True])
    assert 0 < talk.heal("b", until=lambda: next(calls)) < whole
    with monkeypatch.context() as patch:
        patch.setattr(healing, "reread", stops)
        with pytest.raises(KeyboardInterrupt):
            talk.heal("b")
    assert line.left(answers=False) == whole  # its states are ahead of it, so it begins anew
    calls = iter([False, False, True])
    talk.heal("b", until=lambda: next(calls))
    said = talk.reply("b", "and you", max_tokens=NEW)
    assert said and talk.heal("b") == 0
    assert apart(line) < CLOSE and line.spans == [Span(0, len(line), "b")]
    assert [mark < len(line) for mark, _ in line._marks] == [True, True]
    talk.undo()
    talk.reply("b", "hi there", max_tokens=NEW)  # from a mark that was healed, too
    assert talk.last_switch is not None and talk.last_switch.kept > whole - 20
    assert apart(line) < CLOSE


# ---- with others ------------------------------------------------------------------------------


def test_a_plain_target_reads_the_layers_of_attention(
    models: dict[str, LanguageModel], tmp_path: Path
) -> None:
    """And hands back by text, since it has nothing of which states are made.

    Random maps, not fitted ones: those of so few tokens multiply rounding by what the kernel is.
    """
    kind, sizes = tiny.FAMILIES["qwen3"]
    plain = kv.load(tiny.write_tiny_model(tmp_path / "plain", kind, **sizes))
    there = hybrid_models.random_translator(models["delta"], plain)
    talk = Conversation(
        {"hybrid": models["delta"], "plain": plain}, [there], on_missing="reprefill",
        prefill_step_size=7, enable_thinking=False, verbatim=True,
    )  # fmt: skip
    talk.reply("hybrid", LONG, max_tokens=NEW)
    first = list(talk.lines["hybrid"].tokens)
    talk.reply("plain", "is it on?", max_tokens=NEW)
    line = talk.lines["plain"]
    assert line.spans[0] == Span(0, len(first), "hybrid", 1)
    cache = kv.hand_over(models["delta"], plain, [*first, 1], translator=there)
    for mine, theirs in zip(line.cache, cache, strict=True):
        for one, other in zip(caches.contents(mine), caches.contents(theirs), strict=True):
            np.testing.assert_allclose(
                np.array(one[..., : len(first), :]), np.array(other), rtol=1e-3, atol=1e-4
            )
    talk.reply("hybrid", "and you", max_tokens=NEW)
    assert talk.last_switch is not None
    assert (talk.last_switch.kept, talk.last_switch.translated) == (len(first), 0)
    check_caches(talk.lines["hybrid"])


def test_what_cannot_be_done_is_said(model: LanguageModel, models: dict[str, Any]) -> None:
    refused: Any = kv.UnsupportedModelError
    for options, message in (
        ({"heal": "interleaved"}, "cannot be healed while it answers: 3 of its 4 cache layers"),
        ({"guard": 8}, "cannot be guarded in a conversation: 3 of its 4 .*a recurrent state"),
    ):
        with pytest.raises(refused, match=message):
            talk_of(model, **options)
    talk = talk_of(model)
    with pytest.raises(refused, match="draft_model cannot be used: .*keeps recurrent states"):
        talk.reply("a", "hi", draft_model=models["delta"], max_tokens=NEW)
    assert not talk.messages and all(not len(line) for line in talk.lines.values())
