"""Histories that go by chance: the server's answers are those of the library's conversations."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.engine.responses import GenerationResponse
from tests.support.engines import NAMES, asked, user, zoo_clients
from tests.support.fixtures import Models

Message = dict[str, Any]
Answers = Callable[[Sequence[tuple[str, list[Message]]]], list[str]]
WORDS = "Anna Oscar Maria Iris Rome Oslo Dallas code friend home lives works".split()
NEW = 12  # tokens an answer
TIE = 1e-3  # nats between two first choices below which rounding may decide
DROPPED = 2  # a client that takes back more messages than these goes on beside the old history


@dataclass
class Branch:
    """A history, and the conversation that has the same one."""

    talk: kv.Conversation
    messages: list[Message] = field(default_factory=list)


class Client:
    """One client: several histories, of which one grows at a time."""

    def __init__(self, models: Mapping[str, Any], number: int, seed: int) -> None:
        self._models, self._number = models, number
        self._rng = random.Random(1000 * seed + number)
        self._branches = [self._fresh()]
        self._now = self._branches[0]
        self.ties = 0

    def _fresh(self) -> Branch:
        return Branch(kv.Conversation(self._models, enable_thinking=False))

    def _question(self) -> Message:
        """No other client asks it, so that no two of them share more than a header."""
        words = self._rng.choices(WORDS, k=self._rng.randint(3, 12))
        return user(f"Client {self._number}: {' '.join(words)}?")

    def act(self) -> tuple[str, list[Message]]:
        """The next request: a model's name, and all messages."""
        what, now = self._rng.random(), self._now
        if what < 0.1 and len(self._branches) > 1:
            self._now = now = self._rng.choice(self._branches)
            now.messages = [*now.messages, self._question()]
        elif what < 0.2 and now.messages:  # the last answer again, by whichever model
            now.messages = now.messages[:-1]
        elif what < 0.35 and len(now.messages) > 2:  # an edited question
            now.messages = [*now.messages[:-2], self._question()]
        elif what < 0.5 and len(now.messages) > 4:  # a branch; the old history may go on later
            start = 2 * self._rng.randrange(1, (len(now.messages) - DROPPED) // 2)
            self._now = Branch(now.talk.branch(), [*now.messages[:start], self._question()])
            self._branches.append(self._now)
        elif what < 0.55:
            self._now = self._fresh()
            self._now.messages = [self._question()]
            self._branches.append(self._now)
        else:
            now.messages = [*now.messages, self._question()]
        return self._rng.choice(list(self._models)), list(self._now.messages)

    def check(self, name: str, answer: str) -> None:
        """Raise unless the conversation says the same, or two first choices were tied.

        After a tie the histories differ, so the client begins anew.
        """
        messages = self._now.messages
        responses = list(self._now.talk.stream_reply(name, messages=messages, max_tokens=NEW))
        expected = "".join(response.text for response in responses)
        if answer.strip() == expected.strip():
            self._now.messages = [*messages, {"role": "assistant", "content": answer}]
            return
        assert closest(responses) < TIE, f"{name} said {answer!r}, not {expected!r}: {messages}"
        self.ties += 1
        self._branches = [self._fresh()]
        self._now = self._branches[0]


def closest(responses: Sequence[GenerationResponse]) -> float:
    """The least distance in nats between two first choices of an answer."""
    found: list[float] = []
    for response in responses:
        likeliest: Any = sorted(response.logprobs.tolist())[-2:]
        found.append(likeliest[1] - likeliest[0])
    return min(found)


def compare(answers: Answers, models: Mapping[str, Any], seed: int, rounds: int) -> int:
    """Let clients ask at once, so many rounds; return how many answers were ties."""
    clients = [Client(models, number, seed) for number in range(4)]
    for _ in range(rounds):
        asks = [client.act() for client in clients]
        for client, ask, answer in zip(clients, asks, answers(asks), strict=True):
            client.check(ask[0], answer)
    return sum(client.ties for client in clients)


EXAMPLES = int(os.environ.get("KVLINGO_EXAMPLES", "1"))  # more of them by hand
Asks = Sequence[tuple[str, list[Message]]]


@pytest.fixture(scope="module")
def models() -> Models:
    return {name: kv.load(zoo(folder)) for name, folder in NAMES.items()}


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_the_engine_answers_as_a_conversation(models: Models, tmp_path: Path, seed: int) -> None:
    clients = zoo_clients(tmp_path)

    def answers(asks: Asks) -> list[str]:
        return [told.text for told in clients.together([asked(*ask) for ask in asks])]

    assert compare(answers, models, seed, rounds=5) <= 1


def test_a_forgotten_message_is_noticed(models: Models, tmp_path: Path) -> None:
    clients = zoo_clients(tmp_path)

    def answers(asks: Asks) -> list[str]:
        return [told.text for told in clients.together([asked(n, m[-1:]) for n, m in asks])]

    with pytest.raises(AssertionError, match="said .*, not "):
        compare(answers, models, 0, rounds=5)
