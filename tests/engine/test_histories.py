"""Histories that are resent, edited, truncated and dropped, against mlx-lm and a plain list."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.spans import common_prefix
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import hybrid_models, tiny
from tests.support.identity import identity_of
from tests.support.talks import check_caches, talk_of, thought
from tests.support.tools import TOOLS, TOOLS_TEMPLATE
from tests.support.two_tokenizers import identities, write_mistral, write_qwen, write_translator

NEW = 6
EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "4"))  # more of them by hand
MESSAGES = ("the use of an other", "is it on?", "and you", "hi there")
Mask = Callable[[mx.array, mx.array], mx.array]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    kind, sizes = tiny.FAMILIES["qwen3"]
    return kv.load(tiny.write_tiny_model(tmp_path_factory.mktemp("m") / "qwen3", kind, **sizes))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    kind, sizes = tiny.FAMILIES["gemma3"]
    return kv.load(tiny.write_tiny_model(tmp_path_factory.mktemp("m") / "gemma3", kind, **sizes))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("m") / "granite"
    return kv.load(hybrid_models.write_hybrid_model(folder, "granitemoehybrid"))


def plain_text(model: LanguageModel, most: int = 9) -> Mask:
    """Only tokens of letters, ``most`` at most, and the stop: what any decoder gives back."""
    mask = np.full(model.geometry.embedding_rows, -np.inf, np.float32)
    for token in range(len(model.tokenizer.get_vocab())):
        text = model.tokenizer.decode([token])
        if 0 < len(text) <= most and all(c in "abcdefghijklmnopqrstuvwxyz" for c in text):
            mask[token] = 0
    mask[list(model.tokenizer.eos_token_ids)] = 0
    return lambda tokens, logits: logits + mx.array(mask)


def decoded(model: LanguageModel, prompt: list[int], only: Mask) -> list[int]:
    """What mlx-lm answers to a prompt that it reads whole."""
    stops, answer = model.tokenizer.eos_token_ids, []
    for token, _ in generate_step(
        mx.array(prompt), model.model, max_tokens=NEW, logits_processors=[only]
    ):
        answer.append(int(token))
        if answer[-1] in stops:
            break
    return answer


class Shadow:
    """A conversation as a list: messages, and the tokens in which answers were written."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.spelled = model, dict[str, list[int]]()
        self.messages: list[dict[str, Any]] = []
        self.before: list[list[dict[str, Any]]] = []

    def _encode(self, text: str) -> list[int]:
        return list(self.model.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: list[dict[str, Any]], header: str) -> list[int]:
        """All tokens: answers as they were written, what stands between them as one text."""
        ids, text = [], ""
        for message in messages:
            opened = f"<|im_start|>{message['role']}\n"
            if message["role"] == "assistant" and message["content"] in self.spelled:
                ids += self._encode(text + opened) + self.spelled[message["content"]]
                text = "<|im_end|>\n"
            else:
                text += f"{opened}{message['content']}<|im_end|>\n"
        return ids + self._encode(text + "<|im_start|>assistant\n" + header)

    def dropped(self, messages: list[dict[str, Any]], room: int, header: str) -> list[Any]:
        """Messages without the oldest turns that leave an answer no room."""
        while len(self.prompt(messages, header)) + NEW > room + 1:
            users = [i for i, m in enumerate(messages) if m["role"] == "user"]
            if len(users) < 2:
                break
            kept = [m for m in messages[: users[0]] if m["role"] == "system"]
            messages = kept + messages[users[1] :]
        return messages

    def cut(self, characters: int) -> None:
        """The last answer's first characters: its whole tokens, and the rest cut anew."""
        content = self.messages[-1]["content"]
        left = content[:characters]
        self.messages = [*self.messages[:-1], {"role": "assistant", "content": left}]
        ids, whole = self.spelled.get(content, []), 0
        for count in range(1, len(ids) + 1):
            if left.startswith(self.model.tokenizer.decode(ids[:count])):
                whole = count
        if left and left != content:
            done = len(self.model.tokenizer.decode(ids[:whole]))
            self.spelled[left] = ids[:whole] + self._encode(left[done:])


def reply(
    talk: Conversation, shadow: Shadow, name: str, new: list[Any], only: Mask,
    *, header: str = "", room: int | None = None, **options: Any,
) -> list[Any]:  # fmt: skip
    """One reply to all of ``new``, which must be mlx-lm's own; its responses."""
    asked = new if room is None else shadow.dropped(new, room, header)
    prompt = shadow.prompt(asked, header)
    line = talk.lines[name]
    held = list(line.tokens)
    responses = list(talk.stream_reply(name, max_tokens=NEW, logits_processors=[only], **options))
    answer = decoded(shadow.model, prompt, only)
    assert [r.token for r in responses] == answer
    assert responses[0].prompt_tokens == len(prompt)
    kept, first = common_prefix(held, prompt[:-1]), responses[0]
    there = first.cached_tokens + first.ahead_tokens
    assert there <= kept  # a ring or a state may have to go back further
    if there < kept:
        across = talk.exchange.several
        assert across or any(map(caches.forgets, line._caches))
    assert first.cached_tokens + first.translated_tokens + first.read_tokens == len(prompt)
    stops = shadow.model.tokenizer.eos_token_ids
    ids = answer[:-1] if answer[-1] in stops else answer
    text = "".join(r.text for r in responses)
    assert text == shadow.model.tokenizer.decode(ids)
    shadow.before.append(shadow.messages)
    shadow.messages = [*asked, {"role": "assistant", "content": text}]
    if text:
        shadow.spelled[text] = ids
    assert talk.messages == shadow.messages
    for each in talk.lines.values():
        check_caches(each)
    return responses


EDITS = ("append", "edit", "shorten", "answer", "system")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "history", "set", "truncate", "undo", "branch", "resume"]),
        st.sampled_from("abb"),
        st.sampled_from(EDITS),
        st.integers(0, 999),
    ),
    min_size=3,
    max_size=9,
)


def edited(messages: list[Any], edit: str, number: int) -> list[Any]:
    """A history that ends with a user's message, with one change somewhere."""
    history = [dict(message) for message in messages]
    at = number % (len(history) or 1)
    if edit == "shorten":
        history = history[:at]
    elif edit == "system":
        history = [{"role": "system", "content": MESSAGES[number % 4]}] + [
            m for m in history if m["role"] != "system"
        ]
    elif history and (edit == "edit" or (edit == "answer" and at % 2)):
        history[at]["content"] += " so"
    return [*history, {"role": "user", "content": MESSAGES[number % 4]}]


@pytest.mark.parametrize("on_full", ["error", "drop_oldest"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "granite", "two tokenizers"])
def test_any_history_is_answered_as_if_read_anew(
    model: LanguageModel, windowed: LanguageModel, hybrid: LanguageModel,
    twins: list[LanguageModel], family: str, on_full: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Switches between copies of one model are no change; nor is what a line kept of a history."""
    one = {
        "qwen3": model, "gemma3": windowed, "granite": hybrid, "two tokenizers": twins[0],
    }[family]  # fmt: skip
    only = plain_text(one, 1 if family == "two tokenizers" else 9)
    models = dict(zip("ab", twins if family == "two tokenizers" else [one, one], strict=True))
    across = [identity_of(one, capture=one.family.points[0])]
    if family == "two tokenizers":
        across = identities(*twins)
    room = None
    if on_full == "drop_oldest":
        room = 250 if family == "two tokenizers" else 110  # letters are tokens there
        monkeypatch.setattr(LanguageModel, "context_length", room)

    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # to shrink one takes minutes
    )  # fmt: skip
    @given(steps=STEPS, thinking=st.sampled_from([None, False]))
    def run(steps: list[Any], thinking: bool | None) -> None:
        if family == "two tokenizers":  # an answer is taken over in the context it was written in
            thinking = None
        header = "" if thinking is None else "<think>\n\n</think>\n\n"
        options: dict[str, Any] = {"prefill_step_size": 7, "on_full": on_full}
        talk = Conversation(models, across, enable_thinking=thinking, **options)
        shadow = Shadow(one)
        for action, name, edit, number in steps:
            asked = {"role": "user", "content": MESSAGES[number % 4]}
            history = edited(shadow.messages, edit, number)
            if room is None and len(history) > 16:
                return
            known = {"header": header, "room": room}
            if action == "ask":
                new = [*shadow.messages, asked]
                reply(talk, shadow, name, new, only, **known, message=asked["content"])
            elif action == "history":
                reply(talk, shadow, name, history, only, **known, messages=history)
            elif action == "set":
                talk.messages = history
                assert talk.messages == history
                shadow.before.append(shadow.messages)
                shadow.messages = history
                reply(talk, shadow, name, history, only, **known)
            elif (
                action == "truncate"
                and shadow.messages[-1:]
                and (shadow.messages[-1]["role"] == "assistant")
            ):
                characters = number % (len(shadow.messages[-1]["content"]) + 1)
                talk.truncate_answer(characters)
                shadow.cut(characters)
                assert talk.messages == shadow.messages
            elif action == "undo" and shadow.before:
                talk.undo()
                shadow.messages = shadow.before.pop()
                assert talk.messages == shadow.messages
            elif action == "branch":
                left, talk = talk, talk.branch()
                left.reply("a", "something else", max_tokens=2)
            elif action == "resume":
                folder = talk.save(tmp_path / "talk")
                talk = Conversation.resume(folder, models, across, **options)

    run()


# ---- what clients send back -------------------------------------------------------------------


@pytest.mark.parametrize("verbatim", [True, False])
def test_a_history_without_its_reasoning_is_ours(model: LanguageModel, verbatim: bool) -> None:
    """It costs the new turn alone, and the answer's tokens are those that were written."""
    talk = talk_of(model, verbatim=verbatim)
    ids = thought(talk, "a", "hi there", "<think>the use of it</think>\n\nin the house")
    held = talk.transcript.tokens
    sent = [
        {"role": "user", "content": "hi there"},
        {"role": "assistant", "content": "in the house", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "and you", "name": None},
    ]
    first = next(iter(talk.stream_reply("a", messages=sent, max_tokens=NEW)))
    assert first.cached_tokens == len(held) == first.prompt_tokens - first.read_tokens
    assert talk.transcript.tokens[: len(held)] == held and held[-len(ids) :] == ids
    assert talk.messages[1]["reasoning_content"] == "the use of it"
    other = talk_of(model, verbatim=verbatim)
    thought(other, "a", "hi there", "<think>the use of it</think>\n\nin the house")
    sent[1]["content"] = "in the boat"  # another answer is no answer of ours
    first = next(iter(other.stream_reply("a", messages=sent, max_tokens=NEW)))
    assert first.cached_tokens <= len(held) - len(ids)
    assert other.messages[1]["content"] == "in the boat"


def test_parsed_calls_are_the_answer_that_made_them(tmp_path: Path) -> None:
    kind, sizes = tiny.FAMILIES["qwen3"]
    folder = tiny.write_tiny_model(tmp_path / "tools", kind, **sizes)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TOOLS_TEMPLATE}))
    talk = talk_of(kv.load(folder), tools=TOOLS)
    call = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    thought(talk, "a", "hi", call)
    held = len(talk.transcript.tokens)
    for arguments, kept in (('{"at":1}', True), ('{"at": 2}', False)):
        function = {"name": "look", "arguments": arguments}
        sent = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": "x", "type": "function", "function": function}]},
            {"role": "tool", "content": "a lamp"},
        ]  # fmt: skip
        at = talk.branch()
        first = next(iter(at.stream_reply("b", messages=sent, max_tokens=NEW)))
        assert (first.cached_tokens + first.translated_tokens >= held) is kept


# ---- a full context ---------------------------------------------------------------------------


def test_a_full_context_drops_whole_turns_or_says_so(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "context_length", 100)
    only = plain_text(model)
    talks = {policy: talk_of(model, on_full=policy, system="be kind")
             for policy in ("error", "drop_oldest")}  # fmt: skip
    with pytest.raises(ValueError, match="the context of .* is 100; shorten the prompt"):
        for _ in range(9):
            talks["error"].reply("a", "is it on?", max_tokens=NEW, logits_processors=[only])
    talk, before = talks["drop_oldest"], list[Any]()
    for turn in range(9):
        earlier, before = before, talk.messages
        talk.reply("ab"[turn % 2], "is it on?", max_tokens=NEW, logits_processors=[only])
        assert talk.messages[0] == {"role": "system", "content": "be kind"}
        assert [m["role"] for m in talk.messages[1:]] == ["user", "assistant"] * (
            len(talk.messages) // 2
        )
    assert len(before) == len(earlier) == len(talk.messages) < 12
    # The system message is not read again.
    system = model.tokenizer.encode("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n")
    assert talk.last_switch is not None and talk.last_switch.kept >= len(system)
    talk.undo()
    assert talk.messages == before  # what was dropped is back
    talk.branch().reply("a", "and you", max_tokens=NEW)
    with pytest.raises(ValueError, match="the context of"):  # one turn alone is not dropped
        talk.reply("a", "is it on? " * 40, max_tokens=NEW)
    assert talk.messages == before
    with pytest.raises(ValueError, match="on_full is 'drop'; give error or drop_oldest"):
        talk_of(model, on_full="drop")


# ---- setting and truncating -------------------------------------------------------------------


def test_what_cannot_be_truncated_or_set_is_said(model: LanguageModel) -> None:
    talk = talk_of(model)
    with pytest.raises(ValueError, match="the last message is no answer, so there is nothing"):
        talk.truncate_answer(1)
    thought(talk, "a", "hi there", "in the house")
    with pytest.raises(ValueError, match="but the answer has 12; give 0 to 12"):
        talk.truncate_answer(13)
    with pytest.raises(
        ValueError, match="characters is -1; give a number of characters, 0 or more"
    ):
        talk.truncate_answer(-1)
    with pytest.raises(ValueError, match="characters is '3'; give a number of characters"):
        talk.truncate_answer("3")  # type: ignore[arg-type]
    for wrong in ("hi", ["hi"], [{"content": "hi"}]):
        with pytest.raises(ValueError, match="give "):
            talk.messages = wrong  # type: ignore[assignment]
    answer = talk.stream_reply("a", "x", max_tokens=3)
    next(answer)
    for change in (lambda: talk.truncate_answer(1), lambda: setattr(talk, "messages", [])):
        with pytest.raises(ValueError, match="an answer is still being written"):
            change()
    answer.close()
    talk.undo()
    assert [m["content"] for m in talk.messages] == ["hi there", "in the house"]
    talk.messages = []
    assert talk.messages == []
    talk.undo()  # takes back the change
    assert len(talk.messages) == 2


# ---- two tokenizers ---------------------------------------------------------------------------


def test_an_answer_cut_short_is_read_so_by_another_tokenizer(tmp_path: Path) -> None:
    """What is left are the tokens written; the other model's reading ends there, too."""
    folders = write_qwen(tmp_path / "qwen"), write_mistral(tmp_path / "mistral")
    names = ("qwen", "mistral")
    there = write_translator(tmp_path / "there", *folders)
    back = write_translator(tmp_path / "back", *folders[::-1], seed=11)
    models = {name: kv.load(folder) for name, folder in zip(names, folders, strict=True)}
    for writer, reader in (names, names[::-1]):
        for way in ("truncate", "stop"):
            talk = Conversation(models, [there, back], eager=way == "stop")
            ids = iter(spelled(models[writer], "in the house"))
            options = {"stop": "he h"} if way == "stop" else {}
            talk.reply(writer, "Where?", sampler=lambda _, i=ids: mx.array([next(i)]), **options)
            prompt = [m for m in talk.messages if m["role"] == "user"]
            if way == "truncate":
                talk.truncate_answer(4)
            assert talk.messages[-1]["content"] == "in t"
            first = next(iter(talk.stream_reply(reader, "And?", max_tokens=3)))
            assert first.translated_tokens > 0 or way == "stop"  # eager: it has it already
            turns = [*prompt, {"role": "assistant", "content": "in t"},
                     {"role": "user", "content": "And?"}]  # fmt: skip
            transcript: Any = talk.transcript
            for name in names:
                reading = transcript.undo().reading(models[name], turns[-1:])
                assert reading.text == models[name].tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True
                )
                held = talk.lines[name]
                assert "ouse" not in models[name].tokenizer.decode(held.tokens) or name == writer
    for options, message in (({"kv_bits": 4}, "kv_bits"), ({"draft_model": "qwen"}, "draft_model")):
        with pytest.raises(ValueError, match=f"{message} cannot be used .*several tokenizers"):
            talk.reply("mistral", "hi", **options)


def spelled(model: LanguageModel, text: str) -> list[int]:
    """Tokens of an answer with its stop."""
    stop = int(model.tokenizer.eos_token_id)
    return [*model.tokenizer.encode(text, add_special_tokens=False), *[stop] * 9]
