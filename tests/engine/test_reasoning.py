"""Conversations in which one model writes the reasoning trace and another one the answer."""

import warnings

import pytest

from kvlingo_mlx.embedded import TRANSLATORS, dialogues
from kvlingo_mlx.engine.conversation import Conversation
from tests.support.fixtures import Models, Pair
from tests.support.talks import expected

PAIRS = ("tiny-qwen3-s--tiny-qwen3-l", "tiny-qwen3-l--tiny-qwen3-s")
END = "</think>"


@pytest.fixture
def models(pair: Pair) -> Models:
    return dict(zip(("small", "large"), pair, strict=True))


@pytest.fixture
def talk(models: Models) -> Conversation:
    """A conversation on facts, some of which will be asked for."""
    made = Conversation(models, [str(TRANSLATORS / pair) for pair in PAIRS],
                        enable_thinking=True)  # fmt: skip
    made.transcript.messages += TALK.messages[:-1]
    return made


TALK = next(iter(dialogues.held_out(1)))


def test_one_model_thinks_and_the_other_answers(talk: Conversation, models: Models) -> None:
    asked = TALK.questions[0]
    prompt = talk.transcript.prompt(models["small"], [{"role": "user", "content": asked}])
    whole, decode = expected(models["small"], prompt, 80), models["small"].tokenizer.decode
    thought = next(whole[:n] for n in range(len(whole) + 1) if END in decode(whole[:n]))
    answers = list(talk.stream_reply("large", asked, reasoning="small", max_tokens=80))
    found = [response.token for response in answers]
    assert found[: len(thought)] == thought and len(found) > len(thought)
    spans = [s for s in talk.lines["large"].spans if s.stop > len(prompt)]
    assert [s.writer for s in spans] == ["small", "large"]
    ended = len(prompt) + len(thought)
    # The trace's last token is the first that the other model runs.
    assert spans[0].stop == ended - 1 and spans[-1].stop == len(prompt) + len(found)
    said = talk.messages[-1]
    assert END in "".join(response.text for response in answers) and said["content"].strip()
    # The template strips the thought from an earlier turn: nothing of it is in the next prompt.
    talk.reply("small", TALK.questions[1], max_tokens=80)
    kept = models["small"].tokenizer.decode(talk.transcript.tokens)
    assert said["reasoning_content"].strip() not in kept


def test_an_answer_without_a_trace_is_told(talk: Conversation) -> None:
    with pytest.warns(UserWarning, match="small ended a reasoning trace .*, so large wrote noth"):
        talk.reply("large", TALK.questions[0], reasoning="small", max_tokens=2)
    writers = {s.writer for s in talk.lines["small"].spans}
    assert writers == {"small"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        talk.reply("large", TALK.questions[1], max_tokens=80)
