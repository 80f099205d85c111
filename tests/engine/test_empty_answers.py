"""A warning where an answer gives the user nothing, and none where it does."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.loading import notes
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.fixtures import Patch, Temp
from tests.support.talks import writing
from tests.support.warned import told

MESSAGES = [{"role": "user", "content": "The hotel of Emma is Lima. What is the hotel of Emma?"}]
TEXT = MESSAGES[0]["content"]
END, WORD = "<|im_end|>", "Lima"


@pytest.fixture(scope="module")
def model(tmp_path_factory: Temp) -> LanguageModel:
    """A copy, which is no embedded model, so that it thinks unless it is told otherwise."""
    folder = tmp_path_factory.mktemp("copy") / "l"
    return kv.load(shutil.copytree(zoo("tiny-qwen3-l"), folder))


@pytest.fixture(autouse=True)
def untold(monkeypatch: Patch) -> None:
    monkeypatch.setattr(notes, "_told", set())


def spelling(model: LanguageModel, *texts: str) -> Callable[[Any], Any]:
    """A sampler that writes these texts, one token after the other."""
    ids = [i for t in texts for i in model.tokenizer.encode(t, add_special_tokens=False)]
    return writing([*ids, int(model.tokenizer.eos_token_id)])


CASES: list[tuple[tuple[str, ...], Any, dict[str, Any], str | None]] = [
    ((WORD, END), MESSAGES, {}, None),
    (("<think>", "I look.", "</think>", WORD, END), MESSAGES, {}, None),
    ((END,), MESSAGES, {}, "(finish reason stop) without a word; give enable_thinking=False"),
    ((END,), MESSAGES, {"enable_thinking": False}, "without a word; ask in other words"),
    (("<think>", "I look.", "</think>", END), MESSAGES, {}, "answer after its reasoning by itself"),
    (("<think>", "I look for it"), MESSAGES, {"max_tokens": 3}, "was cut while it was reasoning"),
    ((WORD, " is it"), MESSAGES, {"max_tokens": 2}, None),
    ((WORD, END), MESSAGES, {"stop": WORD}, f"at the stop text {WORD!r}"),
    ((WORD, END), TEXT, {}, None),
    ((WORD, "<|im_start|>", "user", END), TEXT, {}, "a text is taken as it is; give messages"),
    ((WORD, "<|im_start|>", "user", END), f"<|im_start|>user\n{TEXT}", {}, None),
    ((WORD, "<|im_start|>", "user", END), MESSAGES, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("written", "prompt", "options", "expected"), CASES)
def test_what_is_told_of_an_answer(
    model: LanguageModel,
    written: tuple[str, ...],
    prompt: Any,
    options: dict[str, Any],
    expected: str | None,
) -> None:
    """By ``generate``, and where messages are given also by a conversation."""
    calls = [
        lambda: kv.generate(model, model, prompt, sampler=spelling(model, *written), **options)
    ]
    if prompt is MESSAGES:
        talk = kv.Conversation({"a": model})
        calls.append(lambda: talk.reply("a", TEXT, sampler=spelling(model, *written), **options))
    for call in calls:
        found = told(call)
        assert len(found) == (expected is not None), found
        assert expected is None or expected in found[0]


def test_an_answer_that_the_caller_ends_is_not_judged(model: LanguageModel) -> None:
    talk = kv.Conversation({"a": model})

    def first() -> None:
        responses = talk.stream_reply("a", TEXT, sampler=spelling(model, "<think>", "I look"))
        next(responses)
        responses.close()

    assert told(first) == []


def test_every_stated_fact_is_known_for_one() -> None:
    for talk in dialogues.held_out(20):
        for message in talk.messages[:-1]:
            if message["role"] == "user":
                assert dialogues.states_a_fact(message["content"])
        assert not any(map(dialogues.states_a_fact, talk.questions))
    assert not dialogues.states_a_fact("What is the capital of France? The sky is blue.")
