"""Conversations of models with different tokenizers: against one tokenizer, and against PyTorch."""

from __future__ import annotations

import importlib
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.positioned import INSIDE
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.alignment import NO_END
from tests.support import hybrid_models, tiny
from tests.support.identity import identity_of
from tests.support.two_tokenizers import Script, write_mistral, write_qwen, write_translator

EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "4"))  # more of them by hand
TOLERANCE, WRONG = 1e-4, 1e-2
SYSTEM = "You are the ferryman of a long river."
ASKED = (
    "Who is the other passenger, and where is the money?",
    "Summarise this unbelievably long prefix. Then: 1 + 23 = ?",
    "And the rest of it?",
)
SAID = ("In the house.", "On the boat.", "None.")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen and a tiny Mistral, a random translator for each direction."""
    root = tmp_path_factory.mktemp("cross-talk")
    write_qwen(root / "qwen"), write_mistral(root / "mistral")
    write_translator(root / "qwen-mistral", root / "qwen", root / "mistral")
    write_translator(root / "mistral-qwen", root / "mistral", root / "qwen", seed=11)
    return root


@pytest.fixture(scope="module")
def opened(root: Path) -> Callable[[str], LanguageModel]:
    """A model by name, loaded once."""
    return cache(lambda name: kv.load(root / name))


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The PyTorch reference; tests that need it are skipped where PyTorch is absent."""
    pytest.importorskip("torch")
    return importlib.import_module("tests.support.conversation_reference")


def script(model: LanguageModel, text: str) -> Script:
    """An answer in other tokens than the tokenizer would cut it into."""
    vocabulary = model.tokenizer.get_vocab()
    mark = "Ġ" if "Ġ" in vocabulary else "▁"
    lead = "" if mark == "Ġ" else " "  # Mistral's template puts a space in front
    spelled = [mark if c == " " else c for c in lead + text]
    ids = [vocabulary.get(c) or vocabulary[f"<0x{ord(c):02X}>"] for c in spelled]
    ends = list(range(1, len(ids) + 1))
    stop = int(model.tokenizer.eos_token_id)
    return Script([*ids, stop], lead + text, ends, text)


def talk_of(
    root: Path, opened: Callable[[str], LanguageModel], names: str = "qwen mistral", **options: Any
) -> Conversation:
    return Conversation(
        {name: opened(name) for name in names.split()},
        [root / "qwen-mistral", root / "mistral-qwen"],
        **{"prefill_step_size": 13} | options,
    )


def say(talk: Conversation, name: str, message: str, text: str, **options: Any) -> np.ndarray:
    """Let a model give a scripted answer; the log probabilities of each of its tokens."""
    told = script(talk.lines[name].model, text)
    ids = iter(told.ids + told.ids[-1:] * 9)
    responses = list(
        talk.stream_reply(
            name, message, sampler=lambda _: mx.array([next(ids)]), max_tokens=99, **options
        )
    )
    in_order(talk)
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    return np.stack([np.array(r.logprobs.astype(mx.float32)) for r in responses])


def held(talk: Conversation, name: str) -> list[np.ndarray]:
    """What a line's caches hold."""
    sides = (side for c in talk.lines[name].cache for side in c.keys_and_values())
    return [np.array(side) for side in sides]


# ---- against PyTorch ------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "system"), [("qwen", True), ("mistral", False)])
def test_three_turns_are_those_of_plain_loops(
    first: str, system: bool, root: Path, opened: Callable[[str], LanguageModel],
    reference: ModuleType,
) -> None:  # fmt: skip
    """Each turn by the other model, every answer in tokens that no tokenizer would choose."""
    second = {"qwen": "mistral", "mistral": "qwen"}[first]
    talks = [
        talk_of(root, opened, eager=eager, system=SYSTEM if system else None)
        for eager in (True, False)
    ]
    slow = {name: reference.SlowLine(root / name) for name in (first, second)}
    messages = talks[0].messages
    for turn, name in enumerate((first, second, first)):
        told = script(opened(name), SAID[turn])
        assert told.ids[:-1] != opened(name).tokenizer.encode(told.said, add_special_tokens=False)
        messages.append({"role": "user", "content": ASKED[turn]})
        other = second if name == first else first
        source = (slow[other], root / f"{other}-{name}") if turn else (None, None)
        expected = reference.answer(slow[name], *source, messages, told)
        messages.append({"role": "assistant", "content": told.said})
        for talk in talks:
            found = say(talk, name, ASKED[turn], told.said)
            assert np.abs(found - expected).max() < TOLERANCE
            assert talk.lines[name].tokens == slow[name].ids
        eagerly, lazily = (talk.last_switch for talk in talks)
        assert eagerly is not None and lazily is not None
        assert eagerly.ahead == eagerly.translated and lazily.ahead == 0
        assert (lazily.translated > 20) == (turn > 0)
    entries = talks[0].lines[first].entries  # type: ignore[attr-defined]
    assert INSIDE in entries and entries[-1] != len(entries) - 1


def test_entries_that_stand_one_too_far_are_seen(
    root: Path, opened: Callable[[str], LanguageModel], reference: ModuleType
) -> None:
    """The negative control of the test above."""
    lines = {name: reference.SlowLine(root / name) for name in ("qwen", "mistral")}
    messages = [{"role": "user", "content": ASKED[0]}]
    reference.answer(lines["qwen"], None, None, messages, script(opened("qwen"), SAID[0]))
    messages += [{"role": "assistant", "content": SAID[0]}, {"role": "user", "content": ASKED[1]}]
    told = script(opened("mistral"), SAID[1])
    shifted = reference.answer(
        lines["mistral"], lines["qwen"], root / "qwen-mistral", messages, told, shift=1
    )
    talk = talk_of(root, opened)
    say(talk, "qwen", ASKED[0], SAID[0])
    assert np.abs(say(talk, "mistral", ASKED[1], SAID[1]) - shifted).max() > WRONG


@pytest.mark.parametrize("most", [1, None])
def test_an_answer_that_another_model_begins(
    most: int | None, root: Path, opened: Callable[[str], LanguageModel], reference: ModuleType
) -> None:
    """Its first token, or all of its reasoning: text for who goes on, content to be translated."""
    begun = "One moment.</think>"[:most]
    slow = {name: reference.SlowLine(root / name) for name in ("qwen", "mistral")}
    messages = [{"role": "user", "content": ASKED[0]}]
    first, then = script(opened("qwen"), begun), script(opened("mistral"), " so it is.")
    part = replace(first, ids=first.ids[:-1], text=begun[:-1], ends=first.ends[:-1])
    reference.answer(slow["qwen"], None, None, messages, part)
    expected = reference.answer(
        slow["mistral"], slow["qwen"], root / "qwen-mistral", messages, then,
        begun=(f" {begun}", "One moment."[:most]) if most is None else (f" {begun}",),
    )  # fmt: skip
    scripts = {
        opened(name).geometry.embedding_rows: iter(ids + ids[-1:] * 9)
        for name, ids in (("qwen", part.ids), ("mistral", then.ids))
    }
    how = {"prefill": "qwen", "first_token": "source"} if most else {"reasoning": "qwen"}
    talk = talk_of(root, opened)
    responses = list(
        talk.stream_reply(
            "mistral", ASKED[0], max_tokens=60, **how,
            sampler=lambda logprobs: mx.array([next(scripts[logprobs.shape[-1]])]),
        )
    )  # fmt: skip
    found = np.stack([np.array(r.logprobs) for r in responses[len(part.ids) :]])
    assert np.abs(found - expected).max() < TOLERANCE
    assert talk.messages[-1]["content"] == begun + then.text
    streamed = "".join(response.text for response in responses)
    assert (begun + then.text).startswith(streamed) and streamed.startswith(begun + " ")
    assert talk.lines["mistral"].tokens == slow["mistral"].ids
    say(talk, "qwen", ASKED[1], SAID[1])


@pytest.mark.parametrize("seed", range(EXAMPLES - 1))
def test_whatever_is_said_and_done(
    seed: int, root: Path, opened: Callable[[str], LanguageModel], tmp_path: Path
) -> None:
    """Random models write bytes that are no text; every line and every reading stays in order."""
    draw = random.Random(seed)
    models = {"q": opened("qwen"), "m": opened("mistral"), "r": opened("qwen")}
    translators = [load_translator(root / f) for f in ("qwen-mistral", "mistral-qwen")]
    translators.append(identity_of(models["q"]))
    talk = Conversation(
        models, translators, eager=seed % 2 == 0, prefill_step_size=64, verbatim=seed % 3 == 1,
        offload=draw.choice([None, "disk", "8bit"]), system=draw.choice([None, SYSTEM]),
    )  # fmt: skip
    for _ in range(6):
        act = draw.choice(["reply", "reply", "reply", "undo", "branch", "resume", "stop"])
        if act == "undo" and talk.transcript.previous is not None:
            talk.undo()
        elif act == "branch":
            talk = talk.branch()
        elif act == "resume" and talk.transcript.previous is not None:
            talk = Conversation.resume(talk.save(tmp_path / "talk"), models, translators)
        else:
            other = draw.choice("qmr")
            how = draw.choice([
                {}, {"prefill": other}, {"prefill": other, "first_token": "source"},
                {"reasoning": other},
            ])  # fmt: skip
            answer = talk.stream_reply(
                draw.choice("qmr"), draw.choice(["is it on?", "ok", "日本 é 👩‍👧 x"]), **how,
                max_tokens=draw.choice([1, 4, 9]), sampler=mx.random.categorical,
            )  # fmt: skip
            said = [next(answer)] if act == "stop" else list(answer)
            answer.close()
            assert said
        in_order(talk)


def in_order(talk: Conversation) -> None:
    """What lines and readings say of themselves."""
    for line in talk.lines.values():
        assert {c.offset for c in line._caches} == {len(line)}
        assert {c.entries for c in line._caches} == {line.entries[-1]}  # type: ignore[attr-defined]
        assert [s.start for s in line.spans] == [0, *(s.stop for s in line.spans)][
            : len(line.spans)
        ]
        assert (line.spans[-1].stop if line.spans else 0) == len(line)
        assert all((span.writer == line.name) == (span.passes == 0) for span in line.spans)
    assert talk.transcript.several
    for reading in talk.transcript.readings.values():
        ends = reading.ends[reading.ends != NO_END]
        assert len(reading.ends) == len(reading.tokens) and (np.diff(ends) >= 0).all()
        assert ends[-1] == len(reading.text)
        spans = [span for span in reading.contents if span is not None]
        assert all(0 <= start < stop <= len(reading.text) for start, stop in spans)


# ---- what a switch touches --------------------------------------------------------------------


def test_a_switch_appends_and_touches_nothing(
    root: Path, opened: Callable[[str], LanguageModel]
) -> None:
    talk = talk_of(root, opened, eager=False)
    say(talk, "qwen", ASKED[0], SAID[0])
    say(talk, "mistral", ASKED[1], SAID[1])
    before, tokens = held(talk, "mistral"), list(talk.lines["mistral"].tokens)
    say(talk, "qwen", ASKED[2], SAID[2])
    say(talk, "mistral", "And then?", "No.")
    after, switch = held(talk, "mistral"), talk.last_switch
    assert switch is not None and switch.kept == len(tokens)
    assert switch.kept + switch.translated + switch.read < len(talk.lines["mistral"])
    assert switch.translated > len(ASKED[2]) / 5 and switch.read < 30
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(new[:, :, : old.shape[2]], old)
    for line in talk.lines.values():
        assert {span.passes for span in line.spans} == {0, 1}


@pytest.mark.parametrize("eager", [True, False])
def test_going_back_is_never_having_gone(
    eager: bool, root: Path, opened: Callable[[str], LanguageModel]
) -> None:
    talks = [talk_of(root, opened, eager=eager) for _ in range(2)]
    for talk in talks:
        say(talk, "qwen", ASKED[0], SAID[0])
    say(talks[0], "mistral", ASKED[1], SAID[1])
    left = talks[0].branch()
    talks[0].undo()
    assert talks[0].messages == talks[1].messages
    assert talks[0].transcript.tokens == talks[1].transcript.tokens
    found, expected = (say(talk, "mistral", "Summarise it.", SAID[2]) for talk in talks)
    assert np.abs(found - expected).max() < TOLERANCE
    found, expected = (say(talk, "qwen", ASKED[2], SAID[1]) for talk in talks)
    assert np.abs(found - expected).max() < TOLERANCE
    assert say(left, "qwen", ASKED[2], SAID[1]).shape == found.shape
    assert np.abs(say(left, "mistral", "And?", "No.")).max() > 0


# ---- away and on disk -------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [True, False])
def test_going_on_elsewhere_is_going_on(
    eager: bool, root: Path, opened: Callable[[str], LanguageModel], tmp_path: Path
) -> None:
    talk = talk_of(root, opened, eager=eager)
    say(talk, "qwen", ASKED[0], SAID[0])
    say(talk, "mistral", ASKED[1], SAID[1])
    models = {name: opened(name) for name in talk.lines}
    translators = list(talk.exchange.directions.loaded.values())
    resumed = Conversation.resume(
        talk.save(tmp_path / "talk"), models, translators, eager=eager, prefill_step_size=13
    )
    assert resumed.messages == talk.messages
    away = talk.branch()
    for name in models:
        away.offload(name, "disk")
        assert away.lines[name].where == "disk"
    for name, message, text in (("qwen", ASKED[2], SAID[2]), ("mistral", "And?", "No.")):
        expected = say(talk, name, message, text)
        assert np.array_equal(say(resumed, name, message, text), expected)
        assert np.array_equal(say(away, name, message, text), expected)
    for each in (talk, resumed):
        each.undo(), each.undo()
        assert [m["content"] for m in each.messages] == [ASKED[0], SAID[0], ASKED[1], SAID[1]]
        each.undo()
    expected = say(talk, "mistral", ASKED[1], SAID[1])
    assert np.abs(say(resumed, "mistral", ASKED[1], SAID[1]) - expected).max() < TOLERANCE
    path = tmp_path / "talk" / "conversation.json"
    whole = path.read_text()
    for damage, said in (
        (lambda f: f["lines"]["mistral"]["facts"]["entries"].pop(), "entries .* at their end"),
        (lambda f: f["lines"]["mistral"]["facts"]["entries"].__setitem__(0, 7), "entries .* at th"),
        (lambda f: reading_of(f)["asked"]["own"].append([0, 9999]), "no text"),
        (lambda f: reading_of(f)["segments"]["own"].append(40), "IndexError"),
        (lambda f: f["transcript"].update(states=[]), "IndexError"),
    ):
        facts = json.loads(whole)
        damage(facts)
        path.write_text(json.dumps(facts))
        with pytest.raises(kv.MalformedConversationError, match=said):
            Conversation.resume(tmp_path / "talk", models, translators)


def reading_of(facts: dict[str, Any]) -> dict[str, Any]:
    """A reading of a saved conversation's last state."""
    found: dict[str, Any] = next(iter(facts["transcript"]["states"][0]["readings"].values()))
    return found


def test_a_model_of_another_tokenizer_joins(
    root: Path, opened: Callable[[str], LanguageModel], tmp_path: Path
) -> None:
    alone = Conversation({"qwen": opened("qwen")})
    say_alone = script(opened("qwen"), SAID[0])
    ids = iter(say_alone.ids + say_alone.ids[-1:] * 9)
    alone.reply("qwen", ASKED[0], sampler=lambda _: mx.array([next(ids)]), max_tokens=99)
    both = {name: opened(name) for name in ("qwen", "mistral")}
    folder = alone.save(tmp_path / "alone")
    talk = Conversation.resume(folder, both, [root / "mistral-qwen"])
    assert talk.transcript.tokens == alone.transcript.tokens
    tokens = list(talk.lines["qwen"].tokens)
    say(talk, "mistral", ASKED[1], SAID[1])
    say(talk, "qwen", ASKED[2], SAID[2])
    assert talk.last_switch is not None and talk.last_switch.kept >= len(tokens)
    assert any(span.writer == "mistral" for span in talk.lines["qwen"].spans)
    talk.undo(), talk.undo()
    assert talk.messages == alone.messages


# ---- what fails and what is refused -----------------------------------------------------------


def test_refusals(root: Path, opened: Callable[[str], LanguageModel]) -> None:
    for options, said in (
        ({"native_layers": 1}, "native_layers cannot be used between two tokenizers"),
        ({"native_layers": "auto"}, "native_layers cannot be used between two tokenizers"),
    ):
        with pytest.raises(ValueError, match=said):
            talk_of(root, opened, **options)
    across = load_translator(root / "qwen-mistral")
    models = {name: opened(name) for name in ("qwen", "mistral")}
    plain = replace(across, config=replace(across.config, alignment=None))
    with pytest.raises(kv.IncompatibleTranslatorError, match="the tokenizers of .* differ"):
        Conversation(models, [plain])
    with pytest.raises(kv.IncompatibleTranslatorError, match="is between two tokenizers"):
        Conversation(dict.fromkeys("ab", models["qwen"]), [across])
    tiny.write_tiny_model(root / "gemma", "gemma3_text", seed=1, layers=3, kv_heads=1, head_dim=32)
    models["gemma"] = kv.load(root / "gemma")
    models["lfm2"] = kv.load(hybrid_models.write_hybrid_model(root / "lfm2", "lfm2"))
    three = {name: models[name] for name in ("mistral", "gemma", "lfm2")}
    talk = Conversation(three)
    reader = Conversation(three, on_missing="reprefill")
    for each in (talk, reader):
        mine = script(models["mistral"], SAID[0])
        ids = iter(mine.ids + mine.ids[-1:] * 9)
        each.reply("mistral", ASKED[0], sampler=lambda _: mx.array([next(ids)]), max_tokens=99)  # noqa: B023
    for name in ("gemma", "lfm2"):
        message = f"{name} cannot take over from a model of an"
        with pytest.raises(kv.UnsupportedModelError, match=message):
            talk.reply(name, ASKED[1], max_tokens=3)
        reader.reply(name, ASKED[1], max_tokens=3)
    reader.reply("mistral", ASKED[1], max_tokens=3)


def test_chat(
    root: Path, opened: Callable[[str], LanguageModel], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, store: Path,
) -> None:  # fmt: skip
    """No flag says that the tokenizers differ, and no warning either."""
    for name in ("qwen-mistral", "mistral-qwen"):
        load_translator(root / name).save(store / name)
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("is it on?\n/use m\nand you\n/undo\n/use q\nhi\n/stats\n")
    )
    models = [f"--model=q={root / 'qwen'}", f"--model=m={root / 'mistral'}"]
    assert run(["chat", *models, "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and "error" not in err and "template" not in err
