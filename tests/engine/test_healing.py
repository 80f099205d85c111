"""Conversations whose models read behind their translations, against a plain prefill."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.embedded.dialogues import held_out
from kvlingo_mlx.engine import healing
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.line import Line
from kvlingo_mlx.engine.spans import Span
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.translators.base import Translator
from tests.support.fixtures import Models, Patch
from tests.support.healings import in_a_row, noted
from tests.support.identity import identity_of
from tests.support.native_caches import held, native
from tests.support.talks import talk_of

EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "3"))  # more of them by hand
MESSAGES = ("the use of an other", "is it on?", "and you", "hi there, and this is longer than that")
NEW = 9


def talk_between(models: Models, poor: list[Translator], **options: Any) -> Conversation:
    pair = {"a": models["dense"], "b": models["wide"]}
    return Conversation(pair, poor, prefill_step_size=7, **options)


def furthest(line: Line, positions: slice | list[int] = slice(None)) -> float:
    """How far what a line holds is from its model's own prefill, of the largest entry."""
    return apart(line.model, line.tokens, line.cache, positions)


def apart(
    model: LanguageModel, tokens: Any, cache: Any, positions: slice | list[int] = slice(None)
) -> float:
    """The same of any caches of tokens, at some positions or all that are held."""
    worst = 0.0
    for ours, own in zip(cache, native(model, list(tokens), len(tokens)), strict=True):
        for a, b in zip(held(ours), held(own), strict=True):
            distance = np.abs(a[:, :, positions] - b[:, :, positions]).max()
            worst = max(worst, float(distance / np.abs(b).max()))
    return worst


class Simulation:
    """What each position of a line holds: its own entry (E), one made after others (M), or T.

    It knows nothing of spans: it looks at what is written where, one token at a time.
    """

    def __init__(self) -> None:
        self.held: list[tuple[int, str]] = []  # token, kind

    def follow(self, line: Line, translated: int) -> None:
        """The line now holds its tokens, of which the first new ``translated`` are translated."""
        same = 0
        for (token, _), now in zip(self.held, line.tokens, strict=False):
            if token != now:
                break
            same += 1
        self.held = self.held[:same]
        for number, token in enumerate(line.tokens[same:]):
            own = "E" if all(kind == "E" for _, kind in self.held) else "M"
            self.held.append((token, "T" if number < translated else own))

    def heal(self, most: int, answers: bool) -> None:
        wanted = "TM" if answers else "T"
        places = [n for n, (_, kind) in enumerate(self.held) if kind in wanted]
        for before, place in zip([None, *places], places, strict=False):
            if most == 0 or (before is not None and place != before + 1):
                return
            own = "E" if all(kind == "E" for _, kind in self.held[:place]) else "M"
            self.held[place] = (self.held[place][0], own)
            most -= 1

    @property
    def kinds(self) -> str:
        return "".join(kind for _, kind in self.held)


def kinds(line: Line) -> str:
    """The same as the line's spans say."""
    return "".join(
        ("T" if s.passes else "M" if s.mixed else "E") * (s.stop - s.start) for s in line.spans
    )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "heal", "heal", "heal", "undo", "branch", "offload", "resume"]),
        st.integers(0, len(MESSAGES) - 1),
        st.integers(1, 40),
        st.booleans(),
    ),
    min_size=3,
    max_size=10,
)


def test_what_each_position_holds(models: Models, poor: list[Translator], tmp_path: Path) -> None:
    """Asked, healed in part, undone, branched, put away, saved and resumed in any order."""

    @settings(max_examples=4 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS)
    def run(steps: list) -> None:
        talk = talk_between(models, poor, eager=False, verbatim=True)
        lines = {name: Simulation() for name in talk.lines}
        for action, number, most, answers in steps:
            name = "ab"[number % 2]
            line = talk.lines[name]
            if action in "ab":
                talk.reply(action, MESSAGES[number], max_tokens=NEW)
                assert talk.last_switch is not None
                lines[action].follow(talk.lines[action], talk.last_switch.translated)
            elif action == "heal":
                line.heal(most, answers=answers)
                lines[name].heal(most, answers)
            elif action == "undo" and talk.messages:
                talk.undo()
            elif action == "branch":
                other = talk.branch()
                other.heal(name, answers=True)
                other.reply(name, "something else", max_tokens=3)
            elif action == "offload":
                talk.offload(name, "disk")
            elif action == "resume" and talk.messages:
                pair = {n: each.model for n, each in talk.lines.items()}
                talk = Conversation.resume(
                    talk.save(tmp_path / "t"), pair, poor, eager=False, prefill_step_size=7
                )
            for each, simulated in lines.items():
                assert kinds(talk.lines[each]) == simulated.kinds
                alone = len(simulated.kinds) - len(simulated.kinds.lstrip("E"))
                if alone:
                    assert furthest(talk.lines[each], list(range(alone))) < 1e-4

    run()


def test_a_translation_is_told_from_a_prefill(models: Models, poor: list[Translator]) -> None:
    """The control of the others: what is not healed is far from a prefill."""
    talk = talk_between(models, poor, eager=False)
    talk.reply("a", MESSAGES[0], max_tokens=NEW)
    talk.reply("b", MESSAGES[1], max_tokens=NEW)
    line = talk.lines["b"]
    translated = [n for n, kind in enumerate(kinds(line)) if kind == "T"]
    mixed = [n for n, kind in enumerate(kinds(line)) if kind == "M"]
    assert len(translated) > 10 and furthest(line, translated) > 0.01
    assert furthest(line, mixed) > 0.01
    assert talk.heal() == 0  # "b", which answered last
    assert furthest(line, translated) < 1e-4 and furthest(line, mixed) > 0.01
    assert talk.heal(answers=True) == 0
    assert furthest(line) < 1e-4
    assert set(kinds(line)) == {"E"}


def asked_of(drawn: Any, questions: int) -> list[Any]:
    """The turns of a dialogue; its facts stand before the first question."""
    talk = next(iter(drawn(1, seed=5, facts=(18, 18), questions=questions)))
    told = [*talk.messages[:-1], {"role": "user", "content": talk.questions[0]}]
    return [told, *talk.questions[1:]]


def test_healed_at_every_turn_is_a_prefill_at_every_turn() -> None:
    """Twenty turns of trained models, which answer by what was said."""
    ends = {"a": kv.load(zoo("tiny-qwen3-s")), "b": kv.load(zoo("tiny-qwen3-l"))}
    names = ("tiny-qwen3-s--tiny-qwen3-l", "tiny-qwen3-l--tiny-qwen3-s")
    folders = [TRANSLATORS / name for name in names]
    healed, alone, left = (
        Conversation(ends, folders, enable_thinking=False, verbatim=True, **options)
        for options in ({}, {"switching": "reprefill"}, {})
    )
    asked = [*asked_of(held_out, 18), "Can you remember that?", "Thank you."]
    said: dict[Conversation, list[str]] = {healed: [], alone: [], left: []}
    for turn in range(20):
        name = "ab"[turn % 2]
        for each, answers in said.items():
            answers.append(each.reply(name, asked[turn], max_tokens=24))
        switch = alone.last_switch
        assert switch is not None and switch.kept == switch.translated == 0
        for line in "ab":  # the other line has followed, and is healed before it is asked
            assert healed.heal(line, answers=True) == 0
            assert set(kinds(healed.lines[line])) == {"E"}
        assert said[healed] == said[alone]
    assert said[left] != said[alone]


def test_until_seconds_and_chunks(
    models: Models, poor: list[Translator], monkeypatch: Patch
) -> None:
    """It ends where it is told to, goes on there, and reads nothing twice."""
    talk = talk_between(models, poor, eager=False)
    assert talk.heal() == 0  # nobody has answered
    talk.reply("a", " ".join(MESSAGES) * 4, max_tokens=NEW)
    talk.reply("b", MESSAGES[1], max_tokens=NEW)
    read = noted(monkeypatch)
    whole = talk.heal(seconds=0)
    assert whole == kinds(talk.lines["b"]).count("T") > 50 and read == []
    calls = iter([False, False, True])
    left = talk.heal(until=lambda: next(calls))
    assert len(read) == 2 and left == whole - in_a_row(read)
    assert talk.heal() == 0 and in_a_row(read) == whole
    assert all(chunk.tokens <= 7 for chunk in read)  # prefill_step_size
    assert talk.heal() == 0 and in_a_row(read) == whole
    with pytest.raises(ValueError, match="there is no model 'c'"):
        talk.heal("c")


def test_while_a_user_types(models: Models, poor: list[Translator], monkeypatch: Patch) -> None:
    talk = talk_between(models, poor, eager=False)
    talk.reply("a", " ".join(MESSAGES) * 4, max_tokens=NEW)
    talk.reply("b", MESSAGES[1], max_tokens=NEW)
    chunk, reread = threading.Event(), healing.reread

    def told(*arguments: Any) -> None:
        reread(*arguments)
        chunk.set()

    monkeypatch.setattr(healing, "reread", told)
    with talk.healing("b"):
        assert chunk.wait(60)
        with pytest.raises(ValueError, match="an answer is still being written"):
            talk.undo()
    assert kinds(talk.lines["b"]).startswith("E")
    assert talk.reply("b", MESSAGES[2], max_tokens=NEW)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(healing, "reread", broken)
    with pytest.raises(RuntimeError, match="out of memory"), talk.healing("b", answers=True):
        pass
    assert talk.reply("a", MESSAGES[0], max_tokens=NEW)


WAYS: list[dict[str, Any]] = [
    {"heal": "interleaved", "heal_share": 0.2}, {"heal": "interleaved", "heal_share": 0.9},
    {"heal": "layers"}, {"heal": "layers", "native_layers": 2},
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_between_the_steps_of_an_answer(
    models: Models, poor: list[Translator], monkeypatch: Patch, way: dict[str, Any]
) -> None:
    """The prefix is read once, from the front, while the answer grows behind it.

    By layers a quarter of them, or the number that is asked for, is read at once.
    """
    talk = talk_between(models, poor, eager=False, **way)
    talk.reply("a", " ".join(MESSAGES) * 2, max_tokens=NEW)
    read = noted(monkeypatch)
    *_, last = talk.stream_reply("b", MESSAGES[1], max_tokens=300)
    line, done = talk.lines["b"], in_a_row(read)
    layers = way.get("native_layers", 1) if way["heal"] == "layers" else 0
    assert last.native_layers == layers and 0 < done <= last.translated_tokens
    assert kinds(line)[: done + 1].rstrip("TM") == "E" * done
    assert "M" in kinds(line)  # its first tokens were written after translated ones
    assert furthest(line, list(range(done))) < 1e-4
    assert talk.heal(answers=True) == 0 and furthest(line) < 1e-4


PROMPT = list(range(5, 205))


@pytest.mark.parametrize(
    ("pair", "native", "heal"),
    [
        (("dense", "wide"), {}, "interleaved"),
        (("wide", "dense"), {"native_layers": 0}, "layers"),
        (("dense", "moe"), {"native_head": 20, "native_layers": 1}, "interleaved"),
        (("dense", "wide"), {"native_tail": 30, "native_layers": 2}, "layers"),
    ],
)
def test_a_prompt_is_read_once_behind_its_answer(
    models: Models, monkeypatch: Patch, pair: tuple[str, str], native: dict[str, int], heal: str
) -> None:
    """A short one as far as it goes; nothing before the first token."""
    source, target = (models[name] for name in pair)
    translator = kv.fit(source, target, [Sample(tuple(PROMPT), ())])
    settings: dict[str, Any] = {"translator": translator, "max_tokens": 250, **native}
    read = noted(monkeypatch)
    plain = next(kv.stream_generate(source, target, PROMPT, **settings))
    assert read == []
    again = list(kv.stream_generate(source, target, PROMPT, heal=heal, **settings))
    assert again[0].token == plain.token
    head = native.get("native_head", 0)
    assert in_a_row(read, head) == len(PROMPT) - 1 - head
    # What the prompt's places hold now is what the target alone makes of them.
    cache, places = read[-1].cache, list(range(len(PROMPT) - 1))
    assert apart(target, PROMPT, cache, places) < 1e-4
    assert all(each.offset >= len(PROMPT) for each in cache)
    read.clear()
    few = {**settings, "max_tokens": 3, "heal": "interleaved", "heal_share": 0.9}
    kv.generate(source, target, PROMPT, **few)
    assert 0 < in_a_row(read, head) < 150


def test_decoding_keeps_its_share(monkeypatch: Patch) -> None:
    """Against a clock that only steps and chunks move: no machine is measured."""
    for share in (0.25, 0.5, 0.8):
        now, left = 0.0, 60_000

        def read(most: int) -> int:
            nonlocal now, left
            number = min(most, left)
            now, left = now + number * 0.004, left - number
            return number

        monkeypatch.setattr(healing.time, "perf_counter", lambda: now)  # noqa: B023
        between = healing.Interleaved(read, share)
        decoding = 0.0
        for step in range(2000):
            between.began()
            now += 0.02 + 0.001 * (step % 5)
            decoding += 0.02 + 0.001 * (step % 5)
            between()
        assert decoding / now == pytest.approx(share, rel=0.1)
        assert left > 0


def test_what_cannot_be_healed_is_refused(
    models: Models, families: Models, poor: list[Translator], twins: list[LanguageModel]
) -> None:
    model = families["gemma3"]
    with pytest.raises(kv.UnsupportedModelError, match="cannot be healed while it answers: 4 of"):
        talk_of(model, "ab", heal="interleaved")
    pair = dict(zip("ab", twins, strict=True))
    talk = Conversation(pair, on_missing="reprefill")
    talk.reply("a", "hi", max_tokens=2)
    for call in (talk.heal, talk.healing):
        with pytest.raises(kv.UnsupportedModelError, match="of different tokenizers cannot be"):
            call().__enter__()
    with pytest.raises(kv.UnsupportedModelError, match="models of different tokenizers cannot be"):
        Conversation(pair, on_missing="reprefill", heal="interleaved")
    source, target = models["dense"], models["moe"]
    both: list[tuple[dict[str, Any], str]] = [
        ({"heal": "later"}, "heal is 'later'; give interleaved or layers"),
        ({"heal": "interleaved", "heal_share": 0.0}, "heal_share is 0.0; give the share"),
        ({"heal": "interleaved", "heal_share": 1}, "heal_share is 1; give the share"),
    ]
    none = ({"heal": "layers", "native_layers": 0}, "and native_layers is 0, which reads none")
    for options, message in (*both, none):
        with pytest.raises(ValueError, match=message):
            talk_between(models, poor, **options)
    talk = talk_between(models, poor, heal="interleaved")
    with pytest.raises(ValueError, match="be written from a copy of the cache"):
        talk.reply("a", "hi", max_tokens=2, draft_model="b")
    for options, message in (
        *both,
        ({"heal": "interleaved", "kv_bits": 8, "kv_group_size": 32}, "and kv_bits does; leave one"),
        ({"heal": "interleaved", "draft_model": source}, "and draft_model does; leave one"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.generate(source, target, PROMPT, max_tokens=3, **options)
    with pytest.raises(kv.UnsupportedModelError, match="cannot be healed while it answers"):
        kv.generate(model, kv.load(model.path), PROMPT, max_tokens=3, translator=identity_of(model),
                    heal="interleaved")  # fmt: skip


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def windowed(request: pytest.FixtureRequest) -> tuple[Models, list[Path]]:
    """Trained models with windows, and translators between them."""
    root, name = Path(__file__).parents[1] / "zoo", request.param
    pair = {each: kv.load(root / "models" / f"tiny-{name}-{each}") for each in "sl"}
    ways = [root / "translators" / f"tiny-{name}-{a}--tiny-{name}-{b}" for a, b in ("sl", "ls")]
    return pair, ways


def test_windows_are_read_from_the_first_token(windowed: Any, tmp_path: Path) -> None:
    """Stopped and gone on with, beside answers, undone, branched, put away and saved."""
    models, ways = windowed
    told, *rest = asked_of(held_out, 7)

    def begun() -> Conversation:
        talk = Conversation(
            models, ways, enable_thinking=False, verbatim=True, eager=False, prefill_step_size=23
        )
        talk.reply("s", told, max_tokens=24)
        talk.reply("l", rest[0], max_tokens=24)
        return talk

    talk = begun()
    line = talk.lines["l"]
    assert furthest(line) > 0.01  # the control
    whole = len(line)
    assert talk.heal(seconds=0) == whole > 150
    calls = iter([False, False, True])
    left = talk.heal(until=lambda: next(calls))
    assert whole - 46 <= left < whole and furthest(line) > 0.01
    apart = talk.branch()
    assert apart.heal() == 0 and furthest(apart.lines["l"]) < 1e-4  # begins anew
    said = talk.reply("l", rest[1], max_tokens=24)
    assert said and talk.heal() == 0 and furthest(line) < 1e-4  # goes on, new turn and all
    assert line.spans == [Span(0, len(line), "l")]
    talk.undo()  # to a mark in what was healed
    talk.reply("l", rest[2], max_tokens=24)
    assert talk.heal() == 0 and furthest(line) < 1e-4
    # Put away or saved in the middle, it begins anew.
    for away in (False, True):
        talk = begun()
        talk.heal(until=iter([False, True]).__next__)
        if away:
            talk.offload("l", "disk")
        else:
            talk = Conversation.resume(talk.save(tmp_path / "t"), models, ways, eager=False)
        assert talk.lines["l"].left(answers=False) == whole
        assert talk.heal("l") == 0 and furthest(talk.lines["l"]) < 1e-4
