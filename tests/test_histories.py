"""Histories that are resent, edited, truncated and dropped, against mlx-lm and a plain list."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from test_conversation import talk_of

import kvlingo_mlx as kv
from kvlingo_mlx.conversation import Conversation
from kvlingo_mlx.conversation.spans import common_prefix
from kvlingo_mlx.language_model import LanguageModel

NEW = 6
EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "6"))  # more of them by hand
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


def plain_text(model: LanguageModel) -> Mask:
    """Only tokens of letters, one or more, and the stop: text that any decoder gives back."""
    mask = np.full(model.geometry.embedding_rows, -np.inf, np.float32)
    for token in range(len(model.tokenizer.get_vocab())):
        text = model.tokenizer.decode([token])
        if text and all(c in "abcdefghijklmnopqrstuvwxyz" for c in text):
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
    assert first.cached_tokens <= kept  # a ring may have to go back further
    if first.cached_tokens < kept:
        assert any(layer.window for layer in shadow.model.geometry.layers)
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
        assert {cache.offset for cache in each._caches} == {len(each)}
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
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_any_history_is_answered_as_if_read_anew(
    model: LanguageModel, windowed: LanguageModel, family: str, on_full: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Switches between copies of one model are no change; nor is what a line kept of a history."""
    one = model if family == "qwen3" else windowed
    only = plain_text(one)
    room = None
    if on_full == "drop_oldest":
        room = 110
        monkeypatch.setattr(LanguageModel, "context_length", room)

    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # to shrink one takes minutes
    )  # fmt: skip
    @given(steps=STEPS, thinking=st.sampled_from([None, False]))
    def run(steps: list[Any], thinking: bool | None) -> None:
        header = "" if thinking is None else "<think>\n\n</think>\n\n"
        talk = talk_of(one, "ab", enable_thinking=thinking, on_full=on_full)
        shadow = Shadow(one)
        for action, name, edit, number in steps:
            asked = {"role": "user", "content": MESSAGES[number % 4]}
            history = edited(shadow.messages, edit, number)
            if room is None and len(history) > 16:
                return
            known = {"header": header, "room": room}
            if action == "ask":
                options: dict[str, Any] = {"message": asked["content"]}
                reply(talk, shadow, name, [*shadow.messages, asked], only, **known, **options)
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
                talk = Conversation.resume(
                    folder, dict.fromkeys("ab", one), talk.exchange.translators.values(),
                    prefill_step_size=7, on_full=on_full,
                )  # fmt: skip

    run()
