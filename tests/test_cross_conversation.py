"""Conversations of models with different tokenizers: against one tokenizer, and against PyTorch."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_identity import identity_of
from two_tokenizers import write_mistral, write_qwen, write_translator

import kvlingo_mlx as kv
from kvlingo_mlx.conversation import Conversation
from kvlingo_mlx.conversation.positioned import INSIDE
from kvlingo_mlx.language_model import LanguageModel

EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "4"))  # more of them by hand
NEW = 5
TOLERANCE, WRONG = 1e-4, 1e-2
LETTERS = "abcdefghijklmnopqrstuvwxyz "
SYSTEM = "You are the ferryman of a long river."
ASKED = (
    "Who is the other passenger, and where is the money?",
    "Summarise this unbelievably long prefix. Then: 1 + 23 = ?",
    "And the rest of it?",
)
SAID = ("In the house: it is hers.", "Another user, on the boat.", "None.")


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
    return importlib.import_module("conversation_reference")


@dataclass
class Script:
    """What a model is made to answer: its tokens, character by character, and what they spell."""

    ids: list[int]
    text: str
    ends: list[int]
    said: str


def script(model: LanguageModel, text: str) -> Script:
    """An answer in other tokens than the tokenizer would cut it into."""
    vocabulary = model.tokenizer.get_vocab()
    mark = "Ġ" if "Ġ" in vocabulary else "▁"
    lead = "" if mark == "Ġ" else " "  # Mistral's template puts a space in front
    spelled = [mark if c == " " else c for c in lead + text]
    ids = [vocabulary.get(c) or vocabulary[f"<0x{ord(c):02X}>"] for c in spelled]
    ends = list(range(1, len(ids) + 1))
    stop = int(model.tokenizer.eos_token_id)
    assert ids != model.tokenizer.encode(text, add_special_tokens=False)
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
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    return np.stack([np.array(r.logprobs.astype(mx.float32)) for r in responses])


def held(talk: Conversation, name: str) -> list[np.ndarray]:
    """What a line's caches hold."""
    sides = (side for c in talk.lines[name].cache for side in c.keys_and_values())
    return [np.array(side) for side in sides]


# ---- against one tokenizer ------------------------------------------------------------------


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[LanguageModel]:
    """One model twice, of tokenizers that differ in a token that no text has."""
    root, found = tmp_path_factory.mktemp("twins"), []
    for name in ("one", "other"):
        folder = write_qwen(root / name)
        path = folder / "tokenizer.json"
        facts = json.loads(path.read_text())
        facts["model"]["merges"] = []  # letters are tokens: whatever is said is cut in one way
        if name == "other":
            last = max(t["id"] for t in facts["added_tokens"])
            facts["added_tokens"].append(
                facts["added_tokens"][0] | {"id": last + 1, "content": "<|other|>"}
            )
        path.write_text(json.dumps(facts))
        found.append(kv.load(folder))
    return found


def identities(one: LanguageModel, other: LanguageModel) -> list[Any]:
    """Identity translators between two models, each way."""
    same = identity_of(one)
    return [
        replace(
            same,
            config=replace(
                same.config, source=a.spec(), target=b.spec(), alignment="minimal_groups"
            ),
        )
        for a, b in ((one, other), (other, one))
    ]


def letters_only(model: LanguageModel) -> Callable[[mx.array, mx.array], mx.array]:
    vocabulary = model.tokenizer.get_vocab()
    mask = np.full(model.geometry.embedding_rows, -np.inf, np.float32)
    for token in (*LETTERS.replace(" ", "Ġ"), "<|im_end|>"):
        mask[vocabulary[token]] = 0
    return lambda tokens, logits: logits + mx.array(mask)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "b", "undo", "branch", "offload", "resume", "stop"]),
        st.sampled_from(["the use of an other", "is it on?", "and you", "hi there"]),
        st.sampled_from([None, None, "a", "b"]),
    ),
    min_size=3,
    max_size=7,
)


@pytest.mark.parametrize("eager", [True, False])
def test_two_tokenizers_that_cut_alike_are_one(
    twins: list[LanguageModel], eager: bool, tmp_path: Path
) -> None:
    one, other = twins
    assert one.tokenizer_fingerprint != other.tokenizer_fingerprint
    across = identities(one, other)
    translators = {False: [identity_of(one)], True: [*across, identity_of(one)]}
    models = {False: dict.fromkeys("abc", one), True: {"a": one, "b": other, "c": one}}
    only = letters_only(one)

    def act(talk: Conversation, cross: bool, step: tuple) -> Conversation:
        action, message, prefill = step
        options = {"max_tokens": NEW, "logits_processors": [only]}
        if action == "undo":
            if talk.messages:
                talk.undo()
        elif action == "branch":
            talk, left = talk.branch(), talk
            left.reply("b", "something else", **options)
        elif action == "offload":
            talk.offload("abc"[len(message) % 3], "disk")
        elif action == "resume":
            talk = Conversation.resume(
                talk.save(tmp_path / str(cross)), models[cross], translators[cross],
                eager=eager, prefill_step_size=7,
            )  # fmt: skip
        elif action == "stop":
            answer = talk.stream_reply("abc"[len(message) % 3], message, **options)
            next(answer)
            answer.close()
        else:
            talk.reply(action, message, prefill=prefill, **options)
        return talk

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS, how=st.sampled_from([(None, False), (False, False), (None, True)]))
    def run(steps: list, how: tuple[bool | None, bool]) -> None:
        talks = {
            cross: Conversation(
                models[cross], translators[cross], eager=eager, prefill_step_size=7,
                enable_thinking=how[0], verbatim=how[1],
            )
            for cross in (False, True)
        }  # fmt: skip
        for step in steps:
            talks = {cross: act(talk, cross, step) for cross, talk in talks.items()}
            plain, mixed = talks[False], talks[True]
            assert mixed.messages == plain.messages
            assert mixed.transcript.tokens == plain.transcript.tokens
            for line in mixed.lines.values():
                assert {c.offset for c in line._caches} == {len(line)}
                assert (line.spans[-1].stop if line.spans else 0) == len(line)
                assert len(line.entries) == len(line) + 1  # type: ignore[attr-defined]

    run()


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
        assert eagerly.translated == 0 and (lazily.translated > 20) == (turn > 0)
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
